"""The transport between two processes: items one way over a socket and shared memory, credits and commands the other.

It is independent of datapipes. `serialization` converts items to bytes and arrays, `shared_memory` manages segments,
`sender` sends, `receiver` receives, and `status_page` shows what a process has done while it is busy.
"""
