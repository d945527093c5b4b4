"""Train from WebDataset tar shards on torchdata DataPipes."""
