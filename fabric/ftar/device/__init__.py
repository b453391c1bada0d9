"""Data planes for tensors in a device's memory.

``seam`` is the thin interface to a device, with ``cuda`` and ``host`` behind it; ``ring`` is the plane that
moves chunks through staging or shared device memory; ``group`` keeps one communicator per epoch, and
``nccl`` is the communicator that it is for.
"""
