"""The ring for tensors in host memory: over TCP, or by reference in shared memory."""
