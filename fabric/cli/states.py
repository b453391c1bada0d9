"""A state to look at: a file, a durable checkpoint, or a snapshot on a checkpoint server, read piece by
piece."""

import mmap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from fabric.ckpt_server.digest import block_digest, file_digest
from fabric.ckpt_server.durable.reader import Checkpoint, LaneFile, list_checkpoints, open_checkpoint
from fabric.ckpt_server.durable.storage import Storage
from fabric.ckpt_server.layout import MAX_HEADER_BYTES, TensorSpan, parse_json, read_header, read_preamble
from fabric.ckpt_server.manifest import check_manifest
from fabric.ckpt_server.source import TRANSIENT, Access, Address, Connection, read_exactly, read_json, refusal
from fabric.cli.tls import current_tls
from fabric.errors import ConfigError, IntegrityError, StateError, Unreachable
from fabric.runtime.dial_errors import why

_TIMEOUT_S = 30.0
_MAX_MANIFEST_BYTES = 256 << 20
_MAX_HEALTH_BYTES = 4 << 10
_SNAPSHOTS = "/v1/snapshots/"


class State(Protocol):
    """``name`` is what the user called it; ``tensors`` are in file order."""

    name: str
    step: int
    nbytes: int
    tensors: dict[str, TensorSpan]

    @property
    def digest(self) -> str:
        """32 hex digits of the whole state."""

    def read(self, begin: int, end: int) -> memoryview:
        """Bytes of the file. Raises StateError or Unreachable."""

    def close(self) -> None:
        """Let go of it."""


@contextmanager
def open_state(name: str, token: str) -> Iterator[State]:
    """The state that ``name`` (a path or a URL) stands for. Raises FabricError."""
    state: State = FileState(name) if _is_file(name) else open_manifested(name, token)
    try:
        yield state
    finally:
        state.close()


def open_manifested(name: str, token: str) -> "RemoteState | DurableState":
    """A state that comes with a manifest: a checkpoint server's, or a durable one. Raises FabricError."""
    if name.startswith(("http://", "https://")):
        return RemoteState(name, token)
    return DurableState(name)


def _is_file(name: str) -> bool:
    return "://" not in name and not Path(name.partition("#")[0]).is_dir()


class FileState:
    """A snapshot in a file; it is verified when its digest is asked for."""

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
        self.step = _step(header.metadata)

    @property
    def digest(self) -> str:
        return file_digest(self._view)

    def read(self, begin: int, end: int) -> memoryview:
        return self._view[begin:end]

    def close(self) -> None:
        self._view.release()
        self._map.close()


class DurableState:
    """One rank's part of a durable checkpoint. ``name`` is its folder, or that of a job, whose newest
    complete one is meant; ``#RANK`` at the end names a rank other than 0. What is read is verified, or
    refused."""

    def __init__(self, name: str) -> None:
        self.name = name
        url, _, rank = name.partition("#")
        if rank and not (rank.isascii() and rank.isdecimal() and len(rank) < 10):
            raise ConfigError(f"{name[:200]} names no rank: write FOLDER#1 for that of rank 1")
        found = _durable(url)
        self._stack = ExitStack()
        try:
            self._lane = LaneFile(found, int(rank or 0), self._stack)
            self.manifest = self._lane.manifest
            self.step, self.nbytes = self._lane.manifest["step"], self._lane.nbytes
            self.tensors = {span.name: span for span in _spans(self)}
        except BaseException:
            self.close()
            raise

    @property
    def digest(self) -> str:
        """Of all of it, which is read and verified for that."""
        whole = bytearray(self.nbytes)
        self._lane.fill(memoryview(whole))
        return file_digest(memoryview(whole))

    def read(self, begin: int, end: int) -> memoryview:
        return self._lane.read(begin, end)

    def close(self) -> None:
        self._stack.close()


def _durable(url: str) -> Checkpoint:
    """The checkpoint in this folder, or the newest complete one in the folder of a job."""
    storage = Storage(url)
    job = storage.url.rpartition("/")[2]
    listing = list_checkpoints(storage, job)
    if listing.complete:
        return listing.complete[-1]
    for warning in listing.warnings:
        raise StateError(warning)
    return open_checkpoint(storage)


def _step(metadata: str) -> int:
    """The step in the file's own metadata, -1 where it names none."""
    described = parse_json(metadata)
    step = described.get("step") if isinstance(described, dict) else None
    return step if isinstance(step, int) else -1


def _spans(state: "RemoteState | DurableState") -> tuple[TensorSpan, ...]:
    """The tensors that the state's own header describes."""
    length = int.from_bytes(state.read(0, 8), "little")
    if length > min(MAX_HEADER_BYTES, state.nbytes - 8):
        raise StateError(f"{state.name}: this is no safetensors file, or it is damaged")
    return read_preamble(state.read(0, 8 + length), state.nbytes).tensors


@dataclass(frozen=True, slots=True)
class Where:
    """A checkpoint server and one of its steps (a number, or latest)."""

    server: Address
    step: str
    query: str

    @classmethod
    def parse(cls, url: str) -> "Where":
        """From ``http://host:port``, with ``/v1/snapshots/STEP`` after it or without. Raises ConfigError."""
        parts = urlsplit(url)
        base, found, rest = parts.path.partition(_SNAPSHOTS)
        step = rest.split("/")[0] if found else "latest"
        if not (step == "latest" or (step.isascii() and step.isdecimal())):
            raise ConfigError(f"{url[:200]} names no step: write http://host:port/v1/snapshots/STEP")
        query = f"?{parts.query}" if parts.query else ""
        return cls(Address.parse(f"{parts.scheme}://{parts.netloc}{base}"), step, query)


class RemoteState:
    """A snapshot on a checkpoint server: what is read is what its manifest promised, or refused."""

    def __init__(self, url: str, token: str) -> None:
        self.name = url
        where = Where.parse(url)
        self._tls = current_tls()
        self._connection = Connection(where.server, Access(token, _TIMEOUT_S, self._tls.client_context()))
        try:
            manifest = check_manifest(self._ask(f"{_SNAPSHOTS}{where.step}/manifest{where.query}"))
            self.manifest: dict[str, Any] = manifest
            self.step, self.nbytes = manifest["step"], manifest["nbytes"]
            self._path = f"{_SNAPSHOTS}{self.step}/data?generation={manifest['generation']}"
            self.tensors = {span.name: span for span in _spans(self)}
        except BaseException:
            self.close()
            raise

    @property
    def digest(self) -> str:
        return str(self.manifest["digest"])

    def read(self, begin: int, end: int) -> memoryview:
        """Whole blocks are fetched and verified; what was asked for is cut out of them."""
        size = self.manifest["block_bytes"]
        first, last = begin // size, -(-end // size)
        low, high = first * size, min(last * size, self.nbytes)
        data = memoryview(bytearray(max(high - low, 0)))
        if begin < end:
            self.fetch(low, data)
            for index in range(first, last):
                block = data[index * size - low : min((index + 1) * size, self.nbytes) - low]
                if block_digest(block) != self.manifest["blocks"][index]:
                    raise IntegrityError(
                        f"block {index} of {self.name} does not match its digest: fetch it again"
                    )
        return data[begin - low : end - low]

    def fetch(self, begin: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``begin`` on, unverified. Raises StateError or Unreachable."""
        try:
            response = self._connection.get(self._path, (begin, begin + len(into)))
            if response.status != 206:
                raise refusal(response)
            read_exactly(response, into)
        except TRANSIENT as error:
            self._connection.close()
            raise Unreachable(f"{self.name} was lost: {error}") from error

    def _ask(self, path: str) -> Any:
        try:
            response = self._connection.get(path)
            if response.status != 200:
                raise self._refused(response)
            return read_json(response, _MAX_MANIFEST_BYTES)
        except TRANSIENT as error:
            raise Unreachable(f"{self.name} does not answer: {why(error, self.name, self._tls)}") from error

    def _refused(self, response: HTTPResponse) -> StateError:
        """Why there is no manifest: also because somebody else answers there, as /healthz tells."""
        refused = refusal(response)
        self._connection.close()
        health = self._connection.get("/healthz")
        with suppress(StateError):
            told = read_json(health, _MAX_HEALTH_BYTES)
            if isinstance(told, dict) and "ok" in told and "is_leader" not in told:
                return refused
        return StateError(
            f"{self.name} is no checkpoint server: take the address under `ckpt` from `fabric status --json`"
        )

    def close(self) -> None:
        self._connection.close()
