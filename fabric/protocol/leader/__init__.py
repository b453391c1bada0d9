"""The leader core: one job's membership, as the elected lighthouse decides it. Pure."""
