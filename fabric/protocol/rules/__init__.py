"""Decisions as functions of plain values: assignment, forced epochs, poison, wait-for graph. Pure."""
