"""Fingerprints: short digests that identify functions and values by their code and arguments."""
