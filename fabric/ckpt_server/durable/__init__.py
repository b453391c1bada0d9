"""Durable checkpoints: written from a snapshot's memory by a process of their own, restored without
unpickling."""
