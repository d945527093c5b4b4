"""`ShardReadingService`: DataLoader2's reading service for worker processes and ranks."""
