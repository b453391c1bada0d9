"""Parts of one trainer process: identity, journal, crash marker, debug endpoint, log of waits."""
