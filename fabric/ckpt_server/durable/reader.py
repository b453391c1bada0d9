"""Durable checkpoints: their files, and finding and checking them, without torch (read by ``reading``).

A folder is a checkpoint when its marker names the digest of its manifest. All other bytes are verified when
they are read: a rank shard's description against the manifest, and each block and the whole file against the
digests of the snapshot. An error names the file that is wrong.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fabric.ckpt_server.durable.storage import Storage, StorageAway
from fabric.ckpt_server.format.manifest import (
    DIGEST_DIGITS,
    bytes_digest,
    check_manifest,
    is_hex,
    state_digest,
)
from fabric.ckpt_server.format.safetensors_file import MAX_FILE_BYTES, is_count, parse_json
from fabric.errors import IntegrityError, StateError
from fabric.model import SnapshotRef, Value

# The files of a durable checkpoint: names, descriptions, and the checks before fabric believes them.
#
# One folder is one checkpoint, ``STORAGE/JOB/step-0000000120-gen-3-r0-1795214478032``:
#
# .metadata for torch.distributed.checkpoint alone: a pickle, which fabric writes and never reads
# __0_0.distcp rank 0's tensors and objects as that library lays them out; __1_0.distcp is rank 1's
# fabric-0.bin the rest of rank 0's state: the snapshot's preamble, numpy arrays fabric-0.json a *rank
# shard*: rank 0's snapshot manifest, and which bytes of which file hold it manifest.json the state's name
# and digest, and the size and digest of every file above COMPLETE the digest of manifest.json; written
# last; readers ignore a folder without it
#
# A rank shard's bytes, put together, are exactly the safetensors file that the checkpoint server held, so
# the very same blocks and digests verify them.


FORMAT = 1
MANIFEST = "manifest.json"
MARKER = "COMPLETE"
METADATA = ".metadata"
MAX_JSON_BYTES = 256 << 20
MAX_RANKS = 1 << 16
_FOLDER = re.compile(r"step-(\d{1,19})-gen-(\d{1,19})-([A-Za-z0-9._-]{1,64})-(\d{1,19})")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,80}|\.metadata")


class Attempt(Value):
    """One replica's attempt to write the state of ``step``, in a folder of its own."""

    generation: int
    step: int
    replica: str
    incarnation: int

    @property
    def folder(self) -> str:
        return f"step-{self.step:010d}-gen-{self.generation}-{self.replica}-{self.incarnation}"

    @classmethod
    def parse(cls, folder: str) -> "Attempt | None":
        """Return the attempt that a folder's name describes; None for a foreign folder."""
        match = _FOLDER.fullmatch(folder)
        if match is None:
            return None
        step, generation, replica, incarnation = match.groups()
        return cls(int(generation), int(step), replica, int(incarnation))


class Segment(Value):
    """``nbytes`` of a rank shard lie in ``file`` from byte ``begin`` on."""

    file: str
    begin: int
    nbytes: int


class RankShard(Value):
    """One rank's part: the manifest of its snapshot, and the places of the snapshot's bytes, in order."""

    snapshot: Mapping[str, Any]
    segments: tuple[Segment, ...]


def rank_shard_name(rank: int) -> str:
    """Return the file that describes one rank's part."""
    return f"fabric-{rank}.json"


def parse_manifest(data: bytes, name: str) -> dict[str, Any]:
    """Return the checked manifest in ``data``, read from ``name``. Raises StateError."""
    manifest = parse_json(data)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StateError(f"{name} is not the manifest of a durable checkpoint of format {FORMAT}")
    for key in ("generation", "step"):
        if not is_count(manifest.get(key), 1 << 62):
            raise StateError(f"{name} has no usable {key}")
    if not is_hex(manifest.get("digest"), DIGEST_DIGITS) or not isinstance(manifest.get("job"), str):
        raise StateError(f"{name} names no job or no state")
    if not is_count(manifest.get("ranks"), MAX_RANKS) or not manifest["ranks"]:
        raise StateError(f"{name} has no usable number of ranks")
    files = manifest.get("files")
    for file, entry in files.items() if isinstance(files, dict) else [("", None)]:
        # A plain file name, never a path, with a size and a digest.
        if (
            not _FILE.fullmatch(file)
            or not isinstance(entry, dict)
            or not is_count(entry.get("nbytes"), MAX_FILE_BYTES)
            or not is_hex(entry.get("digest"), DIGEST_DIGITS)
        ):
            raise StateError(f"{name} lists files with impossible names or sizes")
    missing = [x for x in map(rank_shard_name, range(manifest["ranks"])) if x not in manifest["files"]]
    if missing:
        raise StateError(f"{name} does not list {missing[0]}")
    return manifest


def state_of(manifest: Mapping[str, Any]) -> SnapshotRef:
    """Return the state that a checked manifest describes."""
    return SnapshotRef(manifest["generation"], manifest["step"], manifest["digest"])


def parse_rank_shard(data: bytes, name: str, manifest: Mapping[str, Any], rank: int) -> RankShard:
    """Return the checked description of ``rank``'s part, read from ``name``, as a part of ``manifest``'s
    checkpoint.

    Raises StateError, also where ``data`` names bytes that the files of the manifest do not have.
    """
    description = parse_json(data)
    if (
        not isinstance(description, dict)
        or description.get("format") != FORMAT
        or description.get("rank") != rank
    ):
        raise StateError(f"{name} does not describe rank {rank} in format {FORMAT}")
    snapshot = check_manifest(description.get("snapshot"))
    same = SnapshotRef(snapshot["generation"], snapshot["step"], state_digest(snapshot)) == state_of(manifest)
    if not same or (manifest["ranks"] > 1 and snapshot.get("rank") != rank):
        raise StateError(f"{name} belongs to another state than its manifest")
    listed = description.get("segments")
    if not isinstance(listed, list):
        raise StateError(f"{name} does not say where its bytes are")
    segments, files = [], manifest["files"]
    for entry in listed:
        if not isinstance(entry, list) or len(entry) != 3 or not isinstance(entry[0], str):
            raise StateError(f"{name} refers to a file that its manifest does not list")
        file, begin, nbytes = entry
        if file not in files:
            raise StateError(f"{name} refers to a file that its manifest does not list")
        if not is_count(begin, MAX_FILE_BYTES) or not is_count(nbytes, MAX_FILE_BYTES):
            raise StateError(f"{name} refers to impossible bytes of {file}")
        if begin + nbytes > (size := files[file]["nbytes"]):
            raise StateError(f"{name} refers to byte {begin + nbytes} of {file}, which has {size}")
        segments.append(Segment(file, begin, nbytes))
    if sum(s.nbytes for s in segments) != snapshot["nbytes"]:
        raise StateError(f"{name} does not say where each of its {snapshot['nbytes']} bytes is")
    return RankShard(snapshot, tuple(segments))


def attempts_to_delete(
    complete: Iterable[Attempt], unfinished: Iterable[Attempt], own: Attempt, keep: int
) -> list[Attempt]:
    """Return the attempts to delete now that ``own`` is complete: unfinished ones first, then all but the
    newest ``keep`` complete ones up to the generation of ``own``, which stays.

    Checkpoints of a newer generation are not of this job's life: another job writes under its name, or has
    written there before. Another replica may still write into a folder without a marker. Delete such a
    folder only if it is older than ``own``, or is this replica's, which writes one checkpoint at a time.
    """
    order = {a: (a.generation, a.step) for a in (*complete, own) if a.generation <= own.generation}
    stale = [
        a
        for a in unfinished
        if a != own and ((a.generation, a.step) < order[own] or a.replica == own.replica)
    ]
    newest_last = sorted(order, key=lambda a: (*order[a], a == own, a.folder))
    old = newest_last[: max(len(newest_last) - max(keep, 1), 0)]
    return stale + [a for a in old if a != own]


_MAX_MARKER_BYTES = 4096


class DurableCheckpoint(Value):
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


class CheckpointListing(Value):
    """The checkpoints in a job's folder.

    ``complete``: oldest first. ``unfinished``: without a marker. ``warnings``: marked but unreadable."""

    complete: tuple[DurableCheckpoint, ...]
    unfinished: tuple[Attempt, ...]
    warnings: tuple[str, ...]


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


class NotListed(StorageAway):
    """Storage lists no checkpoint that another process has seen there: the listing may be an old one."""


def find_checkpoint(storage: Storage, job: str, state: SnapshotRef) -> DurableCheckpoint:
    """Return the complete checkpoint of ``state``. Raises StateError, with the problems in ``storage``.

    Raises NotListed where there is no problem."""
    listing = list_checkpoints(storage, job)
    checkpoint = next((c for c in listing.complete if c.state == state), None)
    if checkpoint is None:
        more = "".join(f"; {warning}" for warning in listing.warnings)
        kind = StateError if more else NotListed
        raise kind(f"{storage.url} holds no complete checkpoint of step {state.step}{more}")
    return checkpoint
