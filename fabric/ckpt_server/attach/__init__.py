"""A trainer's side of its own checkpoint server: find or start the process, share memory, send requests."""
