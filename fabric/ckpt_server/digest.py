"""What equal states have in common: one digest of the whole, and one per block for the wire.

The digest of a state is XXH3-128 over the preamble and then, in file order, the XXH3-64 of every
tensor (eight bytes, big-endian). So it can be computed from live tensors without copying the state,
while a snapshot is copied, or from a received file, by several threads, and is the same each time.
Blocks of 4 MiB cut the *file* and carry an XXH3-64 each: the unit that a transfer verifies.
These digests find damage and divergence. They do not authenticate: that is the token's business.
"""

from collections.abc import Callable, Iterable

import xxhash

from fabric.ckpt_server.layout import read_header

BLOCK_BYTES = 4 << 20
# What a reader of a gradient acts on, and its digest does not cover.
SEAL = "X-Fabric-Seal"
_SEALED = ("Generation", "Step", "Epoch", "Weight", "Layout", "Digest", "Meta")


def combine(preamble: bytes | memoryview, tensor_digests: Iterable[int]) -> str:
    """The state's digest (32 hex) from its preamble and its tensors' XXH3-64 values in file order."""
    hasher = xxhash.xxh3_128(preamble)
    for value in tensor_digests:
        hasher.update(value.to_bytes(8, "big"))
    return hasher.hexdigest()


def file_digest(file: memoryview) -> str:
    """The digest (32 hex) of the state in ``file``. Raises StateError where its header is damaged."""
    header = read_header(file)
    digests = (xxhash.xxh3_64_intdigest(file[span.begin : span.end]) for span in header.tensors)
    return combine(file[: header.nbytes], digests)


def block_digest(block: memoryview) -> str:
    """The 16 hex digits that a manifest lists for this block."""
    return xxhash.xxh3_64_hexdigest(block)


def bytes_digest(data: memoryview) -> str:
    """The 32 hex digits that go with a gradient or any other run of bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def seal(header: Callable[[str], str | None]) -> str:
    """The digest of a gradient's headers, each of which ``header`` gives by its name: goes as SEAL."""
    text = "\n".join(header(f"X-Fabric-{name}") or "" for name in _SEALED)
    return xxhash.xxh3_128_hexdigest(text.encode("latin-1", "replace"))
