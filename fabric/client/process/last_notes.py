"""Notes that outlive this process: its micro-batch, the job's end, and the exception of its loop."""

import contextlib
import json
from pathlib import Path

from msgspec import to_builtins

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.server.trainer_watch import MARKER_BYTES, encode_marker
from fabric.errors import FabricError, ProtocolError
from fabric.model import JobEnd
from fabric.protocol.messages.wire import decode_as

_ENDED, _RAISED = "ended.json", "raised.json"


class CrashMarker:
    """Records which micro-batch the main thread computes, in eight bytes of the checkpoint server's memory.

    If the process dies there, the checkpoint server reports the micro-batch to the lighthouse. A micro-batch
    at which two processes died is poison, which the lighthouse assigns to no process. See
    ``fabric.ckpt_server.server.trainer_watch``. Without a server nothing is recorded.
    """

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


def leave_job_end(home: Path, ended: JobEnd) -> None:
    """Note the job's end in the replica's folder, where other users cannot write: no lighthouse has answered.

    The next process of the replica reads the note, tells the lighthouse, and ends. The lighthouse then marks
    the job complete. While the checkpoint server lives, it tells the lighthouse too.
    """
    _leave(home, _ENDED, to_builtins(ended))


def find_job_end(home: Path) -> JobEnd | None:
    """Return the job's end that an earlier process has noted in the replica's folder, if any."""
    try:
        return decode_as(JobEnd, json.loads((home / _ENDED).read_text()), _ENDED)
    except (OSError, ValueError, ProtocolError):
        return None


def raised_again(home: Path, step: int, reason: str) -> bool:
    """Note an exception outside a micro-batch, with which this process leaves the job to start again.

    Return whether this replica's last process left for ``reason`` at ``step`` too. That shows a defect of the
    script: another restart would meet it again.
    """
    noted: object = None
    with contextlib.suppress(OSError, ValueError):
        noted = json.loads((home / _RAISED).read_text())
    _leave(home, _RAISED, [step, reason])
    return noted == [step, reason]


def _leave(home: Path, name: str, value: object) -> None:
    path = home / f"{name}.new"
    with contextlib.suppress(OSError):  # a full disk loses the note
        path.write_text(json.dumps(value))
        path.replace(home / name)
