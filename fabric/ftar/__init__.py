"""FTAR, the fault tolerant all-reduce: the data plane that moves and sums tensors between replicas.

Deciding (who is a member, which round, when to abort and retry) is the protocol's; here bytes are moved.
``plane`` is the interface, ``cpu_ring`` the plane for CPU tensors, ``buckets`` the way between a model's
gradients and one flat buffer.
"""
