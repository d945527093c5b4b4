"""Packed rows that are planned from lengths and costs in the index."""
