"""Records which micro-batch the main thread computes, in memory that outlives this process.

If the process dies there, the checkpoint server reports the micro-batch to the lighthouse. A micro-batch at
which two processes died is poison, which the lighthouse assigns to no process. See
``fabric.ckpt_server.server.trainer_watch``.
"""

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.server.trainer_watch import MARKER_BYTES, encode_marker
from fabric.errors import FabricError


class CrashMarker:
    """Eight bytes in the checkpoint server's memory. Without a server nothing is recorded."""

    def __init__(self, handle: ServerHandle) -> None:
        self._handle = handle
        self._word: memoryview | None = None
        self.renew()

    def renew(self) -> None:
        """Move to the memory of a new server."""
        try:
            self._word = self._handle.allocate("crash_marker", 0, MARKER_BYTES).cast("Q")
        except FabricError:
            self._word = None

    def at(self, step: int, micro_batch: int) -> None:
        """Record that the main thread begins this micro-batch."""
        if self._word is not None:
            self._word[0] = encode_marker(step, micro_batch)

    def clear(self) -> None:
        """Record that the main thread computes no micro-batch, so that a death now blames none."""
        if self._word is not None:
            self._word[0] = 0
