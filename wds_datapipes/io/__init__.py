"""Opening, reading and writing files by URL, local and remote."""
