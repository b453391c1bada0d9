"""Digests of a state: one digest per block of its file, and one digest of these for the whole state.

The snapshot *file* is cut into blocks of 4 MiB. Each block has an XXH3-64, so that a transfer can verify it.
The digest of a state is the XXH3-128 of the file's size, the blocks' size and the blocks' digests. So a
reader can check a manifest against the wanted digest before it fetches a byte. Two manifests with one digest
promise the same bytes. A reader that has verified every block has verified the state. Several threads can
compute the digest: from live tensors without a copy, during a copy, or from a received file. These digests
find damage and divergence. They do not authenticate; the token does.
"""

import struct
from collections.abc import Callable, Iterable

import xxhash

BLOCK_BYTES = 4 << 20
_SIZES = struct.Struct(">QQ")
# This HTTP header has the digest of a gradient's other headers, which the gradient's own digest leaves out.
SEAL = "X-Fabric-Seal"
_SEALED = ("Generation", "Step", "Epoch", "Weight", "Layout", "Digest", "Meta")


def block_digest(block: memoryview) -> str:
    """Return the 16 hex digits that a manifest lists for this block."""
    return xxhash.xxh3_64_hexdigest(block)


def digest_of_blocks(nbytes: int, blocks: Iterable[str], block_bytes: int = BLOCK_BYTES) -> str:
    """Return the digest (32 hex) of a file of ``nbytes`` whose blocks have these digests, in order."""
    return xxhash.xxh3_128_hexdigest(_SIZES.pack(nbytes, block_bytes) + bytes.fromhex("".join(blocks)))


class BlockDigests:
    """The digests of a file's blocks, from its bytes in order and in pieces of any size."""

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_64()
        self._room = BLOCK_BYTES
        self._found: list[str] = []

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the file (flat)."""
        data = memoryview(data)
        while len(data) >= self._room:
            self._hasher.update(data[: self._room])
            data = data[self._room :]
            self._end_block()
        self._hasher.update(data)
        self._room -= len(data)

    def blocks(self) -> list[str]:
        """Return the digests of all blocks; the last block may be short. Call no ``update`` afterwards."""
        if self._room < BLOCK_BYTES:
            self._end_block()
        return self._found

    def _end_block(self) -> None:
        self._found.append(self._hasher.hexdigest())
        self._hasher.reset()
        self._room = BLOCK_BYTES


def file_digest(file: memoryview) -> str:
    """Return the digest (32 hex) of the state in ``file``."""
    digests = BlockDigests()
    digests.update(file)
    return digest_of_blocks(len(file), digests.blocks())


def bytes_digest(data: memoryview) -> str:
    """Return the digest (32 hex) of a gradient or any other bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def etag(digest: str) -> str:
    """Return the strong entity tag of content with this digest."""
    return f'"{digest}"'


def seal(header: Callable[[str], str | None]) -> str:
    """Return the value of the header SEAL; ``header`` gives a gradient's other headers by name."""
    text = "\n".join(header(f"X-Fabric-{name}") or "" for name in _SEALED)
    return xxhash.xxh3_128_hexdigest(text.encode("latin-1", "replace"))
