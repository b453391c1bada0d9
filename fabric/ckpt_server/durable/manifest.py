"""The files of a durable checkpoint: names, descriptions, and the checks before fabric believes them.

One folder is one checkpoint, ``STORAGE/JOB/step-0000000120-gen-3-r0-1795214478032``:

    .metadata         for torch.distributed.checkpoint alone: a pickle, which fabric writes and never reads
    __0_0.distcp      rank 0's tensors and objects as that library lays them out; __1_0.distcp is rank 1's
    fabric-0.bin      the rest of rank 0's state: the snapshot's preamble, numpy arrays
    fabric-0.json     a *rank shard*: rank 0's snapshot manifest, and which bytes of which file hold it
    manifest.json     the state's name and digest, and the size and digest of every file above
    COMPLETE          the digest of manifest.json; written last; readers ignore a folder without it

A rank shard's bytes, put together, are exactly the safetensors file that the checkpoint server held, so the
very same blocks and digests verify them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fabric.ckpt_server.format.manifest import DIGEST_DIGITS, check_manifest, is_hex, state_digest
from fabric.ckpt_server.format.safetensors_file import MAX_FILE_BYTES, is_count, parse_json
from fabric.errors import StateError
from fabric.model import SnapshotRef

FORMAT = 1
MANIFEST = "manifest.json"
MARKER = "COMPLETE"
METADATA = ".metadata"
MAX_JSON_BYTES = 256 << 20
MAX_RANKS = 1 << 16
_FOLDER = re.compile(r"step-(\d{1,19})-gen-(\d{1,19})-([A-Za-z0-9._-]{1,64})-(\d{1,19})")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,80}|\.metadata")


@dataclass(frozen=True, slots=True)
class Attempt:
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


@dataclass(frozen=True, slots=True)
class Segment:
    """``nbytes`` of a rank shard lie in ``file`` from byte ``begin`` on."""

    file: str
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RankShard:
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
    if not isinstance(files, dict) or not all(_is_file(*entry) for entry in files.items()):
        raise StateError(f"{name} lists files with impossible names or sizes")
    missing = [rank_shard_name(r) for r in range(manifest["ranks"]) if rank_shard_name(r) not in files]
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
    segments = tuple(_segment(entry, manifest["files"], name) for entry in listed)
    if sum(s.nbytes for s in segments) != snapshot["nbytes"]:
        raise StateError(f"{name} does not say where each of its {snapshot['nbytes']} bytes is")
    return RankShard(snapshot, segments)


def _is_file(name: object, entry: object) -> bool:
    """Whether ``name`` is a plain file name, never a path, and ``entry`` has a size and a digest."""
    if not isinstance(name, str) or not _FILE.fullmatch(name) or not isinstance(entry, dict):
        return False
    return is_count(entry.get("nbytes"), MAX_FILE_BYTES) and is_hex(entry.get("digest"), DIGEST_DIGITS)


def _segment(entry: object, files: Mapping[str, Any], name: str) -> Segment:
    if (
        not isinstance(entry, list)
        or len(entry) != 3
        or not isinstance(entry[0], str)
        or entry[0] not in files
    ):
        raise StateError(f"{name} refers to a file that its manifest does not list")
    file, begin, nbytes = entry
    if not is_count(begin, MAX_FILE_BYTES) or not is_count(nbytes, MAX_FILE_BYTES):
        raise StateError(f"{name} refers to impossible bytes of {file}")
    if begin + nbytes > files[file]["nbytes"]:
        raise StateError(
            f"{name} refers to byte {begin + nbytes} of {file}, which has {files[file]['nbytes']}"
        )
    return Segment(file, begin, nbytes)


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
