"""Gradients on their way: buckets, buffers in shared memory, the exchange thread."""
