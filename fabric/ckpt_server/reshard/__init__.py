"""A state for another layout of ranks, made of slices of the files that the old ranks wrote."""
