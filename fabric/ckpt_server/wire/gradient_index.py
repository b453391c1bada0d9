"""An index of the published gradients in shared memory; publishing through it wakes no process.

The trainer publishes a gradient at every step, and mostly no reader wants it. So the trainer writes the
slot's bytes and then an entry; the server reads the entry only when a reader asks for gradients. The entry
has a number (time in ns; 0: withdrawn), and a digest by which the server recognises a half-written entry.
Entry and bytes outlive the trainer.

Before the trainer writes to the slot again, it takes the entry back and then loads the number of readers. The
server stores the number of readers and then loads the entry. Each side stores first and loads second, with an
atomic instruction or a system call in between, so at least one side sees the other side's store. Then the
trainer asks the server to end the transfer, or the server does not begin it. A reader verifies the digest of
all bytes, so wrong bytes cannot get through on a processor with another memory order either.
"""

import os
import struct
import threading
import time

import xxhash

from fabric.model import Int64, Value

KIND = "gradient_index"
COUNT = 32  # number of gradient slots that have an entry in the index
_BYTES = 8192
TOTAL_BYTES = COUNT * _BYTES
# The entry's number, its number of readers (written by the server), and the digest and length of its text.
_HEAD = struct.Struct("<QQQQ")
_WORD = struct.Struct("<Q")
_READERS_AT = 8
MOST_BYTES = _BYTES - _HEAD.size
_fence = threading.Lock()


class PublishedGradient(Value):
    """The trainer's description of the reduced gradient in a slot."""

    generation: Int64
    step: Int64  # the gradient turns the state of this step into the next
    epoch: Int64
    nbytes: Int64  # bytes used in the slot's memory, from its first byte
    digest: str
    weight: float
    layout: str


class GradientIndex:
    """The trainer's side. ``memory``: TOTAL_BYTES of shared memory. One thread at a time may use it."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._words = memory[:TOTAL_BYTES].cast("Q")
        self._last = 0

    def write(self, slot: int, body: bytes) -> bool:
        """Write the entry of a withdrawn slot. Return False where the entry does not fit."""
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
        """Take the entry back. Return True where the slot has no readers, so that it may be written at
        once."""
        if slot >= COUNT:
            return False
        word = slot * _BYTES // 8
        self._words[word] = 0
        with _fence:
            return self._words[word + 1] == 0


def read_entry(view: memoryview, slot: int) -> tuple[int, bytes]:
    """Return the number and the text of a slot's entry; the number is 0 where there is no entry."""
    at = slot * _BYTES
    if len(view) < at + _BYTES:  # the index's memory is still being allocated, or was released
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
    """Store the number of transfers of this slot that are under way, on the server's side."""
    os.pwrite(descriptor, _WORD.pack(count), slot * _BYTES + _READERS_AT)


def _digest(number: int, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body, number)
