"""Tar archives: readers for headers and members, and a header writer."""
