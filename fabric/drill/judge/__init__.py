"""Pure: judges a drill from journals, recovery records and the drill's own observations."""
