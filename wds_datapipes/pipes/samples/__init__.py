"""Stages that create samples, and stages that operate on samples and batches."""
