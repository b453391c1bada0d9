"""A fast path for the usual frames of a session: short masked text, not fragmented.

The library wakes a task for every message, which costs as much as the message itself, thousands of times a
second. So this module reads the connection before the library does. The first unusual frame (fragmented,
long, a ping, a close, malformed) and all later frames go to the library. This module has handled all earlier
frames, so the order stays.
"""

import asyncio
from collections.abc import Callable

from fabric.runtime.http.connection_limit import OuterProtocol

# The first byte of an unfragmented text. A frame's second byte is its size; two values mean: size follows.
_WHOLE_TEXT = 0x81
_MASKED = 0x80
_TWO_BYTES, _EIGHT_BYTES = _MASKED + 126, _MASKED + 127


class FastFrames(OuterProtocol):
    """The protocol of a connection after its upgrade; ``library`` is the former one.

    ``on_text`` gets every usual text. Once it returns False, the library reads on.
    """

    def __init__(self, library: asyncio.Protocol, on_text: Callable[[str], bool]) -> None:
        super().__init__(library)
        self._on_text = on_text
        self._rest = b""
        self._is_over = False

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            self._library.data_received(data)
            return
        data, at = self._rest + data if self._rest else data, 0
        while len(data) >= at + 2 and not self._is_over:
            kind, size, begin = data[at], data[at + 1] - _MASKED, at + 6
            if kind != _WHOLE_TEXT or not 0 <= size < _EIGHT_BYTES - _MASKED:
                self._is_over = True
                break
            if size == _TWO_BYTES - _MASKED:
                size, begin = int.from_bytes(data[at + 2 : at + 4], "big"), at + 8
            if len(data) < begin + size:  # the frame has not arrived whole, or even its size has not
                break
            text = _unmasked(data[begin - 4 : begin], data[begin : begin + size])
            if text is None:
                self._is_over = True
                break
            at = begin + size
            self._is_over = not self._on_text(text)
        self._rest = data[at:]
        if self._is_over:
            rest, self._rest = self._rest, b""
            self._library.data_received(rest)


def _unmasked(mask: bytes, body: bytes) -> str | None:
    """Return the text, or None for bytes that are not UTF-8."""
    size = len(body)
    masks = int.from_bytes((mask * (size // 4 + 1))[:size], "little")
    try:
        return (int.from_bytes(body, "little") ^ masks).to_bytes(size, "little").decode()
    except UnicodeDecodeError:
        return None
