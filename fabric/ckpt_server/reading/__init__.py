"""A state read from any place: a file, a durable checkpoint, or snapshots on checkpoint servers."""
