"""Reads a state piece by piece: a file, a durable checkpoint, or a snapshot on a checkpoint server."""

import mmap
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from fabric.ckpt_server.durable.reader import (
    DurableCheckpoint,
    RankShardFile,
    list_checkpoints,
    open_checkpoint,
)
from fabric.ckpt_server.durable.storage import Storage
from fabric.ckpt_server.fetch.http_source import (
    TRANSIENT,
    HttpAccess,
    HttpAddress,
    HttpConnection,
    read_exactly,
    refusal,
)
from fabric.ckpt_server.format.digest import block_digest, file_digest
from fabric.ckpt_server.format.manifest import check_manifest
from fabric.ckpt_server.format.safetensors_file import (
    MAX_HEADER_BYTES,
    TensorSpan,
    parse_json,
    read_header,
    read_preamble,
)
from fabric.ckpt_server.format.tensor_slices import find_shards
from fabric.ckpt_server.reading.merged_state import MergedState
from fabric.errors import ConfigError, IntegrityError, StateError, Unreachable
from fabric.runtime.http.dial_errors import describe
from fabric.runtime.http.tls import Tls
from fabric.runtime.http.token_file import TokenFile

_TIMEOUT_S = 30.0
_MAX_MANIFEST_BYTES = 256 << 20
_MAX_HEALTH_BYTES = 4 << 10
_SNAPSHOTS = "/v1/snapshots/"


class ReadableState(Protocol):
    """A state that can be read. ``name``: the user's name of it; ``tensors``: in file order.

    It is the part of rank ``rank`` of ``ranks`` (0 of 1: the whole state).
    """

    name: str
    step: int
    nbytes: int
    rank: int
    ranks: int
    tensors: dict[str, TensorSpan]

    @property
    def digest(self) -> str:
        """The digest of the whole state, 32 hex digits."""

    def read(self, begin: int, end: int) -> memoryview:
        """Return bytes of the file. Raises StateError or Unreachable."""

    def pieces(self) -> Iterator[memoryview]:
        """Yield all bytes of the file in order. Raises StateError or Unreachable."""


@contextmanager
def open_state(
    name: str, token: str, tls: Tls | None = None, timeout_s: float | None = None
) -> Iterator[ReadableState]:
    """The state that ``name`` (a path or URLs) stands for. Raises FabricError.

    ``timeout_s``: how long reading from checkpoint servers may take."""
    with ExitStack() as stack:
        if "://" not in name and not Path(_folder_and_rank(name)[0]).is_dir():
            yield stack.enter_context(closing(FileState(name)))
        else:
            yield open_manifested(name, token, stack, tls, timeout_s)


def open_manifested(
    name: str, token: str, stack: ExitStack, tls: Tls | None = None, timeout_s: float | None = None
) -> "BlockState | MergedState":
    """Open a state with a manifest: a checkpoint server's, or a durable one, which ``stack`` closes.

    ``name`` may name all ranks of a state: then it is the merged state. Raises FabricError."""
    parts: list[BlockState]
    if name.startswith(("http://", "https://")):
        urls = name.split(",")
        parts = [stack.enter_context(closing(RemoteState(url, token, tls, timeout_s))) for url in urls]
    else:
        url, rank = _folder_and_rank(name)
        if rank is not None and not (rank.isascii() and rank.isdecimal() and len(rank) < 10):
            raise ConfigError(f"{name[:200]} names no rank: write FOLDER#1 for that of rank 1")
        checkpoint = _durable(url)
        ranks = [int(rank)] if rank is not None else range(checkpoint.ranks)
        parts = [stack.enter_context(closing(DurableState(name, checkpoint, number))) for number in ranks]
    return parts[0] if len(parts) == 1 else MergedState(name, parts)


def _folder_and_rank(name: str) -> tuple[str, str | None]:
    """Return the folder and the text after its mark. A mark in the folder's own path counts as a letter."""
    url, mark, rank = name.rpartition("#")
    return (url, rank) if mark and "/" not in rank and not Path(name).is_dir() else (name, None)


class FileState:
    """A snapshot in a file; ``digest`` verifies it."""

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            with Path(name).open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name} cannot be read: {error}") from error
        self._view = memoryview(self._map)
        try:
            header = read_header(self._view)
        except StateError as error:
            self.close()
            raise StateError(f"{name}: {error}") from error
        self.nbytes = len(self._view)
        self.tensors = {span.name: span for span in header.tensors}
        described = parse_json(header.metadata)
        step = described.get("step") if isinstance(described, dict) else None
        self.step = step if isinstance(step, int) else -1
        self.rank, self.ranks = 0, 1

    @property
    def digest(self) -> str:
        return file_digest(self._view)

    def read(self, begin: int, end: int) -> memoryview:
        return self._view[begin:end]

    def pieces(self) -> Iterator[memoryview]:
        yield self._view

    def close(self) -> None:
        self._view.release()
        self._map.close()


class BlockState:
    """One rank's file of a state, whose manifest has every block's digest: each read is verified.

    ``name``: the user's name of it; ``tensors``: in file order; ``rank`` of ``ranks`` has this file;
    ``shards``: its tensors that are parts of larger tensors.
    """

    def __init__(self, name: str, manifest: dict[str, Any]) -> None:
        self.name = name
        self.manifest = manifest
        self.step, self.nbytes = manifest["step"], manifest["nbytes"]
        self.rank, self.ranks = manifest.get("rank", 0), len(manifest.get("ranks", ("",)))
        self._kept_from, self._kept = 0, memoryview(b"")
        length = int.from_bytes(self.read(0, min(8, self.nbytes)), "little")
        if length > min(MAX_HEADER_BYTES, self.nbytes - 8):
            raise StateError(f"{self.name}: this is no safetensors file, or it is damaged")
        self.header = read_preamble(self.read(0, 8 + length), self.nbytes)
        self.tensors = {span.name: span for span in self.header.tensors}
        self.shards = find_shards(self.header.metadata)

    @property
    def digest(self) -> str:
        """The digest of this file."""
        return str(self.manifest["digest"])

    def blocks(self, first: int, count: int) -> Iterator[memoryview]:
        """Return some blocks in order, each verified. Raises StateError or Unreachable."""
        raise NotImplementedError

    def pieces(self) -> Iterator[memoryview]:
        """Yield all blocks in order, each verified. Raises StateError or Unreachable."""
        return self.blocks(0, len(self.manifest["blocks"]))

    def close(self) -> None:
        """Release the connection or files."""

    def read(self, begin: int, end: int) -> memoryview:
        """Return bytes of the file. Keep their blocks for the next call, which often reads near them."""
        if begin >= end:
            return memoryview(b"")
        size = self.manifest["block_bytes"]
        if not self._kept_from <= begin < end <= self._kept_from + len(self._kept):
            first, last = begin // size, -(-end // size)
            low, high = first * size, min(last * size, self.nbytes)
            data, at = memoryview(bytearray(high - low)), 0
            for block in self.blocks(first, last - first):
                data[at : at + len(block)] = block
                at += len(block)
            self._kept_from, self._kept = low, data.toreadonly()
        return self._kept[begin - self._kept_from : end - self._kept_from]

    def _place(self, block: int) -> tuple[int, int]:
        size = self.manifest["block_bytes"]
        return block * size, min((block + 1) * size, self.nbytes)


class DurableState(BlockState):
    """One rank's part of a durable checkpoint."""

    def __init__(self, name: str, checkpoint: DurableCheckpoint, rank: int) -> None:
        self._stack = ExitStack()
        try:
            self._rank_shard = RankShardFile(checkpoint, rank, self._stack)
            super().__init__(name, self._rank_shard.manifest)
        except BaseException:
            self.close()
            raise

    @property
    def digest(self) -> str:
        """The digest of the whole state; reads and verifies all of it, and every file that it lies in."""
        for _ in self.pieces():
            pass
        self._rank_shard.verify_files()
        return super().digest

    def blocks(self, first: int, count: int) -> Iterator[memoryview]:
        for index in range(first, first + count):
            begin, end = self._place(index)
            data = memoryview(bytearray(end - begin))
            self._rank_shard.fill(data, begin)
            yield data

    def close(self) -> None:
        self._stack.close()


def _durable(url: str) -> DurableCheckpoint:
    """Return the checkpoint in this folder, or the newest complete one in the folder of a job."""
    storage = Storage(url)
    job = storage.url.rpartition("/")[2]
    listing = list_checkpoints(storage, job)
    if listing.complete:
        return listing.complete[-1]
    for warning in listing.warnings:
        raise StateError(warning)
    return open_checkpoint(storage)


@dataclass(frozen=True, slots=True)
class SnapshotAddress:
    """A checkpoint server and one of its steps (a number, or latest)."""

    server: HttpAddress
    step: str
    query: str

    @classmethod
    def parse(cls, url: str) -> "SnapshotAddress":
        """Parse ``http://host:port``, with or without ``/v1/snapshots/STEP``. Raises ConfigError."""
        parts = urlsplit(url)
        base, mark, rest = parts.path.partition(_SNAPSHOTS)
        step = rest.split("/")[0] if mark else "latest"
        if not (step == "latest" or (step.isascii() and step.isdecimal())):
            raise ConfigError(f"{url[:200]} names no step: write http://host:port/v1/snapshots/STEP")
        query = f"?{parts.query}" if parts.query else ""
        return cls(HttpAddress.parse(f"{parts.scheme}://{parts.netloc}{base}"), step, query)


class RemoteState(BlockState):
    """A snapshot on a checkpoint server."""

    def __init__(self, url: str, token: str, tls: Tls | None = None, timeout_s: float | None = None) -> None:
        """``timeout_s``: how long all reads together may take."""
        self.name = url
        where = SnapshotAddress.parse(url)
        self._tls = tls or Tls()
        self._connection = HttpConnection(
            where.server, HttpAccess(TokenFile.of(token), _TIMEOUT_S, self._tls.client_context())
        )
        self._deadline = threading.Timer(timeout_s or 0.0, self._connection.retire)
        self._deadline.daemon = True
        if timeout_s is not None:
            self._deadline.start()
        try:
            manifest = check_manifest(self._ask(f"{_SNAPSHOTS}{where.step}/manifest{where.query}"))
            self._path = f"{_SNAPSHOTS}{manifest['step']}/data?generation={manifest['generation']}"
            super().__init__(url, manifest)
        except BaseException:
            self.close()
            raise

    def blocks(self, first: int, count: int) -> Iterator[memoryview]:
        """Return some blocks, in one request: between two requests the server could reuse the slot."""
        is_complete = False
        try:
            wanted = self._place(first)[0], self._place(first + count - 1)[1]
            with self._connection.at_least_rate(0):
                response = self._connection.get(self._path, wanted)
                if response.status != 206:
                    raise refusal(response)
            for index in range(first, first + count):
                begin, end = self._place(index)
                data = memoryview(bytearray(end - begin))
                with self._connection.at_least_rate(len(data)):
                    read_exactly(response, data)
                if block_digest(data) != self.manifest["blocks"][index]:
                    raise IntegrityError(
                        f"block {index} of {self.name} does not match its digest: fetch it again"
                    )
                yield data
            is_complete = True
        except TRANSIENT as error:
            raise Unreachable(f"{self.name} was lost: {error}") from error
        finally:
            if not is_complete:
                self._connection.close()

    def _ask(self, path: str) -> Any:
        try:
            with self._connection.at_least_rate(0):
                response = self._connection.get(path)
                refused = refusal(response) if response.status != 200 else None
            if refused is not None:
                raise self._refused(refused)
            return self._connection.read_json(response, _MAX_MANIFEST_BYTES)
        except TRANSIENT as error:
            raise Unreachable(
                f"{self.name} does not answer: {describe(error, self.name, self._tls)}"
            ) from error

    def _refused(self, refused: StateError) -> StateError:
        """Return the reason for a missing manifest; /healthz shows whether another service answers there."""
        self._connection.close()
        with self._connection.at_least_rate(0):
            health = self._connection.get("/healthz")
        with suppress(StateError):
            answer = self._connection.read_json(health, _MAX_HEALTH_BYTES)
            if isinstance(answer, dict) and "ok" in answer and "is_leader" not in answer:
                return type(refused)(f"{self.name}: {refused}")
        return StateError(
            f"{self.name} is no checkpoint server: take the address under `ckpt` from `fabric status --json`"
        )

    def close(self) -> None:
        self._deadline.cancel()
        self._connection.close()
