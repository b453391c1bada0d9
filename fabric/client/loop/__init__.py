"""What the user's training loop holds: the session, its steps, how it starts, catches up and ends."""
