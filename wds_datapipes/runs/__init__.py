"""Runs of training: which samples each step had."""
