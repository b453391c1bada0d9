"""The slots: shared memory that one trainer writes and many readers read; no reader gets a mix of contents.

The trainer withdraws a slot before it writes the slot, and publishes the slot afterwards. A withdrawal aborts
the transfers from the slot, and is complete when no transfer refers to the memory any more. So a reader sees
a truncated answer, never a mixed one. Published content outlives its trainer; a withdrawn slot stays
withdrawn until it is published again.

A gradient is mostly published by an entry in shared memory (see ``wire/gradient_index.py``), which the server
reads when a reader asks for gradients.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from fabric.ckpt_server.format.manifest import SEAL, check_manifest, seal, state_digest
from fabric.ckpt_server.format.safetensors_file import TensorSpan, read_preamble
from fabric.ckpt_server.format.tensor_slices import Shard, find_shards
from fabric.ckpt_server.wire import gradient_index
from fabric.ckpt_server.wire.gradient_index import PublishedGradient
from fabric.errors import FabricError, ProtocolError, Refused
from fabric.model import SnapshotRef, Value
from fabric.protocol.messages.wire import decode_as
from fabric.runtime.priority import lower_priority
from fabric.runtime.system_calls import available_bytes, create_memfd

# The content of a slot that a trainer has published: checked, and described for readers.
#
# The server trusts a trainer's numbers but not their form: it refuses content that is not a usable snapshot
# or gradient. It prepares the answers to readers once, so that each request costs little.


# The meta is sent as one HTTP header, and readers refuse lines of 64 KiB.
MAX_META_BYTES = 60_000
_LISTED = ("generation", "step", "digest", "nbytes", "created", "rank", "ranks")  # what a listing says
_WORD = re.compile(r"[\x21-\x7e]{0,200}")


class SlotContent(Value):
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
    tensors: Mapping[str, TensorSpan] = msgspec.field(default_factory=dict)  # the tensors' places in the slot
    shards: Mapping[str, Shard] = msgspec.field(default_factory=dict)  # of tensors that are parts
    block_bytes: int = 0
    parts: int = 1  # the number of ranks whose parts make the state

    @property
    def ref(self) -> SnapshotRef:
        """The state, as a joining replica asks for it."""
        return SnapshotRef(self.generation, self.step, self.state)

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
    header, now = read_preamble(view[:nbytes]), time.monotonic()
    shards = find_shards(header.metadata)
    tensors = {
        span.name: {
            "dtype": span.dtype,
            "shape": span.shape,
            "data_offsets": (span.begin - header.nbytes, span.end - header.nbytes),
            **({"whole": asdict(shards[span.name])} if span.name in shards else {}),
        }
        for span in header.tensors
    }
    published = {key: value for key, value in checked.items() if key != "tensors"}
    published["url"] = f"{base_url}/v1/snapshots/{step}/data?generation={generation}"
    return SlotContent(
        generation=generation,
        step=step,
        digest=checked["digest"],
        nbytes=nbytes,
        entry={key: checked[key] for key in _LISTED if key in checked},
        headers=_headers(generation, step, checked["digest"]),
        published=now,
        # After publication, the content's age follows the monotonic clock, not the wall clock.
        taken=now - max(0.0, time.time() - created),
        manifest=_dump({**published, "tensors": tensors}),
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


def _headers(generation: int, step: int, digest: str) -> dict[str, str]:
    return {"X-Fabric-Generation": str(generation), "X-Fabric-Step": str(step), "X-Fabric-Digest": digest}


def _dump(value: Mapping[str, object]) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"what was published cannot be said in JSON ({error}): use finite values"
        ) from error


# Shared memory that the kernel always frees: sealed memfds, allocated in full before use.
#
# A memfd has no name, so the kernel frees it when the last process that maps it has ended, in whatever way.
# All of its pages are allocated at once: a machine without enough memory gives an error here, and does not
# start the OOM killer later. A seal forbids shrinking, so that no other holder of the descriptor can make
# the server's reads fault.


# The largest part of the available memory that one allocation may take.
_SHARE = 0.95
_FAULT_BYTES = 16 << 20
_MADV_POPULATE_READ = 22


class Memfd:
    """A memfd of ``capacity`` bytes (whole pages), which never shrinks; ``view`` is read-only.

    Raises ConfigError where the kernel refuses to make it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.capacity = 0
        self.view = memoryview(b"")
        self.fd = create_memfd(f"fabric-{name}")
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)

    def grow(self, nbytes: int) -> None:
        """Make room for ``nbytes``; content and existing mappings stay. Blocks for seconds.

        Raises Refused, with nothing changed, where the machine has not that much memory.
        """
        capacity = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if capacity <= self.capacity:
            return
        needed, available = capacity - self.capacity, available_bytes()
        if needed > available * _SHARE:
            raise _too_large(self.name, needed, available)
        try:
            os.posix_fallocate(self.fd, 0, capacity)
            mapped = mmap.mmap(self.fd, capacity, mmap.MAP_SHARED, mmap.PROT_READ)
            # Enter all pages, so that the first transfer has no page faults: in small steps, because a call
            # holds the interpreter's lock. An older kernel enters pages at first use.
            with contextlib.suppress(OSError):
                for begin in range(0, len(mapped), _FAULT_BYTES):
                    mapped.madvise(_MADV_POPULATE_READ, begin, min(_FAULT_BYTES, len(mapped) - begin))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise _too_large(self.name, needed, available, f", but: {error.strerror}") from error
        self.capacity, self.view = capacity, memoryview(mapped)

    def close(self) -> None:
        """Release the memory; a process that has mapped it keeps it."""
        self.view = memoryview(b"")
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _too_large(name: str, needed: int, available: int, but: str = "") -> Refused:
    """Return the refusal to grow; ``but``: the kernel's error, where the memory seemed to be available."""
    return Refused(
        f"the {name} needs {needed / 2**20:,.1f} MiB more of shared memory and {available / 2**20:,.1f} MiB"
        f" are available on this host{but}: give it more memory, or run fewer replicas on it"
    )


log = logging.getLogger(__name__)

SNAPSHOT = "snapshot"
GRADIENT = "gradient"
CRASH_MARKER = "crash_marker"  # eight bytes: the trainer's step and micro-batch
SLOTS_BY_KIND = {SNAPSHOT: 8, GRADIENT: 256, CRASH_MARKER: 1, gradient_index.KIND: 1}

# A fetch pauses between two ranges: the slot counts as read for this long after a range.
READ_PAUSE_S = 0.5
# The end of an aborted transfer releases the memory within one turn of the loop; more time means a defect.
_SETTLE_S = 10.0
# A reader that waits for a gradient gets it within this time after the trainer has written its entry.
_LOOK_S = 0.01


@dataclass(slots=True)
class SharedSlot:
    """One piece of shared memory and its published content."""

    kind: str
    index: int
    memfd: Memfd | None = None
    content: SlotContent | None = None  # the slot's content; None while the slot is withdrawn
    version: int = 0  # number of withdrawals of this slot
    # Of each transfer under way the function that closes its connection at once.
    readers: set[Callable[[], None]] = field(default_factory=set)
    last_read: float = float("-inf")
    released: asyncio.Event = field(default_factory=asyncio.Event)
    index_slot: "SharedSlot | None" = None  # the gradient index's slot, where this slot can have an entry
    entry_number: int = 0  # number of this slot's index entry that the server read last

    @property
    def capacity(self) -> int:
        """Bytes of memory behind the slot."""
        return 0 if self.memfd is None else self.memfd.capacity

    def is_read(self, now: float) -> bool:
        """Whether a reader uses the slot, or is likely to ask for its next range soon."""
        return bool(self.readers) or now - self.last_read < READ_PAUSE_S

    @contextmanager
    def reading(self, abort: Callable[[], None], content: SlotContent | None = None) -> Iterator[memoryview]:
        """Give the slot's bytes to one transfer, which must hold no reference to them after the block.

        ``content``: the content that the reader wants (None: any). Raises ConnectionResetError, and aborts
        the transfer, where the trainer withdraws or has withdrawn it."""
        content = self.content if content is None else content
        assert content is not None and self.memfd is not None
        self.readers.add(abort)
        try:
            self._store_reader_count()
            self.refresh()
            if self.content is not content:
                abort()
                raise ConnectionResetError(f"{self.kind} slot {self.index} was withdrawn before it was read")
            yield self.memfd.view[: content.nbytes]
        finally:
            self.readers.discard(abort)
            self._store_reader_count()
            self.last_read = time.monotonic()
            self.released.set()

    def refresh(self) -> int:
        """Read the slot's entry in the gradient index if it has changed. Return the number of the new entry;
        0 where the entry is withdrawn or unchanged."""
        memfd = self.index_slot.memfd if self.index_slot is not None else None
        if (
            memfd is None
            or self.memfd is None
            or gradient_index.entry_number(memfd.view, self.index) == self.entry_number
        ):
            return 0
        self.entry_number, text = gradient_index.read_entry(memfd.view, self.index)
        self.version += 1
        self.content = None
        if self.entry_number:
            taken = self.entry_number / 1e9
            try:
                content = gradient_content(json.loads(text), len(self.memfd.view))
                self.content = replace(content, published=taken, taken=taken)
            except (FabricError, ValueError) as error:
                log.warning(
                    "gradient slot %d is not served, its index entry cannot be used: %s", self.index, error
                )
        return self.entry_number

    def _store_reader_count(self) -> None:
        if self.index_slot is not None and self.index_slot.memfd is not None:
            gradient_index.store_reader_count(self.index_slot.memfd.fd, self.index, len(self.readers))

    async def withdraw(self) -> int:
        """Stop serving the slot, and wait for the end of all readers; return how many were aborted."""
        self.refresh()
        self.content = None
        self.version += 1
        aborted = len(self.readers)
        for abort in tuple(self.readers):
            abort()
        try:
            async with asyncio.timeout(_SETTLE_S):
                while self.readers:
                    self.released.clear()
                    await self.released.wait()
        except TimeoutError:
            raise Refused(
                f"{self.kind} slot {self.index} is still being sent: do not write to it, use another slot"
            ) from None
        self.last_read = float("-inf")
        return aborted


class SlotTable:
    """All slots of one trainer, and the readable content in them."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, int], SharedSlot] = {}
        # (generation, step) of the gradient that was published last.
        self._last_gradient: tuple[int, int] | None = None
        self._published = asyncio.Event()
        # This thread has low priority: memory mostly grows early, while trainers use the same processors.
        self._growing = ThreadPoolExecutor(1, "fabric-memory", lower_priority)

    def slot(self, kind: str, index: int) -> SharedSlot:
        """Return slot ``index`` of ``kind``. Raises ProtocolError for a kind or index that cannot exist."""
        most = SLOTS_BY_KIND.get(kind, 0)
        if not 0 <= index < most:
            ranges = ", ".join(f"{name} 0 to {count - 1}" for name, count in SLOTS_BY_KIND.items())
            raise ProtocolError(f"there is no slot {index} of kind {kind[:40]!r}: slots are {ranges}")
        slot = self._slots.get((kind, index))
        if slot is None:
            labelled = kind == GRADIENT and index < gradient_index.COUNT
            index_slot = self.slot(gradient_index.KIND, 0) if labelled else None
            slot = self._slots[kind, index] = SharedSlot(kind, index, index_slot=index_slot)
        return slot

    def slots(self) -> list[SharedSlot]:
        """Return every slot that a request has named."""
        self._refresh()
        return list(self._slots.values())

    async def allocate(self, slot: SharedSlot, nbytes: int) -> Memfd:
        """Return the slot's memory, at least ``nbytes`` of it, without blocking the loop.

        Raises Refused without the memory, ConfigError where the kernel refuses to make a memfd.
        """
        if slot.memfd is None:
            slot.memfd = Memfd(f"{slot.kind} slot {slot.index}")
        await asyncio.get_running_loop().run_in_executor(self._growing, slot.memfd.grow, nbytes)
        return slot.memfd

    def publish(self, slot: SharedSlot, content: SlotContent) -> None:
        """Begin to serve ``content`` from ``slot``. Raises Refused unless the slot is withdrawn."""
        self._refresh()
        if slot.content is not None:
            raise Refused(
                f"{slot.kind} slot {slot.index} holds step {slot.content.step}, which may have been torn by"
                " writing over it: begin the slot before writing to it"
            )
        slot.content = content
        if slot.kind == GRADIENT:
            self._last_gradient = content.order
        self._published.set()
        self._published = asyncio.Event()

    async def void(self) -> None:
        """Withdraw everything: the state behind it was declared invalid."""
        self._refresh()
        self._last_gradient = None
        # Stop serving all slots before the first await.
        held = [slot for slot in self._slots.values() if slot.content is not None]
        for slot in held:
            slot.content = None
        for slot in held:
            await slot.withdraw()

    def held(self, kind: str) -> list[SharedSlot]:
        """Return the slots of ``kind`` with published content, oldest first."""
        if kind == GRADIENT:
            self._refresh()
        pairs = [(slot.content, slot) for slot in self._slots.values() if slot.kind == kind]
        live = [(content, slot) for content, slot in pairs if content is not None]
        live.sort(key=lambda pair: (pair[0].order, pair[0].published))
        return [slot for _, slot in live]

    def _refresh(self) -> None:
        """Read the gradient index; take the newest of its new entries as the gradient published last."""
        index_slot = self._slots.get((gradient_index.KIND, 0))
        if index_slot is None or index_slot.memfd is None:
            return
        seen = [
            (slot.refresh(), slot.content) for slot in self._slots.values() if slot.index_slot is not None
        ]
        new = [(number, content.order) for number, content in seen if number and content is not None]
        if new:
            self._last_gradient = max(new)[1]

    def find(self, kind: str, step: int | None, generation: int | None) -> SharedSlot | None:
        """Return the newest held slot with this step (None: any) and generation (None: any), or None."""
        for slot in reversed(self.held(kind)):
            content = slot.content
            assert content is not None
            if step in (None, content.step) and generation in (None, content.generation):
                return slot
        return None

    def contents(self, kind: str) -> list[SlotContent]:
        """Return the published content of ``kind``, oldest first."""
        return [slot.content for slot in self.held(kind) if slot.content is not None]

    def gradient_is_gone(self, step: int, generation: int | None) -> bool:
        """Whether a gradient of this step or later was published, so that waiting is of no use."""
        if self._last_gradient is None:
            return False
        last_generation, last_step = self._last_gradient
        return (last_generation if generation is None else generation, step) <= (last_generation, last_step)

    async def wait_gradient(self, step: int, generation: int | None, wait_s: float) -> SharedSlot | None:
        """Wait for the slot with this gradient and return it; None if it is gone, or after ``wait_s``."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            published = self._published
            slot = self.find(GRADIENT, step, generation)
            if slot is not None or self.gradient_is_gone(step, generation):
                return slot
            now = asyncio.get_running_loop().time()
            if now >= deadline:
                return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(deadline, now + _LOOK_S)):
                    await published.wait()

    def close(self) -> None:
        """Release all memory, once none of it grows any more."""
        self._growing.shutdown()
        for slot in self._slots.values():
            if slot.memfd is not None:
                slot.memfd.close()
