"""Data planes for tensors in a device's memory.

``device_api`` is the thin interface to a device, and ``cuda`` implements it. ``device_ring`` is the plane
that moves chunks through staging memory or shared device memory.
"""
