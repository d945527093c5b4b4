"""From one process to another: items go one way, over a socket and shared memory; credits and commands go the other.

Nothing here knows of datapipes. `packing` turns an item into bytes and arrays, `segments` holds the shared memory,
`outlet` sends, `inlet` receives, and `status` is a page of memory on which a process says what it is at.
"""
