"""Patches for known defects of torchdata's own DataLoader2 and reading services."""
