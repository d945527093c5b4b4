"""Writing files by URL: sinks for local files, open streams, commands and uploads to stores."""
