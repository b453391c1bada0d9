"""The usual frames of a session, taken as they are read: whole, short, masked text.

The library gives every message through a queue to a task that it wakes for each, which costs as much as
the message itself, and there are thousands a second. So this stands before the library on the connection.
From the first frame on that is not usual (in pieces, long, a ping, a close, malformed) everything is the
library's, whose task reads it as ever; what came before has been taken by then, so the order stays.
"""

import asyncio
from collections.abc import Callable

# Of a text frame that is whole, as its first byte.
_WHOLE_TEXT = 0x81
_MASKED = 0x80
_TWO_BYTES, _EIGHT_BYTES = 126, 127


class UsualFrames(asyncio.Protocol):
    """The protocol of a connection from its upgrade on; ``library`` is the one that it had. ``on_text`` is
    given every usual text, until it says False: then the library reads on."""

    def __init__(self, library: asyncio.Protocol, on_text: Callable[[str], bool]) -> None:
        self._library = library
        self._on_text = on_text
        self._rest = b""
        self._is_over = False

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            self._library.data_received(data)
            return
        data, at = self._rest + data if self._rest else data, 0
        while not self._is_over and (begin := _body_of(data, at)):
            size = _size_of(data, at)
            if begin < 0:
                self._is_over = True
            elif len(data) < begin + size:
                break
            elif (text := _unmasked(data, begin, size)) is None:
                self._is_over = True
            else:
                at = begin + size
                self._is_over = not self._on_text(text)
        self._rest = data[at:]
        if self._is_over:
            rest, self._rest = self._rest, b""
            self._library.data_received(rest)

    def eof_received(self) -> bool | None:
        return self._library.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._library.connection_lost(error)

    def pause_writing(self) -> None:
        self._library.pause_writing()

    def resume_writing(self) -> None:
        self._library.resume_writing()


def _body_of(data: bytes, at: int) -> int:
    """Where the body of the usual frame at ``at`` begins; 0 where its head is not all here, -1 where it is
    another one."""
    if len(data) < at + 2:
        return 0
    size = data[at + 1] & ~_MASKED
    if data[at] != _WHOLE_TEXT or not data[at + 1] & _MASKED or size == _EIGHT_BYTES:
        return -1
    begin = at + 6 if size < _TWO_BYTES else at + 8
    return begin if len(data) >= begin else 0


def _size_of(data: bytes, at: int) -> int:
    size = data[at + 1] & ~_MASKED
    return size if size < _TWO_BYTES else int.from_bytes(data[at + 2 : at + 4], "big")


def _unmasked(data: bytes, begin: int, size: int) -> str | None:
    """The text, or None where it is no UTF-8."""
    mask = data[begin - 4 : begin]
    masks = int.from_bytes((mask * (size // 4 + 1))[:size], "little")
    body = (int.from_bytes(data[begin : begin + size], "little") ^ masks).to_bytes(size, "little")
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None
