"""Compressed transfers: the choice of a coding, and ``x-fabric-shuffle`` (byte shuffle and zstd).

Numbers of a training state hardly repeat, but their bytes with sign and exponent do. A byte shuffle groups
bytes by their place in the element: all first bytes, then all second bytes. A shuffled state compresses by a
fifth to a half; without the shuffle zstd gains little. A body is a sequence of frames, each of at most
PIECE_BYTES:

    width of an element (1 byte), 3 zero bytes, length of the piece, length of what follows (4 bytes each,
    little endian), then the piece as it is where both lengths are equal, else the zstd frame of its grouped
    bytes

Both sides hold one piece at a time. Before the reader allocates memory, it refuses a length beyond
PIECE_BYTES, and a zstd frame of another length than the header's. Digests are of the decompressed bytes.
"""

import re
import struct
from collections.abc import Callable
from typing import Any

from fabric.errors import ProtocolError

IDENTITY, ZSTD, SHUFFLE = "identity", "zstd", "x-fabric-shuffle"
PIECE_BYTES = 1 << 20
_LEVEL = 1
_WORTH = 0.98  # a compressed piece longer than this share of the original is sent uncompressed
_FRAME = struct.Struct("<III")  # the first number is the element's width: one byte, then three zero bytes
_WIDTHS = (1, 2, 4, 8)
_CODING = re.compile(r"\s*([\w*-]{1,40})\s*(?:;\s*q=\s*([01](?:\.\d{0,3})?)\s*)?", re.ASCII | re.IGNORECASE)
_MAX_CODINGS = 50


def choose(accept_encoding: str | None) -> str:
    """Return the coding for a request with this Accept-Encoding; ``*`` alone selects no compression."""
    best, chosen = 0.0, IDENTITY
    for entry in (accept_encoding or "").split(",")[:_MAX_CODINGS]:
        match = _CODING.fullmatch(entry)
        name = match[1].lower() if match is not None else ""
        if match is None or name not in (ZSTD, SHUFFLE):
            continue
        weight = float(match[2]) if match[2] else 1.0
        if weight > best or (weight == best > 0 and name == SHUFFLE):
            best, chosen = weight, name
    return chosen


class Compressor:
    """Compresses pieces, one after the other, in ``coding`` (ZSTD or PLANES); ``width``: bytes of an
    element."""

    def __init__(self, coding: str, width: int) -> None:
        import zstandard

        compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._width = width if coding == SHUFFLE else 0
        self._frame: Callable[[Any], bytes] = compressor.compress
        self._stream = compressor.compressobj() if coding == ZSTD else None

    def pack(self, piece: memoryview) -> bytes:
        """Return the bytes to send for ``piece``, which has at most PIECE_BYTES; may be empty."""
        if self._stream is not None:
            return bytes(self._stream.compress(piece))
        import numpy as np

        width = self._width if len(piece) % self._width == 0 else 1
        grouped = piece if width == 1 else np.frombuffer(piece, np.uint8).reshape(-1, width).T.tobytes()
        compressed = self._frame(grouped)
        if len(compressed) > len(piece) * _WORTH:
            return _FRAME.pack(width, len(piece), len(piece)) + piece
        return _FRAME.pack(width, len(piece), len(compressed)) + compressed

    def end(self) -> bytes:
        """Return the last bytes to send."""
        return bytes(self._stream.flush()) if self._stream is not None else b""


def decompress(read: Callable[[memoryview], None], into: memoryview) -> None:
    """Fill ``into`` from frames; ``read`` fills a buffer from the body or raises.

    Raises ProtocolError for malformed frames; ``into`` is undefined then.
    """
    import numpy as np

    frame, compressed = bytearray(_FRAME.size), bytearray(PIECE_BYTES)
    at = 0
    while at < len(into):
        read(memoryview(frame))
        width, nbytes, follow = _FRAME.unpack(frame)
        if width not in _WIDTHS or not 0 < nbytes <= min(PIECE_BYTES, len(into) - at) or nbytes % width:
            raise ProtocolError(f"it sent a packed piece of {nbytes} bytes where {len(into) - at} are due")
        if not 0 < follow <= nbytes:
            raise ProtocolError(f"it sent a piece of {nbytes} bytes packed to {follow}")
        target = into[at : at + nbytes]
        at += nbytes
        if follow == nbytes:
            read(target)
            continue
        read(memoryview(compressed)[:follow])
        plain = np.frombuffer(_decompressed(memoryview(compressed)[:follow], nbytes), np.uint8)
        np.frombuffer(target, np.uint8).reshape(-1, width)[:] = plain.reshape(width, -1).T


def _decompressed(compressed: memoryview, nbytes: int) -> bytes:
    """Return exactly ``nbytes``; check the announced length first. Raises ProtocolError."""
    import zstandard

    try:
        frame = zstandard.get_frame_parameters(compressed)
        if frame.content_size != nbytes or frame.dict_id or frame.window_size > 2 * PIECE_BYTES:
            raise ProtocolError(f"it sent a piece that unpacks to {frame.content_size}, not {nbytes} bytes")
        decompressor = zstandard.ZstdDecompressor()
        plain = decompressor.decompress(compressed, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"it sent a piece that cannot be unpacked ({error})") from error
    if len(plain) != nbytes:
        raise ProtocolError(f"it sent a piece that unpacks to {len(plain)}, not {nbytes} bytes")
    return plain
