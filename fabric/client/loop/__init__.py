"""The user's training loop: the session, its steps, its start, catch-up and end."""
