"""An index in shared memory of the published gradients; publishing by it wakes no process.

Every step publishes a gradient, and mostly no reader wants it. So the trainer writes an entry after the
slot's bytes, and the server reads the entry when a reader asks for gradients. The entry has a number (time
in ns; 0: withdrawn) and a digest, so that a half-written one counts for nothing. It outlives the trainer, as
the bytes do.

Before the trainer writes to the slot again, it takes the entry back and then loads the number of readers. The
server stores the number of readers and then loads the entry. Each stores first and loads second, with an
atomic instruction or a system call in between, so at least one of them sees the other: the trainer then asks
the server to end the transfer, or the server does not begin it. A reader verifies the digest of all it gets,
so a memory order of another processor could not let wrong bytes through.
"""

import os
import struct
import threading
import time
from dataclasses import dataclass

import xxhash

from fabric.model import Int64

KIND = "gradient_index"
COUNT = 32  # gradient slots that have an entry
_BYTES = 8192
TOTAL_BYTES = COUNT * _BYTES
# Number, readers (the server's), digest and length of what follows.
_HEAD = struct.Struct("<QQQQ")
_WORD = struct.Struct("<Q")
_READERS_AT = 8
MOST_BYTES = _BYTES - _HEAD.size
_fence = threading.Lock()


@dataclass(frozen=True, slots=True)
class PublishedGradient:
    """The trainer's description of the reduced gradient in a slot."""

    generation: Int64
    step: Int64  # the step that the gradient leads on from
    epoch: Int64
    nbytes: Int64  # of the slot's memory, from its first byte
    digest: str
    weight: float
    layout: str


class GradientIndex:
    """The trainer's side: ``memory`` is the shared one, of TOTAL_BYTES. One thread at a time."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._words = memory[:TOTAL_BYTES].cast("Q")
        self._last = 0

    def write(self, slot: int, body: bytes) -> bool:
        """Write the entry of a withdrawn slot. False where the entry does not fit."""
        if slot >= COUNT or len(body) > MOST_BYTES:
            return False
        at, word = slot * _BYTES, slot * _BYTES // 8
        self._last = number = max(time.monotonic_ns(), self._last + 1)
        self._memory[at + _HEAD.size : at + _HEAD.size + len(body)] = body
        self._words[word + 2] = _digest(number, body)
        self._words[word + 3] = len(body)
        self._words[word] = number
        return True

    def withdraw(self, slot: int) -> bool:
        """Take the entry back. Returns True without readers: the slot may be written at once."""
        if slot >= COUNT:
            return False
        word = slot * _BYTES // 8
        self._words[word] = 0
        with _fence:
            return self._words[word + 1] == 0


def read_entry(view: memoryview, slot: int) -> tuple[int, bytes]:
    """Return the number and the text of a slot's entry; 0 without one."""
    at = slot * _BYTES
    if len(view) < at + _BYTES:  # its memory is still being allocated, or has been let go
        return 0, b""
    number, _, expected, length = _HEAD.unpack_from(view, at)
    if not number or length > MOST_BYTES:
        return 0, b""
    body = bytes(view[at + _HEAD.size : at + _HEAD.size + length])
    intact = _digest(number, body) == expected and _WORD.unpack_from(view, at)[0] == number
    return (number, body) if intact else (0, b"")


def entry_number(view: memoryview, slot: int) -> int:
    """Return the number of a slot's entry; a new entry has a new number."""
    at = slot * _BYTES
    return int(_WORD.unpack_from(view, at)[0]) if len(view) >= at + _BYTES else 0


def store_reader_count(descriptor: int, slot: int, count: int) -> None:
    """Store how many transfers of this slot are under way; the server calls it."""
    os.pwrite(descriptor, _WORD.pack(count), slot * _BYTES + _READERS_AT)


def _digest(number: int, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body, number)
