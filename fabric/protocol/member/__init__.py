"""The member core: one replica's part in epochs, rounds, recovery and joining. Pure."""
