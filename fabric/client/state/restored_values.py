"""``restore_values``: a snapshot as nested values, without a model, an optimizer or a job."""

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fabric.ckpt_server.format.safetensors_file import read_preamble
from fabric.ckpt_server.format.tensor_slices import Shard, find_shards
from fabric.ckpt_server.reading import BlockState, MergedState, ReadableState, open_state
from fabric.ckpt_server.state.training_state import values_of
from fabric.errors import IntegrityError, StateError
from fabric.model import Value
from fabric.runtime.config import reader_access


class RestoredValues(Value):
    """The values of one snapshot.

    The tensors lie in one memory of the size of the snapshot, which lives as long as one of them.
    """

    values: dict[str, Any]  # by name ("model", "optimizer", those of state=), as state_dict() gave them
    step: int  # committed optimizer steps that the values have
    digest: str  # 32 hex digits: of the state as the job knows it; of a file, as ``fabric pull`` prints it
    rank: int  # the values are the part of this rank; 0 for a whole state
    ranks: int  # how many ranks the replica had; 1 for a whole state
    shards: Mapping[str, Shard]  # the place of each part in its larger tensor, by name in the file


def restore_values(
    source: str | Path,
    *,
    digest: str | None = None,
    token_file: str | Path | None = None,
    timeout_s: float | None = None,
) -> RestoredValues:
    """Read a snapshot, verify it, and return its values, with tensors on the CPU.

    ``source``: a file of ``fabric pull``; the URL of a checkpoint server (its newest snapshot) or of one of
    its snapshots, ``http://host:port/v1/snapshots/STEP``; or a durable checkpoint: its folder or fsspec URL,
    or that of its job for the newest. A durable checkpoint is read with all of its ranks, as are several
    URLs with commas between them, one of each rank. One URL of a replica of several ranks, or ``FOLDER#1``,
    gives the part of that rank. ``digest``: refuse a state with another digest. A file has no digest of its
    own: without ``digest`` only its structure is checked. ``token_file``: for URLs; default
    FABRIC_TOKEN_FILE. TLS follows FABRIC_TLS. ``timeout_s``: how long
    checkpoint servers may take; without it one that sends at less than 20 kB/s is lost.

    Raises a FabricError of one sentence: ConfigError for a source that cannot be read, Unreachable for a
    server that is lost, StateError for a state that is damaged or missing, IntegrityError for a wrong digest.
    """
    token, tls = reader_access(token_file)
    name = str(source)
    with open_state(name, token, tls, timeout_s) as state:
        file = _read(state)
        promised = state.manifest["digest"] if isinstance(state, BlockState | MergedState) else state.digest
    if digest is not None and digest != promised:
        raise IntegrityError(
            f"{name} has the digest {promised} and not {digest}: it is damaged, or another state"
        )
    try:
        step, values = values_of(file)
        shards = find_shards(read_preamble(file).metadata)
    except StateError as error:
        raise StateError(f"{name}: {error}") from error
    return RestoredValues(values, step, promised, state.rank, state.ranks, shards)


def _read(state: ReadableState) -> memoryview:
    """Return the bytes of ``state`` in memory of their own, every block verified."""
    try:
        file, end = memoryview(mmap.mmap(-1, state.nbytes)), 0
    except OSError as error:
        raise StateError(
            f"{state.name} has {state.nbytes:,} bytes, and this host has no memory for it: {error.strerror}"
        ) from error
    for piece in state.pieces():
        file[end : end + len(piece)] = piece
        end += len(piece)
    return file
