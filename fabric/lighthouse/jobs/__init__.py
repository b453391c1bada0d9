"""The jobs of this lighthouse: their cores, their records in the store, their events."""
