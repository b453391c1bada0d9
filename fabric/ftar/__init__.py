"""FTAR, the fault tolerant all-reduce: the data plane that moves and sums tensors between replicas.

The protocol decides (the members, the round, when to abort and retry); this package moves bytes. ``plane`` is
the interface, ``cpu_ring`` the plane for CPU tensors. ``buckets`` packs a model's gradients into one flat
buffer and unpacks them.
"""
