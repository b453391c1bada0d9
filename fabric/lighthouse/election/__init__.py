"""Which lighthouse leads, and how it writes to the store."""
