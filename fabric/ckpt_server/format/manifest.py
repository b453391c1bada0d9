"""The digests and the manifest of a snapshot: making them, and the checks before a reader trusts them.

A manifest names the state (job, generation, step, digest) and lists the digest of each block of its file. So
a reader can fetch blocks from many sources, and verify each block as it arrives. The state's digest is made
of the blocks' digests, so two manifests with one digest promise the same bytes. A manifest comes from another
process: every number is checked before memory is allocated for it.
"""

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import xxhash

from fabric.ckpt_server.format.safetensors_file import MAX_FILE_BYTES, is_count
from fabric.errors import IntegrityError, StateError
from fabric.model import SnapshotRef
from fabric.protocol.messages.rank_messages import replica_digest, summed_digest

# Digests of a state: one digest per block of its file, and one digest of these for the whole state.
#
# The snapshot *file* is cut into blocks of 4 MiB. Each block has an XXH3-64, so that a transfer can verify
# it. The digest of a state is the XXH3-128 of the file's size, the blocks' size and the blocks' digests. So
# a reader can check a manifest against the wanted digest before it fetches a byte. Two manifests with one
# digest promise the same bytes. A reader that has verified every block has verified the state. Several
# threads can compute the digest: from live tensors without a copy, during a copy, or from a received file.
# These digests find damage and divergence. They do not authenticate; the token does.


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


MANIFEST_FORMAT = 1
DIGEST_DIGITS = 32
BLOCK_DIGITS = 16
MIN_BLOCK_BYTES = 4096
MAX_BLOCK_BYTES = 1 << 30
_HEX = frozenset("0123456789abcdef")
_MAX_NUMBER = 1 << 62


def make_manifest(
    state: SnapshotRef, nbytes: int, blocks: Sequence[str], *, job: str, replica: str, created: float
) -> dict[str, Any]:
    """Return the manifest of a snapshot file of ``nbytes`` bytes, taken at Unix time ``created``."""
    return {
        "format": MANIFEST_FORMAT,
        "job": job,
        "replica": replica,
        "generation": state.generation,
        "step": state.step,
        "digest": state.digest,
        "nbytes": nbytes,
        "block_bytes": BLOCK_BYTES,
        "blocks": list(blocks),
        "created": created,
    }


def of_rank(manifest: Mapping[str, Any], rank: int, digests: Sequence[str]) -> dict[str, Any]:
    """Return ``manifest`` with rank ``rank`` and the ``digests`` of all ranks' parts of the state."""
    return {**manifest, "rank": rank, "ranks": list(digests)}


def part_digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest by which members know the part of the state in the manifest's file.

    It is that of the file, unless the manifest has a ``content`` (``state.content_digest``) or a ``state``
    (``state.device_digest``).
    """
    return str(manifest.get("content", manifest.get("state", manifest["digest"])))


def state_digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of the whole replica's state, of which the manifest's file may be one rank's part."""
    if "content" in manifest:
        return summed_digest(manifest.get("ranks", [manifest["content"]]))
    return replica_digest(manifest["ranks"]) if "ranks" in manifest else part_digest(manifest)


def is_hex(value: object, digits: int) -> bool:
    """Whether ``value`` is a string of exactly ``digits`` lower-case hex digits."""
    return isinstance(value, str) and len(value) == digits and _HEX.issuperset(value)


def check_manifest(manifest: object) -> dict[str, Any]:
    """Return ``manifest`` if it is well-formed. Raises StateError."""
    if not isinstance(manifest, dict):
        raise StateError("The manifest is not a JSON object.")
    if manifest.get("format") != MANIFEST_FORMAT:
        raise StateError(
            f"The manifest is of format {str(manifest.get('format'))[:20]!r} and not {MANIFEST_FORMAT}."
        )
    for key in ("generation", "step"):
        if not is_count(manifest.get(key), _MAX_NUMBER):
            raise StateError(f"The manifest has no usable {key}.")
    if not is_hex(manifest.get("digest"), DIGEST_DIGITS):
        raise StateError(f"The manifest's digest is not {DIGEST_DIGITS} hex digits.")
    _check_ranks(manifest)
    nbytes, block_bytes = manifest.get("nbytes"), manifest.get("block_bytes")
    if not is_count(nbytes, MAX_FILE_BYTES) or not nbytes:
        raise StateError("The manifest has no usable size.")
    if not is_count(block_bytes, MAX_BLOCK_BYTES) or block_bytes < MIN_BLOCK_BYTES:
        raise StateError("The manifest has no usable block size.")
    blocks, expected = manifest.get("blocks"), math.ceil(nbytes / block_bytes)
    if not isinstance(blocks, list) or len(blocks) != expected:
        count = len(blocks) if isinstance(blocks, list) else 0
        raise StateError(f"The manifest lists {count} blocks where its size needs {expected}.")
    if not all(is_hex(block, BLOCK_DIGITS) for block in blocks):
        raise StateError(f"The manifest has a block digest that is not {BLOCK_DIGITS} hex digits.")
    digest = digest_of_blocks(nbytes, blocks, block_bytes)
    if digest != manifest["digest"]:
        raise IntegrityError(f"The manifest's blocks give the digest {digest} and not {manifest['digest']}.")
    return manifest


def _check_ranks(manifest: Mapping[str, Any]) -> None:
    """Check that one rank's part lists the digests of all ranks, its own among them."""
    for key in ("content", "state"):
        if not is_hex(manifest.get(key, manifest["digest"]), DIGEST_DIGITS):
            raise StateError(f"The manifest's {key} is not {DIGEST_DIGITS} hex digits.")
    if "ranks" not in manifest and "rank" not in manifest:
        return
    rank, ranks = manifest.get("rank"), manifest.get("ranks")
    listed = isinstance(ranks, list) and all(is_hex(digest, DIGEST_DIGITS) for digest in ranks)
    if not listed or not isinstance(ranks, list) or not is_count(rank, len(ranks) - 1):
        raise StateError("The manifest lists no usable digests of the ranks.")
    if "content" in manifest and len({digest[:16] for digest in ranks}) > 1:
        raise StateError("The manifest lists contents of ranks that describe different states.")
    if ranks[rank] != part_digest(manifest):
        raise StateError(f"The manifest's digest is not what it lists for its own rank {rank}.")
