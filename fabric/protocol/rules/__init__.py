"""Decisions as functions of plain values: assignment, forced epochs, poison, who waits for whom. Pure."""
