"""Data planes over the collectives of a library: one communicator per epoch."""
