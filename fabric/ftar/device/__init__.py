"""Data planes for tensors in a device's memory.

``cuda`` is a GPU. ``device_ring`` is the plane that moves chunks through staging memory or shared device
memory.
"""
