"""The worker processes of a `ShardReadingService`: launch, connection, shutdown."""
