"""Things of one trainer process: identity, journal, crash marker, debug endpoint, waiting."""
