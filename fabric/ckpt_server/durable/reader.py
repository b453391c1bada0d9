"""Finding and reading durable checkpoints: every byte verified, nothing unpickled, no torch.

A folder is a checkpoint when its marker names the digest of its manifest. All other bytes are verified when
they are read: a rank shard's description against the manifest, and each block and the whole file against the
digests of the snapshot. An error names the file that is wrong.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import xxhash

from fabric.ckpt_server.durable.manifest import (
    MANIFEST,
    MARKER,
    MAX_JSON_BYTES,
    METADATA,
    Attempt,
    RankShard,
    parse_manifest,
    parse_rank_shard,
    rank_shard_name,
    state_of,
)
from fabric.ckpt_server.durable.storage import Storage, StorageAway
from fabric.ckpt_server.format.digest import block_digest, bytes_digest
from fabric.errors import IntegrityError, StateError
from fabric.model import SnapshotRef

_MAX_MARKER_BYTES = 4096
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class DurableCheckpoint:
    """A complete checkpoint. ``manifest`` is checked; ``attempt`` comes from the folder's name."""

    storage: Storage
    manifest: dict[str, Any]
    attempt: Attempt | None

    @property
    def state(self) -> SnapshotRef:
        return state_of(self.manifest)

    @property
    def ranks(self) -> int:
        return int(self.manifest["ranks"])


def open_checkpoint(storage: Storage) -> DurableCheckpoint:
    """Return the checkpoint in this folder. Raises StateError where it is incomplete or damaged."""
    names = storage.names()
    if MARKER not in names:
        raise StateError(f"{storage.url} holds no complete checkpoint: it has no file {MARKER}")
    promised = storage.get(MARKER, _MAX_MARKER_BYTES).decode("ascii", "replace").strip()
    data = storage.get(MANIFEST, MAX_JSON_BYTES)
    if bytes_digest(memoryview(data)) != promised:
        raise IntegrityError(
            f"{storage.where(MANIFEST)} does not match the digest in {MARKER}; it is damaged"
        )
    manifest = parse_manifest(data, storage.where(MANIFEST))
    return DurableCheckpoint(storage, manifest, Attempt.parse(storage.url.rpartition("/")[2]))


@dataclass(frozen=True, slots=True)
class CheckpointListing:
    """The checkpoints in a job's folder.

    ``complete``: oldest first. ``unfinished``: without a marker. ``warnings``: marked but unreadable."""

    complete: tuple[DurableCheckpoint, ...]
    unfinished: tuple[Attempt, ...]
    warnings: tuple[str, ...]

    def find(self, state: SnapshotRef) -> DurableCheckpoint | None:
        """Return the checkpoint that holds this state."""
        return next((c for c in self.complete if c.state == state), None)


def list_checkpoints(storage: Storage, job: str) -> CheckpointListing:
    """Return all checkpoints in ``storage``, the folder of ``job``. Raises StorageError where it cannot be
    listed, and StorageAway where one of them cannot be read now: a newer state would be passed over."""
    complete, unfinished, warnings = [], [], []
    for name in storage.names():
        attempt = Attempt.parse(name)
        if attempt is None:
            continue
        folder = storage.at(name)
        try:
            if MARKER not in folder.names():
                unfinished.append(attempt)
                continue
            checkpoint = open_checkpoint(folder)
        except StorageAway:
            raise
        except StateError as error:
            warnings.append(f"{error}")
            continue
        if checkpoint.manifest["job"] == job:
            complete.append(checkpoint)
    complete.sort(key=lambda c: (c.state.generation, c.state.step, c.manifest["digest"]))
    return CheckpointListing(tuple(complete), tuple(unfinished), tuple(warnings))


class RankShardFile:
    """One rank's part of a checkpoint as a safetensors file, the one snapshotted, until ``stack`` closes.

    ``manifest`` is that of the snapshot. Raises StateError that names the damaged or missing file.
    """

    def __init__(self, checkpoint: DurableCheckpoint, rank: int, stack: ExitStack) -> None:
        storage, listed = checkpoint.storage, checkpoint.manifest["files"]
        self.storage = storage
        self._listed = listed
        if not 0 <= rank < checkpoint.ranks:
            raise StateError(f"{storage.url} is of {checkpoint.ranks} ranks and has no rank {rank}")
        name = rank_shard_name(rank)
        data = storage.get(name, MAX_JSON_BYTES)
        if bytes_digest(memoryview(data)) != listed[name]["digest"]:
            raise IntegrityError(f"{storage.where(name)} does not match its digest; it is damaged")
        self._rank_shard: RankShard = parse_rank_shard(data, storage.where(name), checkpoint.manifest, rank)
        self.manifest = dict(self._rank_shard.snapshot)
        self.nbytes: int = self.manifest["nbytes"]
        for file in {s.file for s in self._rank_shard.segments}:
            size = storage.size(file)
            if size != listed[file]["nbytes"]:
                raise IntegrityError(
                    f"{storage.where(file)} has {size} bytes and should have {listed[file]['nbytes']}; it is"
                    " damaged"
                )
        self._stack = stack
        self._open: dict[str, Any] = {}

    def fill(self, target: memoryview, begin: int = 0) -> None:
        """Fill ``target`` from byte ``begin`` (where a block begins) on, up to the end of a block,
        verified."""
        for segment, offset, low, high in self._parts(begin, begin + len(target)):
            file = self._file(segment.file)
            self.storage.read_into(
                file, segment.file, segment.begin + low - offset, target[low - begin : high - begin]
            )
        size: int = self.manifest["block_bytes"]
        for low in range(0, len(target), size):
            index = (begin + low) // size
            if block_digest(target[low : low + size]) != self.manifest["blocks"][index]:
                touched = {s.file for s, *_ in self._parts(begin + low, min(begin + low + size, self.nbytes))}
                guilty = [file for file in sorted(touched) if not self._is_whole(file)] or sorted(touched)
                names = " and ".join(self.storage.where(file) for file in guilty)
                raise IntegrityError(
                    f"{names} is damaged: block {index} of the state does not match its digest"
                )

    def verify_files(self) -> None:
        """Read all of this part's files, and torch's index: torch also needs bytes that fabric does not read.

        Raises IntegrityError with the names of the files that do not match the manifest.
        """
        own = {segment.file for segment in self._rank_shard.segments} | {METADATA} & set(self._listed)
        wrong = [
            self.storage.where(name)
            for name in sorted(own)
            if self.storage.size(name) != self._listed[name]["nbytes"] or not self._is_whole(name)
        ]
        if wrong:
            verb = "does" if len(wrong) == 1 else "do"
            raise IntegrityError(
                f"{' and '.join(wrong)} {verb} not match the digest in {MANIFEST}; torch cannot load the"
                " checkpoint"
            )

    def _is_whole(self, name: str) -> bool:
        """Whether all of a file matches the manifest; reads the file, to name the damaged one."""
        hasher, piece = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
        nbytes: int = self._listed[name]["nbytes"]
        for begin in range(0, nbytes, _PIECE_BYTES):
            part = piece[: min(_PIECE_BYTES, nbytes - begin)]
            self.storage.read_into(self._file(name), name, begin, part)
            hasher.update(part)
        return bool(hasher.hexdigest() == self._listed[name]["digest"])

    def _parts(self, begin: int, end: int) -> Iterator[tuple[Any, int, int, int]]:
        """Yield each touched segment, its begin in the rank shard, and the first and last byte wanted
        there."""
        offset = 0
        for segment in self._rank_shard.segments:
            low, high = max(begin, offset), min(end, offset + segment.nbytes)
            if low < high:
                yield segment, offset, low, high
            offset += segment.nbytes

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(self.storage.open(name))
        return self._open[name]


class NotListed(StorageAway):
    """Storage lists no checkpoint that another process has seen there: the listing may be an old one."""


def find_checkpoint(storage: Storage, job: str, state: SnapshotRef) -> DurableCheckpoint:
    """Return the complete checkpoint of ``state``. Raises StateError, with the problems in ``storage``.

    Raises NotListed where there is no problem."""
    listing = list_checkpoints(storage, job)
    checkpoint = listing.find(state)
    if checkpoint is None:
        more = "".join(f"; {warning}" for warning in listing.warnings)
        kind = StateError if more else NotListed
        raise kind(f"{storage.url} holds no complete checkpoint of step {state.step}{more}")
    return checkpoint
