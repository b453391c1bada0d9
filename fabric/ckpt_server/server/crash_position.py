"""The micro-batch at which a trainer died: the trainer notes its position in eight bytes of shared memory.

A note is one aligned store by the trainer, without a system call. The server reads the note when the trainer
has ended. It keeps the notes of all trainers of this replica until a trainer of the replica is at a later
step. A trainer that exits in order clears its note first, so only a killed or crashed process leaves a note.
"""

import contextlib
import os
import sys

from fabric.ckpt_server.server.slots import CRASH_MARKER, SlotTable
from fabric.ckpt_server.server.trainer_watch import GONE, TrainerWatch
from fabric.model import MAX_MICRO_BATCHES, Death

MARKER_BYTES = 8
# The marker's low bits hold the micro-batch plus one; zero means that the trainer is at no micro-batch.
_BITS = 21
_MOST = 16


def encode_marker(step: int, micro_batch: int) -> int:
    """Return the marker that the trainer stores while it is at this micro-batch."""
    return (step << _BITS) | (micro_batch + 1)


class CrashLog:
    """The deaths of this replica's processes that this server saw."""

    def __init__(self, memory: SlotTable, trainer: TrainerWatch) -> None:
        self._slot = memory.slot(CRASH_MARKER, 0)
        self._trainer = trainer
        self._seen: list[Death] = []
        trainer.on_attach = self._turn

    def seen(self, state: str) -> tuple[Death, ...]:
        """Return the deaths at steps that the trainer has not passed; ``state``: the trainer's."""
        step, micro_batch = self._read()
        if micro_batch >= 0:
            death = Death(self._trainer.incarnation, step, micro_batch)
            if state == GONE and death not in self._seen:
                self._seen = [*self._seen, death][-_MOST:]
            elif state != GONE:
                self._seen = [d for d in self._seen if d.step >= step]
        return tuple(self._seen)

    def _turn(self) -> None:
        """Keep and clear the last trainer's note, because another trainer attaches."""
        self.seen(self._trainer.state)
        if self._slot.memfd is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._slot.memfd.fd, bytes(MARKER_BYTES), 0)

    def _read(self) -> tuple[int, int]:
        """Return (step, micro-batch) of the note; the micro-batch is -1 without a note, or with garbage."""
        view = self._slot.memfd.view if self._slot.memfd is not None else b""
        if len(view) < MARKER_BYTES:  # the marker's memory is still being allocated, or was released
            return 0, -1
        value = int.from_bytes(view[:MARKER_BYTES], sys.byteorder)
        step, micro_batch = value >> _BITS, (value & ((1 << _BITS) - 1)) - 1
        # A trainer that wrote beyond its own memory may have left any bytes.
        return step, micro_batch if micro_batch < MAX_MICRO_BATCHES else -1
