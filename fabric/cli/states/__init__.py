"""Commands that look at a state: a file, a durable checkpoint, or a snapshot on a server."""
