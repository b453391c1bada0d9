"""Messages on a byte stream: four bytes of length, big-endian, then the payload.

A length of zero is the goodbye that a clean close sends, so a message is never empty. The parser is
incremental and pure: it takes bytes as they arrive and returns complete payloads. It refuses a length over
its limit before it keeps a byte of that payload.
"""

from fabric.errors import ProtocolError

MAX_FRAME_BYTES = 1024 * 1024
HEADER_BYTES = 4
GOODBYE = b"\0" * HEADER_BYTES


def frame(payload: bytes, limit_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return ``payload`` with its length in front; raises ProtocolError for an empty or oversized one."""
    if not payload:
        raise ProtocolError("a message cannot be empty: nothing was sent")
    if len(payload) > limit_bytes:
        raise ProtocolError(
            f"a message of {len(payload)} bytes is over the limit of {limit_bytes}: it was not sent"
        )
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


class FrameParser:
    """Turns pieces of a stream into payloads; holds at most one unfinished frame and the newest piece."""

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.pending = bytearray()  # the bytes of an unfinished frame

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Return the payloads that ``data`` completes, ``b""`` for a goodbye.

        Raises ProtocolError at a length over the limit; the stream cannot be used after that.
        """
        self.pending += data
        payloads: list[bytes] = []
        start = 0
        while len(self.pending) - start >= HEADER_BYTES:
            body = start + HEADER_BYTES
            length = int.from_bytes(self.pending[start:body], "big")
            if length > self._limit_bytes:
                self.pending.clear()
                raise ProtocolError(
                    f"a message announces {length} bytes, over the limit of {self._limit_bytes}: "
                    "the other side is not fabric, or of another version"
                )
            if len(self.pending) - body < length:
                break
            payloads.append(bytes(self.pending[body : body + length]))
            start = body + length
        del self.pending[:start]
        return payloads
