"""The ring for tensors in host memory: over TCP, or by reference in shared memory."""

from importlib.util import find_spec

if find_spec("fabric.ftar.host.piece_moves") is None:
    raise ImportError(
        "fabric's compiled part is missing in this checkout: install gcc, run `pip install -e .` in it again"
    )
