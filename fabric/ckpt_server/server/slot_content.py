"""The content of a slot that a trainer has published: checked, and described for readers.

The server trusts a trainer's numbers but not their form: it refuses content that is not a usable snapshot or
gradient. It prepares the answers to readers once, so that each request costs little.
"""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fabric.ckpt_server.format.digest import SEAL, seal
from fabric.ckpt_server.format.manifest import check_manifest, state_digest
from fabric.ckpt_server.format.safetensors_file import FileHeader, TensorSpan, read_header
from fabric.ckpt_server.format.tensor_slices import Shard, find_shards
from fabric.ckpt_server.wire.gradient_index import PublishedGradient
from fabric.errors import ProtocolError, Refused
from fabric.protocol.messages.wire import decode_as

# The meta is sent as one HTTP header, and readers refuse lines of 64 KiB.
MAX_META_BYTES = 60_000
_WORD = re.compile(r"[\x21-\x7e]{0,200}")


@dataclass(frozen=True, slots=True)
class SlotContent:
    """A published snapshot or gradient."""

    generation: int
    step: int
    digest: str
    nbytes: int
    entry: Mapping[str, object]  # the content's description in the server's listing
    headers: Mapping[str, str]  # the content's description in the HTTP headers of its bytes
    published: float  # time of the publication, monotonic seconds
    taken: float  # monotonic seconds: when the state was current, or the gradient published
    manifest: bytes = b""  # manifest of a snapshot, as JSON
    manifest_without_tensors: bytes = b""
    state: str = ""  # the digest of the full state
    tensors: Mapping[str, TensorSpan] = field(default_factory=dict)  # the tensors' places in the slot
    shards: Mapping[str, Shard] = field(default_factory=dict)  # tensors that are parts of sharded tensors
    block_bytes: int = 0
    parts: int = 1  # the number of ranks whose parts make the state

    @property
    def order(self) -> tuple[int, int]:
        """A key by which newer content compares greater."""
        return self.generation, self.step


def snapshot_content(manifest: object, view: memoryview, job: str, base_url: str) -> SlotContent:
    """Return the snapshot in ``view``, which must be a whole safetensors file of the size in ``manifest``.

    ``base_url``: the URL of this server. Raises StateError, ProtocolError or Refused.
    """
    checked = check_manifest(manifest)
    if checked.get("job") != job:
        raise Refused(
            f"the manifest is of job {str(checked.get('job'))[:80]!r} and this server's job is {job}"
        )
    created = checked.get("created")
    if isinstance(created, bool) or not isinstance(created, int | float):
        raise ProtocolError("the manifest's created is not a time: give seconds since 1970")
    nbytes, step, generation = checked["nbytes"], checked["step"], checked["generation"]
    if nbytes > len(view):
        raise Refused(
            f"the manifest promises {nbytes} bytes and the slot has {len(view)}: allocate it larger"
        )
    header, now = read_header(view[:nbytes]), time.monotonic()
    url = f"{base_url}/v1/snapshots/{step}/data?generation={generation}"
    shards = find_shards(header.metadata)
    published = {key: value for key, value in checked.items() if key != "tensors"} | {"url": url}
    return SlotContent(
        generation=generation,
        step=step,
        digest=checked["digest"],
        nbytes=nbytes,
        entry={
            "generation": generation,
            "step": step,
            "digest": checked["digest"],
            "nbytes": nbytes,
            "created": created,
            **({"rank": checked["rank"], "ranks": checked["ranks"]} if "ranks" in checked else {}),
        },
        headers=_headers(generation, step, checked["digest"]),
        published=now,
        # After publication, the content's age follows the monotonic clock, not the wall clock.
        taken=now - max(0.0, time.time() - created),
        manifest=_dump({**published, "tensors": _tensors(header, shards)}),
        manifest_without_tensors=_dump(published),
        state=state_digest(checked),
        tensors={span.name: span for span in header.tensors},
        shards=shards,
        block_bytes=checked["block_bytes"],
        parts=len(checked.get("ranks", ("",))),
    )


def gradient_content(body: Mapping[str, Any], capacity: int) -> SlotContent:
    """Return the gradient that a trainer's request ``body`` describes. Raises ProtocolError or Refused."""
    gradient = decode_as(PublishedGradient, body, "gradient")
    for name in ("generation", "step", "epoch", "nbytes"):
        if getattr(gradient, name) < 0:
            raise ProtocolError(f"the gradient's {name} is negative: send a count")
    for name in ("digest", "layout"):
        if not _WORD.fullmatch(getattr(gradient, name)):
            raise ProtocolError(f"the gradient's {name} is not one printable word: it travels in a header")
    if gradient.nbytes > capacity:
        raise Refused(
            f"the gradient has {gradient.nbytes} bytes and its slot has {capacity}: allocate it larger"
        )
    meta = body.get("meta", {})
    if not isinstance(meta, dict):
        raise ProtocolError("the gradient's meta is not a JSON object")
    meta_text, now = _dump(meta), time.monotonic()
    if len(meta_text) > MAX_META_BYTES:
        raise Refused(f"the gradient's meta has {len(meta_text)} bytes: at most {MAX_META_BYTES} are served")
    headers = {
        **_headers(gradient.generation, gradient.step, gradient.digest),
        "X-Fabric-Epoch": str(gradient.epoch),
        "X-Fabric-Weight": repr(gradient.weight),
        "X-Fabric-Layout": gradient.layout,
        "X-Fabric-Meta": meta_text.decode("ascii"),
    }
    return SlotContent(
        generation=gradient.generation,
        step=gradient.step,
        digest=gradient.digest,
        nbytes=gradient.nbytes,
        entry=asdict(gradient),
        headers={**headers, SEAL: seal(headers.get)},
        published=now,
        taken=now,
    )


def _tensors(header: FileHeader, shards: Mapping[str, Shard]) -> dict[str, object]:
    return {
        span.name: {
            "dtype": span.dtype,
            "shape": span.shape,
            "data_offsets": (span.begin - header.nbytes, span.end - header.nbytes),
            **({"whole": asdict(shards[span.name])} if span.name in shards else {}),
        }
        for span in header.tensors
    }


def _headers(generation: int, step: int, digest: str) -> dict[str, str]:
    return {"X-Fabric-Generation": str(generation), "X-Fabric-Step": str(step), "X-Fabric-Digest": digest}


def _dump(value: Mapping[str, object]) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"what was published cannot be said in JSON ({error}): use finite values"
        ) from error
