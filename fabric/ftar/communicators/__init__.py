"""Data planes over somebody else's collectives: one communicator per epoch."""
