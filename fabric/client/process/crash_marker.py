"""Records which micro-batch the main thread computes, in memory that outlives this process.

Should the process die there, the checkpoint server tells the lighthouse. A micro-batch at which two processes
died is poison: the lighthouse gives it to no third one. See ``fabric.ckpt_server.server.crash_position``.
"""

from fabric.ckpt_server.attach.server_handle import ServerHandle
from fabric.ckpt_server.server.crash_position import MARKER_BYTES, encode_marker
from fabric.errors import FabricError


class CrashMarker:
    """Eight bytes in the checkpoint server's memory, or nowhere while there is no server."""

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
        """Record that the main thread computes no micro-batch: a death now is not the fault of one."""
        if self._word is not None:
            self._word[0] = 0
