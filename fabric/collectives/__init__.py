"""Recorded collectives of all ranks: read without trust, compared, and explained in sentences."""
