"""Record shards: files of concatenated msgpack or CBOR values, and JSON lines."""
