"""The election of the leader, and its writes to the store."""
