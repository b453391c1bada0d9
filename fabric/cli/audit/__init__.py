"""Judging a run from the journals of its replicas: what was promised, and whether it was kept."""
