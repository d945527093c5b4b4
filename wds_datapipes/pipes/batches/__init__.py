"""Stages of batches."""
