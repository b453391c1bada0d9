"""Data planes that use a library's collectives, such as NCCL's: one communicator per epoch."""
