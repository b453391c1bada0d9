"""Collectives between replicas: calls of the user's code, outside of the step's commit."""
