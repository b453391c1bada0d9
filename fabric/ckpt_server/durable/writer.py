"""Writes one durable checkpoint from a snapshot in shared memory: data, descriptions, manifest, then marker.

Every rank of a replica writes its own part into one folder. Rank 0 waits for the descriptions of all parts,
adds index and manifest, and sets the marker when all else is durable. A writer that ends before the marker
leaves an incomplete folder, which readers ignore, and all earlier checkpoints.
"""

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

from fabric.ckpt_server.durable.reader import (
    FORMAT,
    MANIFEST,
    MARKER,
    MAX_JSON_BYTES,
    METADATA,
    Attempt,
    attempts_to_delete,
    list_checkpoints,
    open_checkpoint,
    parse_manifest,
    parse_rank_shard,
    rank_shard_name,
)
from fabric.ckpt_server.durable.storage import Storage, StorageAway, StorageGone
from fabric.ckpt_server.format.manifest import bytes_digest, file_digest, state_digest
from fabric.ckpt_server.format.safetensors_file import canonical_json
from fabric.ckpt_server.wire.channel_protocol import DurableJob
from fabric.errors import IntegrityError, StateError
from fabric.model import SnapshotRef, Value
from fabric.runtime.failpoints import Failpoints

_LOOK_S = 0.1


class DurableJobResult(Value):
    """``complete``: False for a rank other than 0, which writes its part alone. ``folder``: a URL.
    ``warnings``: problems with deleting old attempts. ``conflict``: why a restart would not begin from it."""

    folder: str
    complete: bool
    warnings: tuple[str, ...] = ()
    conflict: str = ""


def write(
    order: DurableJob, snapshot: Mapping[str, Any], file: memoryview, points: Failpoints
) -> DurableJobResult:
    """Write the snapshot in ``file``, which has this checked manifest. Raises StateError.

    Deletes the folder first if possible, but not where storage is away: the next try needs all ranks' parts.
    """
    rank, ranks = snapshot.get("rank", 0), len(snapshot.get("ranks", [""]))
    if file_digest(file) != snapshot["digest"]:
        raise IntegrityError(f"the snapshot of step {snapshot['step']} in memory does not match its digest")
    attempt = Attempt(snapshot["generation"], snapshot["step"], order.replica, order.incarnation)
    job = Storage(order.url).at(order.job)
    folder = job.at(attempt.folder)
    if order.required and not any(Attempt.parse(name) for name in job.names()):
        raise StorageGone(
            f"{job.url} holds no checkpoint any more, and FABRIC_DURABLE_EVERY says `required`: nothing"
            " was written; mount it again, or move the checkpoints back"
        )
    if order.made and not job.is_there():
        raise StorageGone(f"{job.url} is not there any more: nothing was written; mount it again")
    try:
        folder.make()
        if not _is_complete(folder, snapshot):
            # Late: it imports torch, for seconds, and storage that is away needs no torch.
            from fabric.ckpt_server.durable.dcp import write_rank_shard

            step = snapshot["step"]
            shard = write_rank_shard(folder, file, snapshot, rank, lambda: points.hit("durable-begin", step))
            points.hit("durable-data", step)
            folder.put(rank_shard_name(rank), json.dumps(shard, separators=(",", ":")).encode())
            if not rank:
                _finish(folder, order, snapshot, ranks, points)
    except StorageAway:
        raise
    except StateError:
        if rank == 0:
            with contextlib.suppress(StateError):
                folder.remove_folder()
        raise
    if rank:
        return DurableJobResult(folder.url, False)
    warnings, conflict = _tidy(job, order, attempt, points)
    return DurableJobResult(folder.url, True, warnings, conflict)


def _is_complete(folder: Storage, snapshot: Mapping[str, Any]) -> bool:
    """Whether an earlier try has set the marker, although storage had said that the marker was not written.

    Readers may use the checkpoint already, so nothing may be written there again.
    """
    if MARKER not in folder.names():
        return False
    wanted = SnapshotRef(snapshot["generation"], snapshot["step"], state_digest(snapshot))
    return open_checkpoint(folder).state == wanted


def _finish(
    folder: Storage, order: DurableJob, snapshot: Mapping[str, Any], ranks: int, points: Failpoints
) -> None:
    step = snapshot["step"]
    described = _await_parts(folder, ranks, order.patience_s)
    rank_shards = [json.loads(data) for data in described]
    points.hit("durable-shards", step)
    from fabric.ckpt_server.durable.dcp import write_metadata

    write_metadata(folder, rank_shards)
    files = {name: entry for rank_shard in rank_shards for name, entry in rank_shard["files"].items()}
    files[METADATA] = _entry(folder.get(METADATA, MAX_JSON_BYTES))
    files |= {rank_shard_name(rank): _entry(data) for rank, data in enumerate(described)}
    manifest = {
        "format": FORMAT,
        "job": order.job,
        "replica": order.replica,
        "generation": snapshot["generation"],
        "step": step,
        "digest": state_digest(snapshot),
        "created": snapshot["created"],
        "ranks": ranks,
        "files": files,
    }
    data = canonical_json(manifest).encode()
    checked = parse_manifest(data, folder.where(MANIFEST))
    for rank, text in enumerate(described):
        # A part of another state must not get into a complete checkpoint.
        parse_rank_shard(text, folder.where(rank_shard_name(rank)), checked, rank)
    for name, entry in files.items():
        if folder.size(name) != entry["nbytes"]:
            raise StorageAway(f"{folder.where(name)} does not read back as it was written: check the storage")
    folder.put(MANIFEST, data)
    points.hit("durable-marker", step)
    folder.put(MARKER, f"{bytes_digest(memoryview(data))}\n".encode())
    points.hit("durable-complete", step)


def _await_parts(folder: Storage, ranks: int, patience_s: float) -> list[bytes]:
    """Wait for the descriptions of all ranks' parts and return them."""
    deadline = time.monotonic() + patience_s
    while True:
        names = set(folder.names())
        missing = [rank for rank in range(ranks) if rank_shard_name(rank) not in names]
        if not missing:
            return [folder.get(rank_shard_name(rank), MAX_JSON_BYTES) for rank in range(ranks)]
        if time.monotonic() >= deadline:
            raise StateError(
                f"{folder.url} was given up: rank {missing[0]} has not written its part within"
                f" {patience_s:g} s; see its checkpoint server's log"
            )
        time.sleep(_LOOK_S)


def _tidy(job: Storage, order: DurableJob, own: Attempt, points: Failpoints) -> tuple[tuple[str, ...], str]:
    """Delete stale attempts; return warnings, and why a restart would not begin from ``own``, or empty.

    Where deleting fails, the next checkpoint tries it again.
    """
    warnings: list[str] = []
    try:
        listing = list_checkpoints(job, order.job)
    except StateError as error:
        return (str(error),), ""
    complete = [c.attempt for c in listing.complete if c.attempt is not None]
    for attempt in attempts_to_delete(complete, listing.unfinished, own, order.keep):
        points.hit("durable-tidy", own.step)
        folder = job.at(attempt.folder)
        try:
            if folder.is_link():
                warnings.append(f"{folder.url} is a symbolic link to a folder elsewhere: neither is deleted")
                continue
            # Delete the marker first: readers then ignore the folder, even if deleting the other files fails.
            folder.remove(MARKER)
            folder.remove_folder()
        except StateError as error:
            warnings.append(str(error))
    newest = max((a.generation for a in complete), default=0)
    conflict = (
        f"it is kept, but {job.url} also holds checkpoints of generation {newest}, and this job is in "
        f"generation {own.generation}: a job that lost its memory would begin from those; give each job "
        "a FABRIC_JOB or FABRIC_DURABLE of its own, or move the others away"
    )
    return (*warnings, *listing.warnings), conflict if newest > own.generation else ""


def _entry(data: bytes) -> dict[str, object]:
    return {"nbytes": len(data), "digest": bytes_digest(memoryview(data))}
