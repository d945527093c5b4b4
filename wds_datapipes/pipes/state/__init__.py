"""Resume state of pipelines: positions, seeds and fingerprints of their stages."""
