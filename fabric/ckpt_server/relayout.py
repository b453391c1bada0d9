"""A state in another layout of ranks: each rank's own file, made of slices of the old ranks' files.

Beside every shard a file says of which whole it is, and where in it (``sharded.py``). So a rank of the new
layout reads the old ranks' headers, finds for every tensor which parts of it lie where, and fetches the
blocks that hold its own part: blocks and not bytes, because a block is what can be verified. Out of those it
writes the file that it would itself have written in that state, to be restored and served like any other.
Nothing live is touched.

How the new layout places a tensor is asked of the live objects: of a module's or another object's own state,
and for an optimizer, whose state may not exist yet, of the parameter that has the same shape.
"""

import mmap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fabric.ckpt_server.boxes import Box, Piece
from fabric.ckpt_server.digest import BlockDigests, digest_of_blocks
from fabric.ckpt_server.fetch import StateFetcher
from fabric.ckpt_server.layout import (
    ALIGNMENT_BYTES,
    ELEMENT_BYTES,
    Header,
    TensorSpan,
    build_preamble,
    canonical_json,
    file_order,
    read_preamble,
)
from fabric.ckpt_server.manifest import make_manifest
from fabric.ckpt_server.sharded import describe, is_sharded, local_shape
from fabric.ckpt_server.state import FORMAT, tensor_at
from fabric.ckpt_server.state import describe as step_and_tree
from fabric.errors import StateError
from fabric.model import SnapshotRef

Allocate = Callable[[int], memoryview]


@dataclass(frozen=True, slots=True)
class Relaid:
    """A state's file in this rank's layout: its manifest, and how many bytes were fetched for it."""

    manifest: dict[str, Any]
    fetched: int


def fetch_relaid(
    sources: Sequence[Sequence[str]],
    state: SnapshotRef,
    objects: Mapping[str, Any],
    allocate: Allocate,
    *,
    token: str = "",
    rank: int = 0,
    who: tuple[str, str] = ("", ""),
    created: float = 0.0,
) -> Relaid:
    """Fetches ``state`` from the old layout's servers into ``allocate(nbytes)``, as rank ``rank``'s own file.

    ``sources`` has the base URLs of the servers that hold the part of old rank 0, of old rank 1, and so on;
    ``state.digest`` is of the whole. ``objects`` are the live ones of the new layout, which are only looked
    at: ``restore`` loads the file into them. The memory begins at a multiple of 64. ``who`` is the job and
    replica of the manifest. Raises StateError (Gone, IntegrityError), with the memory undefined.
    """
    parts = [_OldPart(urls, number, token, state) for number, urls in enumerate(sources)]
    try:
        plan = Plan([part.header(len(parts)) for part in parts], objects, rank)
        memory = allocate(plan.nbytes)[: plan.nbytes]
        if np.frombuffer(memory, np.uint8).ctypes.data % ALIGNMENT_BYTES or memory.readonly:
            raise StateError("The memory for a state must be writable and begin at a multiple of 64.")
        memory[: len(plan.preamble)] = plan.preamble
        for part in parts:
            part.fetch(plan.blocks(part.rank, part.manifest["block_bytes"]))
            plan.write(part.rank, part.file, memory)
            part.let_go()
    finally:
        for part in parts:
            part.let_go()
    digests = BlockDigests()
    digests.update(memory)
    blocks = digests.blocks()
    ref = SnapshotRef(state.generation, state.step, digest_of_blocks(plan.nbytes, blocks))
    job, replica = who
    manifest = make_manifest(ref, plan.nbytes, blocks, job=job, replica=replica, created=created)
    return Relaid(manifest, sum(part.fetched for part in parts))


class _OldPart:
    """One old rank's file, of which only what is needed is there: the rest of its memory is never touched."""

    def __init__(self, urls: Sequence[str], rank: int, token: str, state: SnapshotRef) -> None:
        self.rank = rank
        self.file = memoryview(b"")
        self.manifest: dict[str, Any] = {}
        self.fetched = 0
        self._urls = urls
        self._state = state
        self._fetcher = StateFetcher(token, rank=rank)
        self._there: set[int] = set()

    def header(self, ranks: int) -> Header:
        """What lies where in it. Raises StateError unless it is one of ``ranks`` parts."""
        self.fetch({0})
        known = len(self.manifest.get("ranks", ("",)))
        if known != ranks:
            raise StateError(
                f"The state of step {self._state.step} has {known} parts and sources were given for {ranks}:"
                " name the servers of every old rank."
            )
        end = 8 + int.from_bytes(self.file[:8], "little")
        self.fetch(range(min(end // self.manifest["block_bytes"] + 1, len(self.manifest["blocks"]))))
        return read_preamble(self.file, len(self.file))

    def fetch(self, blocks: Collection[int]) -> None:
        """Have these blocks in ``file``, verified."""
        missing = set(blocks) - self._there
        if missing:
            found = self._fetcher.fetch_state(self._urls, self._state, self._memory, missing)
            self.manifest = found.manifest
            self.fetched += sum(found.sources.values())
            self._there |= missing

    def let_go(self) -> None:
        """Its memory and its connections are needed no more."""
        self._fetcher.close()
        self.file = memoryview(b"")

    def _memory(self, nbytes: int) -> memoryview:
        if len(self.file) != nbytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            self.file = memoryview(mmap.mmap(-1, nbytes, flags))
        return self.file


class Plan:
    """How rank ``rank`` of the new layout makes its file (``preamble``, and ``nbytes`` in all) of the old
    ranks' files with these ``headers``: which ``pieces`` go there.

    Raises StateError with the path of what cannot be laid out anew.
    """

    def __init__(self, headers: Sequence[Header], objects: Mapping[str, Any], rank: int) -> None:
        self.pieces: list[Piece] = []
        self._rank = rank
        self._spans = [{span.name: span for span in header.tensors} for header in headers]
        self._own: dict[str, tuple[str, Box]] = {}  # by tensor: dtype, and this rank's part
        described = [step_and_tree(header.metadata) for header in headers]
        live = {name: _placements(value) for name, value in objects.items()}
        tree = self._walk([one for _, one in described], live, "")
        entries = [
            (name, dtype, box.sizes, ELEMENT_BYTES[dtype] * box.elements)
            for name, (dtype, box) in self._own.items()
        ]
        entries.sort(key=lambda entry: file_order(entry[0], entry[1]))
        metadata = canonical_json({"format": FORMAT, "step": described[0][0], "state": tree})
        self.preamble = build_preamble(entries, metadata)
        self.nbytes = len(self.preamble) + sum(entry[3] for entry in entries)
        header = read_preamble(memoryview(self.preamble), self.nbytes)
        self._targets = {span.name: span for span in header.tensors}

    def blocks(self, rank: int, block_bytes: int) -> set[int]:
        """Which blocks of old rank ``rank``'s file are needed."""
        return set().union(*(piece.blocks(block_bytes) for piece in self.pieces if piece.rank == rank))

    def write(self, rank: int, file: memoryview, into: memoryview) -> None:
        """Copies what comes from old rank ``rank``, whose needed blocks are in ``file``, to its place."""
        for piece in self.pieces:
            if piece.rank == rank:
                target = tensor_at(into, self._targets[piece.name])[
                    piece.box.within(self._own[piece.name][1])
                ]
                target.copy_(tensor_at(file, piece.span)[piece.box.within(piece.held)])

    def _walk(self, nodes: list[Any], live: Any, path: str) -> Any:
        """The new layout's node for the old ranks' nodes in one place of the tree."""
        first = nodes[0]
        if isinstance(first, dict) and ("$shard" in first or "$tensor" in first):
            return self._tensor(nodes, live, path)
        if isinstance(first, dict):
            if not all(isinstance(node, dict) and set(node) == set(first) for node in nodes):
                raise _unlike(path)
            return {key: self._value(key, [node[key] for node in nodes], live, path) for key in first}
        if isinstance(first, list):
            if not all(isinstance(node, list) and len(node) == len(first) for node in nodes):
                raise _unlike(path)
            rows = zip(*nodes, strict=True)
            return [self._walk(list(row), _at(live, i), f"{path}[{i}]") for i, row in enumerate(rows)]
        if any(node != first for node in nodes):
            raise _unlike(path)
        return first

    def _value(self, key: str, nodes: list[Any], live: Any, path: str) -> Any:
        if key == "$module":
            tensors = self._walk([node[0] for node in nodes], live, path)
            return [tensors, self._walk([node[1] for node in nodes], None, path)]
        if key in ("$map", "$ordered"):
            keys = [pair[0] for pair in nodes[0]]
            if any([pair[0] for pair in node] != keys for node in nodes):
                raise _unlike(path)
            return [
                [name, self._walk([node[i][1] for node in nodes], _at(live, name), f"{path}[{name!r}]")]
                for i, name in enumerate(keys)
            ]
        if key in ("$array", "$numpy"):  # its bytes lie there as a tensor, the same at every rank
            self._place(nodes[0][0], [(node[0], None) for node in nodes], None, path)
            return nodes[0]
        inner = live if key.startswith("$") else _at(live, key)
        return self._walk(nodes, inner, path if key.startswith("$") else f"{path}.{key}".lstrip("."))

    def _tensor(self, nodes: list[Any], live: Any, path: str) -> Any:
        held = []
        for node in nodes:
            inner, told = node.get("$shard", (node, None)) if isinstance(node, dict) else (None, None)
            name = inner.get("$tensor") if isinstance(inner, dict) else None
            if isinstance(name, list) and told is None and not is_sharded(live):
                self._place(name[0], [(one["$tensor"][0], None) for one in nodes], None, path)
                return nodes[0]
            if not isinstance(name, str) or (told is None) != ("$shard" not in nodes[0]):
                raise _unlike(path)
            held.append((name, told))
        description = self._place(held[0][0], held, live, path)
        own = {"$tensor": held[0][0]}
        return own if description is None else {"$shard": [own, description]}

    def _place(
        self, name: str, held: list[tuple[str, dict[str, Any] | None]], live: Any, path: str
    ) -> dict[str, Any] | None:
        """Takes my part of one tensor into the plan; how it is described there, None: as a whole."""
        spans = [self._span(rank, one, path) for rank, (one, _) in enumerate(held)]
        told = held[0][1]
        shape = tuple(told["shape"]) if told is not None else spans[0].shape
        here = live.parameter if isinstance(live, _Like) and live.shape == shape else live
        if told is not None and not isinstance(here, torch.Tensor):
            raise StateError(f"{path} is sharded in the snapshot, and nothing here says how it is placed.")
        description, box = None, Box.whole(shape)
        sharded = isinstance(here, torch.Tensor) and is_sharded(here)
        if (sharded or told is not None) and tuple(here.shape) != shape:
            raise StateError(f"{path} has shape {shape} in the snapshot and {tuple(here.shape)} here.")
        if sharded:
            description = describe(here)
            box = Box(tuple(description["offset"]), local_shape(here))
        if name not in self._own:  # tied parameters have one tensor
            self._own[name] = spans[0].dtype, box
            self._take(name, box, spans, [told for _, told in held], path)
        elif self._own[name] != (spans[0].dtype, box):
            raise _unlike(path)
        return description

    def _take(
        self,
        name: str,
        box: Box,
        spans: list[TensorSpan],
        told: list[dict[str, Any] | None],
        path: str,
    ) -> None:
        """Of every part that several ranks hold, one of them gives."""
        givers: dict[Box, list[int]] = {}
        for rank, (span, one) in enumerate(zip(spans, told, strict=True)):
            whole = Box.whole(span.shape)
            givers.setdefault(whole if one is None else Box(tuple(one["offset"]), span.shape), []).append(
                rank
            )
        covered = 0
        for part, ranks in givers.items():
            common = part.common(box)
            if common.elements:
                covered += common.elements
                rank = ranks[self._rank % len(ranks)]
                self.pieces.append(Piece(name, rank, spans[rank], part, common))
        if covered != box.elements:
            raise StateError(
                f"{path}: the old ranks' parts cover {covered} of the {box.elements} elements that are needed"
                " here; such a layout cannot be cut anew."
            )

    def _span(self, rank: int, name: str, path: str) -> TensorSpan:
        span = self._spans[rank].get(name)
        if span is None:
            raise StateError(f"{path} refers to a tensor that rank {rank}'s part has not; it is damaged.")
        return span


@dataclass(frozen=True, slots=True)
class _Like:
    """State of an optimizer that is placed as its parameter is, where it has its shape."""

    parameter: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)


def _placements(live: Any) -> Any:
    """What stands where in the state of a live object, as far as it is known."""
    if isinstance(live, torch.optim.Optimizer):
        parameters = [parameter for group in live.param_groups for parameter in group["params"]]
        return {"state": {index: _Like(parameter) for index, parameter in enumerate(parameters)}}
    return live.state_dict()


def _at(live: Any, key: Any) -> Any:
    if isinstance(live, _Like):
        return live
    if isinstance(live, Mapping):
        return live.get(key)
    if isinstance(live, (list, tuple)) and isinstance(key, int) and key < len(live):
        return live[key]
    return None


def _unlike(path: str) -> StateError:
    return StateError(
        f"{path or 'The state'} is not the same at all old ranks, beside what is sharded: such a layout"
        " (pipeline stages, for one) cannot be cut anew."
    )
