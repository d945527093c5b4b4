"""The transport between two processes: items one way over a socket and shared memory, credits and commands the other.

Nothing here knows of datapipes. `packing` turns an item into bytes and arrays, `segments` holds the shared memory,
`outlet` sends, `inlet` receives, and `status` is a page of memory on which a process says what it is at.
"""
