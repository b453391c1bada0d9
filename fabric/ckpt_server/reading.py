"""Reads a state piece by piece: a file, a durable checkpoint, or a snapshot on a checkpoint server."""

import math
import mmap
import threading
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import xxhash

from fabric.ckpt_server.durable.reader import (
    MANIFEST,
    MAX_JSON_BYTES,
    METADATA,
    DurableCheckpoint,
    Segment,
    list_checkpoints,
    open_checkpoint,
    parse_rank_shard,
    rank_shard_name,
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
from fabric.ckpt_server.format.manifest import (
    block_digest,
    bytes_digest,
    check_manifest,
    file_digest,
    state_digest,
)
from fabric.ckpt_server.format.safetensors_file import (
    ELEMENT_BYTES,
    MAX_HEADER_BYTES,
    TensorEntry,
    TensorSpan,
    build_preamble,
    canonical_json,
    file_order,
    parse_json,
    read_preamble,
)
from fabric.ckpt_server.format.tensor_slices import Shard, find_shards, without_shards
from fabric.errors import ConfigError, IntegrityError, StateError, Unreachable
from fabric.model import Value
from fabric.protocol.rules.lanes import TensorRegion
from fabric.runtime.http.lighthouse_client import describe
from fabric.runtime.http.tls import Tls
from fabric.runtime.http.token_file import TokenFile

_TIMEOUT_S = 30.0
_MAX_MANIFEST_BYTES = 256 << 20
_MAX_HEALTH_BYTES = 4 << 10
_SNAPSHOTS = "/v1/snapshots/"
_PIECE_BYTES = 4 << 20


@contextmanager
def open_state(
    name: str, token: str, tls: Tls | None = None, timeout_s: float | None = None
) -> "Iterator[ReadableState]":
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


# A state that can be read has a ``name`` (the user's name of it), ``step`` and ``nbytes``. Its ``tensors``
# are in file order. It is the part of rank ``rank`` of ``ranks`` (0 of 1: the whole state). ``digest`` is of
# the whole state, 32 hex digits. ``read`` returns bytes of the file, ``pieces`` yields all bytes in order.


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
            header = read_preamble(self._view)
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
    """One rank's part of a durable checkpoint: the file that was snapshotted.

    Raises StateError that names the damaged or missing file.
    """

    def __init__(self, name: str, checkpoint: DurableCheckpoint, rank: int) -> None:
        storage, listed = checkpoint.storage, checkpoint.manifest["files"]
        self._storage, self._listed = storage, listed
        if not 0 <= rank < checkpoint.ranks:
            raise StateError(f"{storage.url} is of {checkpoint.ranks} ranks and has no rank {rank}")
        shard = rank_shard_name(rank)
        data = storage.get(shard, MAX_JSON_BYTES)
        if bytes_digest(memoryview(data)) != listed[shard]["digest"]:
            raise IntegrityError(f"{storage.where(shard)} does not match its digest; it is damaged")
        described = parse_rank_shard(data, storage.where(shard), checkpoint.manifest, rank)
        self._segments = described.segments
        for file in {s.file for s in self._segments}:
            size = storage.size(file)
            if size != listed[file]["nbytes"]:
                raise IntegrityError(
                    f"{storage.where(file)} has {size} bytes and should have {listed[file]['nbytes']}; it is"
                    " damaged"
                )
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        try:
            super().__init__(name, dict(described.snapshot))
        except BaseException:
            self.close()
            raise

    @property
    def digest(self) -> str:
        """The digest of the whole state; reads and verifies all of it, every file that it lies in, and the
        index of torch, which also needs bytes that fabric does not read."""
        for _ in self.pieces():
            pass
        own = {segment.file for segment in self._segments} | {METADATA} & set(self._listed)
        wrong = [
            self._storage.where(name)
            for name in sorted(own)
            if self._storage.size(name) != self._listed[name]["nbytes"] or not self._is_whole(name)
        ]
        if wrong:
            verb = "does" if len(wrong) == 1 else "do"
            raise IntegrityError(
                f"{' and '.join(wrong)} {verb} not match the digest in {MANIFEST}; torch cannot load the"
                " checkpoint"
            )
        return super().digest

    def blocks(self, first: int, count: int) -> Iterator[memoryview]:
        for index in range(first, first + count):
            begin, end = self._place(index)
            data = memoryview(bytearray(end - begin))
            self.fill(data, begin)
            yield data

    def fill(self, target: memoryview, begin: int) -> None:
        """Fill ``target`` from byte ``begin`` (where a block begins) on, up to the end of a block,
        verified."""
        for segment, offset, low, high in self._parts(begin, begin + len(target)):
            file = self._file(segment.file)
            self._storage.read_into(
                file, segment.file, segment.begin + low - offset, target[low - begin : high - begin]
            )
        size: int = self.manifest["block_bytes"]
        for low in range(0, len(target), size):
            index = (begin + low) // size
            if block_digest(target[low : low + size]) != self.manifest["blocks"][index]:
                touched = {segment.file for segment, *_ in self._parts(*self._place(index))}
                guilty = [file for file in sorted(touched) if not self._is_whole(file)] or sorted(touched)
                names = " and ".join(self._storage.where(file) for file in guilty)
                raise IntegrityError(
                    f"{names} is damaged: block {index} of the state does not match its digest"
                )

    def close(self) -> None:
        self._stack.close()

    def _is_whole(self, name: str) -> bool:
        """Whether all of a file matches the manifest; reads the file, to name the damaged one."""
        hasher, piece = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
        nbytes: int = self._listed[name]["nbytes"]
        for begin in range(0, nbytes, _PIECE_BYTES):
            part = piece[: min(_PIECE_BYTES, nbytes - begin)]
            self._storage.read_into(self._file(name), name, begin, part)
            hasher.update(part)
        return bool(hasher.hexdigest() == self._listed[name]["digest"])

    def _parts(self, begin: int, end: int) -> Iterator[tuple[Segment, int, int, int]]:
        """Yield each touched segment, its begin in the file, and the first and last byte wanted there."""
        offset = 0
        for segment in self._segments:
            low, high = max(begin, offset), min(end, offset + segment.nbytes)
            if low < high:
                yield segment, offset, low, high
            offset += segment.nbytes

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(self._storage.open(name))
        return self._open[name]


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


class SnapshotAddress(Value):
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


# A state of several ranks as the file that a single process would have written.
#
# Sharded tensors are merged from the ranks' parts, piece by piece as they are read. An entry that several
# ranks hold must be equal in all of them: each read compares all copies. Ranks that hold different tensors
# under one name (the stages of a pipeline) do not make one file, and are refused.


class _RankPart(Value):
    """``span`` of the file of ``state`` holds ``box`` of a tensor. ``again``: an earlier rank has it, too."""

    state: BlockState
    span: TensorSpan
    box: TensorRegion
    again: bool

    def rows(self, begin: int, count: int) -> "np.ndarray[Any, Any]":
        """Return ``count`` of the part's rows from the part's row ``begin`` on, as bytes by element."""
        sizes = (count, *self.box.sizes[1:], ELEMENT_BYTES[self.span.dtype])
        row = math.prod(sizes[1:])
        data = self.state.read(self.span.begin + begin * row, self.span.begin + (begin + count) * row)
        return np.frombuffer(data, np.uint8).reshape(sizes)


class MergedState:
    """The file of ``parts``, one of each rank of a state. Raises StateError where they do not make one file.

    ``preamble``: the file's beginning. ``manifest`` has the digest by which the job knows the state.
    """

    def __init__(self, name: str, parts: Sequence[BlockState]) -> None:
        self.name = name
        self._states = sorted(parts, key=lambda part: part.rank)
        ranks, first = [part.rank for part in self._states], self._states[0].manifest
        if ranks != list(range(self._states[0].ranks)):
            raise StateError(
                f"{self.name} names ranks {', '.join(map(str, ranks))} of {self._states[0].ranks}: name one"
                " address of each rank, or a single rank's"
            )
        for part in self._states:
            if any(part.manifest[key] != first[key] for key in ("generation", "step", "ranks")):
                raise StateError(
                    f"{self.name}: rank {part.rank} has another state (step {part.step}) than rank 0 (step"
                    f" {first['step']}): name one step of all, http://host:port/v1/snapshots/STEP"
                )
        self.step, self.rank, self.ranks = parts[0].step, 0, 1
        description = self._description()
        layout = [(tensor, *self._find(tensor)) for tensor in self._states[0].tensors]
        layout.sort(key=lambda entry: file_order(entry[0], entry[1]))
        sizes = [
            TensorEntry(name, dtype, shape, ELEMENT_BYTES[dtype] * math.prod(shape))
            for name, dtype, shape, _ in layout
        ]
        self.preamble = build_preamble(sizes, canonical_json(description))
        self.nbytes = len(self.preamble) + sum(entry.nbytes for entry in sizes)
        spans = read_preamble(memoryview(self.preamble), self.nbytes).tensors
        self.tensors = {span.name: span for span in spans}
        self.manifest = {"digest": state_digest(first)}
        self._spans, self._begins = spans, [span.begin for span in spans]
        self._parts = {tensor: held for tensor, _, _, held in layout}

    @property
    def digest(self) -> str:
        """Of the state, as the job names it; all of durable parts is read and verified for that."""
        _ = [part.digest for part in self._states]
        return self.manifest["digest"]

    def read(self, begin: int, end: int) -> memoryview:
        """Return bytes of one tensor, counted in the whole file. Raises StateError or Unreachable."""
        span = self._spans[bisect(self._begins, begin) - 1]
        shape, item = span.shape or (1,), ELEMENT_BYTES[span.dtype]
        row = item * math.prod(shape[1:])
        low, high = begin - span.begin, end - span.begin
        first, last = low // row, -(-high // row)
        rows = TensorRegion((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
        rows_read = np.zeros((*rows.sizes, item), np.uint8)
        for part in self._parts[span.name]:
            common = part.box.common(rows)
            if common.elements:
                data = part.rows(common.begin[0] - part.box.begin[0], common.sizes[0])
                target = rows_read[common.within(rows)]
                if part.again and (target != data).any():
                    raise self._unlike(f"{span.name} is not the same at rank {part.state.rank} as at another")
                target[...] = data
        return memoryview(rows_read.tobytes())[low - first * row : high - first * row]

    def pieces(self) -> Iterator[memoryview]:
        """Yield all bytes of the file in order, verified. Raises StateError or Unreachable."""
        yield memoryview(self.preamble)
        for span in self._spans:
            for begin in range(span.begin, span.end, _PIECE_BYTES):
                yield self.read(begin, min(begin + _PIECE_BYTES, span.end))

    def _description(self) -> Any:
        """Return the description of the state, which is equal at all ranks except for the shards."""
        try:
            descriptions = [without_shards(parse_json(part.header.metadata), {}) for part in self._states]
        except (RecursionError, LookupError, TypeError, ValueError) as error:
            raise StateError(f"{self.name}: its description of the state is damaged") from error
        for rank, description in enumerate(descriptions):
            if description != descriptions[0]:
                raise self._unlike(f"rank {rank} describes another state than rank 0")
        return descriptions[0]

    def _find(self, tensor: str) -> tuple[str, tuple[int, ...], list[_RankPart]]:
        """Return the dtype and shape of the full tensor, and each rank's part of it."""
        held: list[_RankPart] = []
        wholes = set()
        for state in self._states:
            span = state.tensors.get(tensor)
            if span is None:
                raise self._unlike(f"rank {state.rank} has no tensor {tensor}")
            shard = state.shards.get(tensor) or Shard(span.shape, (0,) * len(span.shape))
            # Elements of a type that the format cannot name are stored as bytes, in one more dimension.
            more = span.shape[len(shard.shape) :]
            wholes.add((span.dtype, (*shard.shape, *more)))
            box = TensorRegion((*shard.offset, *(0 for _ in more)) or (0,), span.shape or (1,))
            held.append(_RankPart(state, span, box, any(box == part.box for part in held)))
        (dtype, shape), *others = wholes
        covered = sum(part.box.elements for part in held if not part.again)
        if others or covered != math.prod(shape):
            raise self._unlike(f"the ranks' parts of {tensor} do not make one tensor")
        return dtype, shape, held

    def _unlike(self, what: str) -> StateError:
        return StateError(
            f"{self.name}: {what}, as with pipeline stages: name a single rank (FOLDER#1, one URL)"
        )


ReadableState = FileState | BlockState | MergedState
