"""The connections of members: admits them, checks their messages, and writes to them without waiting."""
