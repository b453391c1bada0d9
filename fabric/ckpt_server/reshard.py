"""A state in another layout of ranks: each rank's own file, made of slices of the old ranks' files.

A file describes each shard: its full tensor and its offset there (``state/dtensor.py``). A rank of the new
layout reads the old ranks' headers, finds the parts of every tensor, and fetches the blocks that hold its own
part. It fetches whole blocks, because a block has a digest. From the blocks it builds the file that this rank
would have written in that state; the file can be restored and served as usual. This module changes no live
object.

The new layout's placement of a tensor comes from the live objects, read once: from the state of a module or
another object. An optimizer's state may not exist yet, so it is placed as its parameter of the same shape.
"""

import itertools
import math
import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import torch

from fabric.ckpt_server.durable.reader import DurableCheckpoint
from fabric.ckpt_server.fetch.fetcher import StateFetcher
from fabric.ckpt_server.fetch.multi_source import runs_of
from fabric.ckpt_server.format.manifest import BlockDigests, digest_of_blocks, make_manifest
from fabric.ckpt_server.format.safetensors_file import (
    ALIGNMENT_BYTES,
    ELEMENT_BYTES,
    FileHeader,
    TensorEntry,
    TensorSpan,
    build_preamble,
    canonical_json,
    file_order,
    read_preamble,
)
from fabric.ckpt_server.reading import DurableState
from fabric.ckpt_server.state.dtensor import describe_shard, is_sharded, region_of
from fabric.ckpt_server.state.training_state import FORMAT, names_of, parameter_names, tensor_at
from fabric.ckpt_server.state.training_state import parse_description as step_and_tree
from fabric.errors import StateError
from fabric.model import SnapshotRef, Value
from fabric.protocol.rules.lanes import TensorRegion

# One rank's file of a state, read block by block as needed: from checkpoint servers or a durable
# checkpoint.
#
# It reads whole blocks, because a block has a digest.


Allocate = Callable[[int], memoryview]


class LayoutChanged(StateError):
    """The parts of a state are of different layouts: a replica has stored the state in its new layout."""


class RankFile:
    """The file of ``rank``.

    ``file``: memory of the file's size, in which only the blocks read so far are valid; they are verified.
    ``manifest``: known after the first read. ``sources``: bytes read by URL. ``compression``: whether the
    bytes came compressed, and why.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.file = memoryview(b"")
        self.manifest: dict[str, Any] = {}
        self.sources: dict[str, int] = {}
        self.compression = ""
        self._there: set[int] = set()

    @property
    def ranks(self) -> int:
        """The number of ranks of the replica that wrote the state."""
        return len(self.manifest.get("ranks", ("",)))

    def header(self) -> FileHeader:
        """Return the header, with the places of the tensors. Raises StateError."""
        self.have({0})
        end = 8 + int.from_bytes(self.file[:8], "little")
        self.have(range(min(end // self.manifest["block_bytes"] + 1, len(self.manifest["blocks"]))))
        return read_preamble(self.file, len(self.file))

    def have(self, blocks: Collection[int]) -> None:
        """Read and verify those of ``blocks`` that ``file`` does not hold yet. Raises StateError."""
        missing = set(blocks) - self._there
        if missing:
            self._read(missing)
            self._there |= missing

    def complete(self, allocate: Allocate) -> memoryview:
        """Return the full file, in ``allocate(nbytes)``. Raises StateError."""
        self.have({0})
        size, nbytes = self.manifest["block_bytes"], self.manifest["nbytes"]
        memory = allocate(nbytes)[:nbytes]
        for block in self._there:
            memory[block * size : (block + 1) * size] = self.file[block * size : (block + 1) * size]
        self.file = memory
        self.have(range(len(self.manifest["blocks"])))
        return memory

    def let_go(self) -> None:
        self.file = memoryview(b"")

    def _read(self, blocks: Collection[int]) -> None:
        raise NotImplementedError

    def _memory(self, nbytes: int) -> memoryview:
        if len(self.file) != nbytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            self.file = memoryview(mmap.mmap(-1, nbytes, flags))
        return self.file


class ServedRankFile(RankFile):
    """A rank's file from the servers at ``urls``, read by a fetcher of that rank."""

    def __init__(self, rank: int, urls: Sequence[str], state: SnapshotRef, fetcher: StateFetcher) -> None:
        super().__init__(rank)
        self._urls = urls
        self._state = state
        self._fetcher = fetcher

    def _read(self, blocks: Collection[int]) -> None:
        fetched = self._fetcher.fetch_state(self._urls, self._state, self._memory, blocks)
        if self.manifest and fetched.manifest["digest"] != self.manifest["digest"]:
            raise LayoutChanged(f"A server replaced step {self._state.step} by another layout of ranks.")
        self.manifest, self.compression = fetched.manifest, fetched.compression
        for url, nbytes in fetched.sources.items():
            self.sources[url] = self.sources.get(url, 0) + nbytes

    def let_go(self) -> None:
        self._fetcher.close()
        super().let_go()


class StoredRankFile(RankFile):
    """A rank's file from a durable checkpoint, whose files ``stack`` closes."""

    def __init__(self, rank: int, checkpoint: DurableCheckpoint, stack: ExitStack) -> None:
        super().__init__(rank)
        self._checkpoint = checkpoint
        self._stack = stack
        self._state: DurableState | None = None

    def _read(self, blocks: Collection[int]) -> None:
        url = self._checkpoint.storage.url
        if self._state is None:
            self._state = self._stack.enter_context(closing(DurableState(url, self._checkpoint, self.rank)))
            self.manifest = self._state.manifest
        size, file = self.manifest["block_bytes"], self._memory(self._state.nbytes)
        for run in runs_of(sorted(blocks)):
            target = file[run.first * size : (run.first + run.count) * size]
            self._state.fill(target, run.first * size)
            self.sources[url] = self.sources.get(url, 0) + len(target)


_MOST_RUNS = 4096  # the most runs of a piece: if a piece has more, one run covers all of them


class Misfit(StateError):
    """The state cannot be this model's: it is of another model, or of a layout that cannot be resharded."""


class TensorPlacement(Value):
    """The placement of a live tensor: the full shape, this rank's part, and its description in a file.

    The description is None for a tensor that is not sharded.
    """

    shape: tuple[int, ...]
    box: TensorRegion
    description: dict[str, Any] | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorPlacement":
        shape = tuple(tensor.shape)
        if not is_sharded(tensor):
            return cls(shape, TensorRegion.whole(shape), None)
        return cls(shape, region_of(tensor), describe_shard(tensor))


class _LikeParameter(Value):
    """State of an optimizer that is placed as its parameter is, where both have the same shape."""

    parameter: TensorPlacement


class _Entries(dict[str, Any]):
    """The placements of this rank's entries of a module, or of its parameters' state in an optimizer.

    ``everywhere``: the entries of all ranks of this replica. ``versions``: the module's parts that have a
    version. An optimizer has none, and it makes its state at the first step, so entries may be missing.
    """

    def __init__(
        self, own: Mapping[str, Any], everywhere: frozenset[str], versions: Iterable[str] | None
    ) -> None:
        super().__init__(own)
        self.everywhere = everywhere
        self.versions = tuple(versions or ())
        self.may_miss = versions is None


class _GroupNames(Value):
    """The parameters of an optimizer's group at this rank, in order, and those of all ranks."""

    own: tuple[str, ...]
    everywhere: frozenset[str]


class Layout:
    """How the live ``objects`` are placed in this rank; construct it while nothing changes the objects.

    ``entries``: of each module the entries at all ranks of this replica, where ranks may hold different
    entries (pipeline stages). This rank then takes its own entries and versions of modules from any rank.
    """

    def __init__(
        self, objects: Mapping[str, Any], entries: Mapping[str, frozenset[str]] | None = None
    ) -> None:
        names, of_model = parameter_names(objects), (entries or {}).get("model")
        self.live: dict[str, Any] = {}
        for name, value in objects.items():
            if isinstance(value, torch.optim.Optimizer):
                self.live[name] = _optimizer_placements(value, names, of_model)
                continue
            state = value.state_dict()
            self.live[name] = _placed(state)
            if entries is not None and name in entries:
                self.live[name] = _Entries(self.live[name], entries[name], getattr(state, "_metadata", ()))

    def fits(self, header: FileHeader) -> bool:
        """Whether this rank would write a file with this header. Raises Misfit."""
        return bool(ReshardPlan([header], self, 0, complete=False).tree == step_and_tree(header.metadata)[1])


def reshard(
    parts: Sequence[RankFile],
    state: SnapshotRef,
    layout: Layout,
    allocate: Allocate,
    *,
    rank: int = 0,
    job: str = "",
    replica: str = "",
) -> dict[str, Any]:
    """Build rank ``rank``'s own file of ``state`` in ``layout``, in ``allocate(nbytes)``. Return its
    manifest.

    ``parts``: the files of all old ranks, in order. The memory must begin at a multiple of 64. ``job`` and
    ``replica`` go into the manifest. Raises StateError (Misfit, Gone, IntegrityError), and leaves the memory
    undefined.
    """
    try:
        headers = [part.header() for part in parts]
        if len({tuple(part.manifest.get("ranks", ())) for part in parts}) > 1:
            raise LayoutChanged(f"The parts of step {state.step} are of different layouts of ranks.")
        for part in parts:
            if part.ranks != len(parts):
                raise LayoutChanged(
                    f"The state of step {state.step} has {part.ranks} parts and sources were given for"
                    f" {len(parts)}: name the servers of every old rank."
                )
        plan = ReshardPlan(headers, layout, rank)
        memory = allocate(plan.nbytes)[: plan.nbytes]
        if np.frombuffer(memory, np.uint8).ctypes.data % ALIGNMENT_BYTES or memory.readonly:
            raise StateError("The memory for a state must be writable and begin at a multiple of 64.")
        memory[: len(plan.preamble)] = plan.preamble
        for part in parts:
            part.have(plan.blocks(part.rank, part.manifest["block_bytes"]))
            plan.write(part.rank, part.file, memory)
            part.let_go()
    finally:
        for part in parts:
            part.let_go()
    digests = BlockDigests()
    digests.update(memory)
    blocks = digests.blocks()
    ref = SnapshotRef(state.generation, state.step, digest_of_blocks(plan.nbytes, blocks))
    created = parts[0].manifest.get("created", 0.0)
    return make_manifest(ref, plan.nbytes, blocks, job=job, replica=replica, created=created)


class RegionRead(Value):
    """A read of a tensor's ``box`` from the file of ``rank``, which has the part ``held`` at ``span``."""

    name: str
    rank: int
    span: TensorSpan
    held: TensorRegion
    box: TensorRegion

    def runs(self, gap_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the runs of bytes (begin, end) of the rank's file that hold the box. One run covers all where
        gaps are smaller than ``gap_bytes``, or runs are very many."""
        item, shape, where = ELEMENT_BYTES[self.span.dtype], self.held.sizes, self.box.within(self.held)
        # The box covers dimensions from ``split`` on, so its part of dimension ``split - 1`` is contiguous.
        split = len(shape)
        while split and self.box.sizes[split - 1] == shape[split - 1]:
            split -= 1
        strides = [math.prod(shape[i + 1 :]) * item for i in range(len(shape))]
        first = self.span.begin + sum(p.start * stride for p, stride in zip(where, strides, strict=True))
        outer = where[: split - 1] if split else ()
        rows = math.prod(part.stop - part.start for part in outer)
        if rows == 1 or rows > _MOST_RUNS or strides[split - 2] <= gap_bytes:
            reach = sum((n - 1) * stride for n, stride in zip(self.box.sizes, strides, strict=True))
            yield first, first + reach + item
            return
        length = self.box.sizes[split - 1] * strides[split - 1]
        for steps in itertools.product(*(range(part.stop - part.start) for part in outer)):
            at = first + sum(i * stride for i, stride in zip(steps, strides, strict=False))
            yield at, at + length

    def blocks(self, block_bytes: int) -> set[int]:
        """Return the numbers of the blocks of the rank's file that hold the box."""
        blocks: set[int] = set()
        for begin, end in self.runs(block_bytes):
            blocks.update(range(begin // block_bytes, -(-end // block_bytes)))
        return blocks


class ReshardPlan:
    """How rank ``rank`` of the new layout builds its file from the old ranks' files with these ``headers``.

    ``complete`` False: the caller wants only ``tree``. Then parts may be missing, and a tensor without a live
    placement keeps its old description. Raises Misfit with the path of a value that cannot be resharded.
    """

    def __init__(
        self, headers: Sequence[FileHeader], layout: Layout, rank: int, complete: bool = True
    ) -> None:
        self.pieces: list[RegionRead] = []
        self._rank = rank
        self._complete = complete
        self._spans = [{span.name: span for span in header.tensors} for header in headers]
        self._own: dict[str, tuple[str, TensorRegion]] = {}  # tensor -> its dtype, and this rank's part
        described = [step_and_tree(header.metadata) for header in headers]
        self.tree = self._walk({rank: tree for rank, (_, tree) in enumerate(described)}, layout.live, "")
        entries = [
            TensorEntry(name, dtype, box.sizes, ELEMENT_BYTES[dtype] * box.elements)
            for name, (dtype, box) in self._own.items()
        ]
        entries.sort(key=lambda entry: file_order(entry.name, entry.dtype))
        metadata = canonical_json({"format": FORMAT, "step": described[0][0], "state": self.tree})
        self.preamble = build_preamble(entries, metadata)
        self.nbytes = len(self.preamble) + sum(entry.nbytes for entry in entries)
        header = read_preamble(memoryview(self.preamble), self.nbytes)
        self._targets = {span.name: span for span in header.tensors}

    def blocks(self, rank: int, block_bytes: int) -> set[int]:
        """Return the numbers of the needed blocks in old rank ``rank``'s file."""
        return set().union(*(piece.blocks(block_bytes) for piece in self.pieces if piece.rank == rank))

    def write(self, rank: int, file: memoryview, into: memoryview) -> None:
        """Copy into ``into`` the pieces of old rank ``rank``, whose needed blocks are in ``file``."""
        for piece in self.pieces:
            if piece.rank == rank:
                target = tensor_at(into, self._targets[piece.name])[
                    piece.box.within(self._own[piece.name][1])
                ]
                target.copy_(tensor_at(file, piece.span)[piece.box.within(piece.held)])

    def _walk(self, nodes: Mapping[int, Any], live: Any, path: str) -> Any:
        """Return the new layout's node at ``path`` in the tree; ``nodes`` are the old ranks' nodes there."""
        first = next(iter(nodes.values()))
        if isinstance(first, dict) and ("$shard" in first or "$tensor" in first):
            return self._tensor(nodes, live, path)
        if isinstance(live, _Entries) and all(_is_plain(node) for node in nodes.values()):
            return self._entries(nodes, live, path)
        if isinstance(live, _GroupNames) and all(
            isinstance(node, list) and all(isinstance(name, str) for name in node) for node in nodes.values()
        ):
            return self._group(nodes, live, path)
        if isinstance(first, dict):
            if not all(isinstance(node, dict) and set(node) == set(first) for node in nodes.values()):
                raise _unlike(path)
            return {key: self._value(key, _inner(nodes, key), live, path) for key in first}
        if isinstance(first, list):
            if not all(isinstance(node, list) and len(node) == len(first) for node in nodes.values()):
                raise _unlike(path)
            return [self._walk(_inner(nodes, i), _at(live, i), f"{path}[{i}]") for i in range(len(first))]
        if any(node != first for node in nodes.values()):
            raise _unlike(path)
        return first

    def _entries(self, nodes: Mapping[int, Any], live: _Entries, path: str) -> Any:
        """Return this rank's entries, each from the old ranks that have it."""
        there = {key for node in nodes.values() for key in node}
        _check_known(there, live.everywhere, path)
        missing = sorted(live.keys() - there)
        if missing and self._complete and not live.may_miss:
            raise Misfit(
                f"{path} has the entry {missing[0]!r} here and not in the snapshot: run the same model as the"
                " job did."
            )
        tree = {
            key: self._walk({r: n[key] for r, n in nodes.items() if key in n}, live[key], f"{path}.{key}")
            for key in live
            if key in there
        }
        # An entry of None makes the tree differ from that of a file that lacks the entry.
        return tree if self._complete or live.may_miss else tree | dict.fromkeys(missing)

    def _group(self, nodes: Mapping[int, Any], live: _GroupNames, path: str) -> Any:
        """Return the names of this rank's parameters in an optimizer's group."""
        there = {name for node in nodes.values() for name in node}
        _check_known(there, live.everywhere, path)
        missing = sorted(set(live.own) - there)
        if missing and self._complete:
            raise Misfit(
                f"{path} does not have {missing[0]} in the snapshot: give the optimizer the same groups as"
                " the job did."
            )
        return list(live.own)

    def _value(self, key: str, nodes: Mapping[int, Any], live: Any, path: str) -> Any:
        if key == "$module":
            tensors = self._walk(_inner(nodes, 0), live, path)
            versions = _inner(nodes, 1)
            if isinstance(live, _Entries) and all(_is_plain(node) for node in versions.values()):
                every = {name: version for node in versions.values() for name, version in node.items()}
                return [tensors, {name: every[name] for name in live.versions if name in every}]
            return [tensors, self._walk(versions, None, path)]
        if key in ("$map", "$ordered"):
            keys = [pair[0] for pair in next(iter(nodes.values()))]
            if any([pair[0] for pair in node] != keys for node in nodes.values()):
                raise _unlike(path)
            return [
                [
                    name,
                    self._walk(
                        {r: node[i][1] for r, node in nodes.items()}, _at(live, name), f"{path}[{name!r}]"
                    ),
                ]
                for i, name in enumerate(keys)
            ]
        if key in ("$array", "$numpy"):  # an array's bytes lie in the file as a tensor, equal at every rank
            first = next(iter(nodes.values()))
            self._place(first[0], {r: (node[0], None) for r, node in nodes.items()}, None, path)
            return first
        inner = live if key.startswith("$") else _at(live, key)
        return self._walk(nodes, inner, path if key.startswith("$") else f"{path}.{key}".lstrip("."))

    def _tensor(self, nodes: Mapping[int, Any], live: Any, path: str) -> Any:
        held: dict[int, tuple[str, dict[str, Any] | None]] = {}
        first = next(iter(nodes.values()))
        for rank, node in nodes.items():
            inner, stored = node.get("$shard", (node, None)) if isinstance(node, dict) else (None, None)
            name = inner.get("$tensor") if isinstance(inner, dict) else None
            is_sharded_here = isinstance(live, TensorPlacement) and live.description is not None
            if isinstance(name, list) and stored is None and not is_sharded_here:
                self._place(name[0], {r: (n["$tensor"][0], None) for r, n in nodes.items()}, None, path)
                return first
            if not isinstance(name, str) or (stored is None) != ("$shard" not in first):
                raise _unlike(path)
            held[rank] = (name, stored)
        own_name = next(iter(held.values()))[0]
        description = self._place(own_name, held, live, path)
        own = {"$tensor": own_name}
        return own if description is None else {"$shard": [own, description]}

    def _place(
        self, name: str, held: Mapping[int, tuple[str, dict[str, Any] | None]], live: Any, path: str
    ) -> dict[str, Any] | None:
        """Add this rank's part of a tensor to the plan. Return its description, None for a full tensor."""
        spans = {}
        for rank, (old_name, _) in held.items():
            if old_name not in self._spans[rank]:
                raise StateError(f"{path} refers to a tensor that rank {rank}'s part has not; it is damaged.")
            spans[rank] = self._spans[rank][old_name]
        first, stored = next(iter(spans.values())), next(iter(held.values()))[1]
        shape = tuple(stored["shape"]) if stored is not None else first.shape
        here = live.parameter if isinstance(live, _LikeParameter) and live.parameter.shape == shape else live
        if stored is not None and not isinstance(here, TensorPlacement):
            if not self._complete:
                self._own.setdefault(name, (first.dtype, TensorRegion.whole(first.shape)))
                return stored
            raise Misfit(
                f"{path} is sharded in the snapshot, and nothing here says how it is placed: run the same"
                " model and optimizer as the job did."
            )
        description, box = None, TensorRegion.whole(shape)
        if isinstance(here, TensorPlacement) and (stored is not None or here.description is not None):
            if here.shape != shape:
                raise Misfit(
                    f"{path} has shape {shape} in the snapshot and {here.shape} here: run the same model as"
                    " the job did."
                )
            description, box = here.description, here.box
        if name not in self._own:  # tied parameters share one tensor
            self._own[name] = first.dtype, box
            self._take(name, box, spans, {rank: shard for rank, (_, shard) in held.items()}, path)
        elif self._own[name] != (first.dtype, box):
            raise _unlike(path)
        return description

    def _take(
        self,
        name: str,
        box: TensorRegion,
        spans: Mapping[int, TensorSpan],
        stored: Mapping[int, dict[str, Any] | None],
        path: str,
    ) -> None:
        """Plan the reads of ``box``. Where several old ranks hold the same part, read it from one rank."""
        givers: dict[TensorRegion, list[int]] = {}
        for rank, span in spans.items():
            shard = stored[rank]
            full = TensorRegion.whole(span.shape)
            givers.setdefault(
                full if shard is None else TensorRegion(tuple(shard["offset"]), span.shape), []
            ).append(rank)
        covered = 0
        for part, ranks in givers.items():
            common = part.common(box)
            if common.elements:
                covered += common.elements
                rank = ranks[self._rank % len(ranks)]
                self.pieces.append(RegionRead(name, rank, spans[rank], part, common))
        if covered != box.elements and self._complete:
            raise Misfit(
                f"{path}: the old ranks' parts cover {covered} of the {box.elements} elements that are needed"
                " here; such a layout cannot be resharded."
            )


def _optimizer_placements(
    live: torch.optim.Optimizer, names: Mapping[int, str], everywhere: frozenset[str] | None
) -> Any:
    """Return the placements of an optimizer's state, which is placed by its parameters."""
    parameters = [parameter for group in live.param_groups for parameter in group["params"]]
    placed = [_LikeParameter(TensorPlacement.of(p)) for p in parameters]
    by_group = names_of(live, names)
    by_name = dict(zip([name for group in by_group for name in group], placed, strict=True))
    if everywhere is None:
        return {"state": {**by_name, **dict(enumerate(placed))}}
    groups = [_GroupNames(tuple(own), everywhere | frozenset(own)) for own in by_group]
    return {
        "state": _Entries(by_name, everywhere | frozenset(by_name), None),
        "param_groups": [{"params": group, "param_names": group} for group in groups],
    }


def _inner(nodes: Mapping[int, Any], key: Any) -> dict[int, Any]:
    """Return the value under ``key`` of each old rank's node."""
    return {rank: node[key] for rank, node in nodes.items()}


def _is_plain(node: Any) -> bool:
    return isinstance(node, dict) and not any(key.startswith("$") for key in node)


def _check_known(there: Set[str], everywhere: Set[str], path: str) -> None:
    """Raises Misfit where the snapshot has what no rank of this replica has."""
    unknown = sorted(there - everywhere)
    if unknown:
        raise Misfit(
            f"{path} has {unknown[0]!r} in the snapshot and not here: run the same model and optimizer as the"
            " job did."
        )


def _placed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorPlacement.of(value)
    if isinstance(value, Mapping):
        return {key: _placed(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_placed(inner) for inner in value]
    return None


def _at(live: Any, key: Any) -> Any:
    if isinstance(live, _LikeParameter):
        return live
    if isinstance(live, Mapping):
        return live.get(key)
    if isinstance(live, (list, tuple)) and isinstance(key, int) and key < len(live):
        return live[key]
    return None


def _unlike(path: str) -> Misfit:
    return Misfit(
        f"{path or 'The state'} is not the same at all old ranks, beside what is sharded: such a layout"
        " (pipeline stages, for one) cannot be cut anew."
    )
