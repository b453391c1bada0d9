"""A trainer's way to its own checkpoint server: find or start the process, share memory, ask."""
