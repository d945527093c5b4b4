"""Grouping members into samples, and operations on samples: shuffling, selecting, mixing, joining."""
