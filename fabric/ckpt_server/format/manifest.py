"""The manifest of a snapshot: making it, and the checks before a reader trusts it.

A manifest names the state (job, generation, step, digest) and lists the digest of each block of its file. So
a reader can fetch blocks from many sources, and verify each block as it arrives. The state's digest is made
of the blocks' digests, so two manifests with one digest promise the same bytes. A manifest comes from another
process: every number is checked before memory is allocated for it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fabric.ckpt_server.format.digest import BLOCK_BYTES, digest_of_blocks
from fabric.ckpt_server.format.safetensors_file import MAX_FILE_BYTES, is_count
from fabric.errors import IntegrityError, StateError
from fabric.model import SnapshotRef
from fabric.protocol.messages.rank_messages import replica_digest, summed_digest

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


def state_digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of the whole replica's state, of which the manifest's file may be one rank's part.

    Where the manifest has a ``content``, that is the state's digest (``state.content_digest``).
    """
    if "content" in manifest:
        return summed_digest(manifest.get("ranks", [manifest["content"]]))
    return replica_digest(manifest["ranks"]) if "ranks" in manifest else str(manifest["digest"])


def is_hex(value: object, digits: int) -> bool:
    """Whether ``value`` is a string of exactly ``digits`` lower-case hex digits."""
    return isinstance(value, str) and len(value) == digits and _HEX.issuperset(value)


def check_manifest(manifest: object, max_nbytes: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """Return ``manifest`` if it is well-formed and of at most ``max_nbytes``. Raises StateError."""
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
    assert isinstance(nbytes, int)
    if nbytes > max_nbytes:
        raise StateError(f"The snapshot has {nbytes} bytes and at most {max_nbytes} are accepted here.")
    if (
        not is_count(block_bytes, MAX_BLOCK_BYTES)
        or not isinstance(block_bytes, int)
        or block_bytes < MIN_BLOCK_BYTES
    ):
        raise StateError("The manifest has no usable block size.")
    _check_blocks(manifest, math.ceil(nbytes / block_bytes))
    return manifest


def _check_ranks(manifest: Mapping[str, Any]) -> None:
    """Check that one rank's part lists the digests of all ranks, its own among them."""
    named = manifest.get("content", manifest["digest"])
    if not is_hex(named, DIGEST_DIGITS):
        raise StateError(f"The manifest's content is not {DIGEST_DIGITS} hex digits.")
    if "ranks" not in manifest and "rank" not in manifest:
        return
    rank, ranks = manifest.get("rank"), manifest.get("ranks")
    listed = isinstance(ranks, list) and all(is_hex(digest, DIGEST_DIGITS) for digest in ranks)
    if not listed or not isinstance(ranks, list) or not is_count(rank, len(ranks) - 1):
        raise StateError("The manifest lists no usable digests of the ranks.")
    assert isinstance(rank, int)
    if "content" in manifest and len({digest[:16] for digest in ranks}) > 1:
        raise StateError("The manifest lists contents of ranks that describe different states.")
    if ranks[rank] != named:
        raise StateError(f"The manifest's digest is not what it lists for its own rank {rank}.")


def _check_blocks(manifest: Mapping[str, Any], expected: int) -> None:
    blocks = manifest.get("blocks")
    if not isinstance(blocks, list) or len(blocks) != expected:
        count = len(blocks) if isinstance(blocks, list) else 0
        raise StateError(f"The manifest lists {count} blocks where its size needs {expected}.")
    if not all(is_hex(block, BLOCK_DIGITS) for block in blocks):
        raise StateError(f"The manifest has a block digest that is not {BLOCK_DIGITS} hex digits.")
    digest = digest_of_blocks(manifest["nbytes"], blocks, manifest["block_bytes"])
    if digest != manifest["digest"]:
        raise IntegrityError(f"The manifest's blocks give the digest {digest} and not {manifest['digest']}.")
