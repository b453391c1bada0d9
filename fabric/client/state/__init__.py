"""The replica's state: when to snapshot it, from where to load it, whether user code altered it meanwhile."""
