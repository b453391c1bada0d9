"""``fabric diagnose``: recorded collectives from files, servers or a living job, explained."""
