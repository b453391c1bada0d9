"""Judges a run from the journals of its replicas: whether it kept the promises of the protocol."""
