"""The note of which micro-batch the main thread is at, in memory that outlives this process.

Should it die there, the checkpoint server tells the lighthouse, which gives a micro-batch at which two
processes died to nobody else. See ``fabric.ckpt_server.server.crash_log``.
"""

from fabric.ckpt_server.attach.server_handle import ServerHandle
from fabric.ckpt_server.server.crash_log import MARKER_BYTES, encode_marker
from fabric.errors import FabricError


class CrashMarker:
    """Eight bytes in the checkpoint server's memory, or nowhere while there is no server."""

    def __init__(self, handle: ServerHandle) -> None:
        self._handle = handle
        self._word: memoryview | None = None
        self.renew()

    def renew(self) -> None:
        """The server is another one: take the note to it."""
        try:
            self._word = self._handle.allocate("crash_marker", 0, MARKER_BYTES).cast("Q")
        except FabricError:
            self._word = None

    def at(self, step: int, micro_batch: int) -> None:
        """The main thread begins with this micro-batch."""
        if self._word is not None:
            self._word[0] = encode_marker(step, micro_batch)

    def clear(self) -> None:
        """It is at none: whatever happens now is no micro-batch's doing."""
        if self._word is not None:
            self._word[0] = 0
