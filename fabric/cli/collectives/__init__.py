"""``fabric diagnose``: explains recorded collectives from files, servers or a living job."""
