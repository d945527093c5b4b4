"""Stages that make samples, and stages of samples and batches."""
