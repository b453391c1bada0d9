"""Reads the recorded collectives of all ranks, checks and compares them, and explains them in sentences."""
