"""Grouping members to samples, and what is done with samples: shuffling, selecting, mixing, joining."""
