"""Local copies of shards that any number of processes share.

Layers, low to high: `entries` (what a copy is called and what is known of it), `room` (which copies leave when there
is no room), `filling` (from a source to a whole copy), `folder` (the copies of a folder), `copies` (the shards of a
stage).
"""
