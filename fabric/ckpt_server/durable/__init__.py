"""Durable checkpoints: a separate process writes them from a snapshot's memory; reading unpickles nothing."""
