"""What the stages of a pipeline record in order to resume: positions, seeds and the fingerprint."""
