"""Tar archives: reading headers and members, and making headers."""
