"""A state of several ranks as the file that a single process would have written.

Sharded tensors are merged from the ranks' parts, piece by piece as they are read. An entry that several ranks
hold must be equal in all of them: each read compares all copies. Ranks that hold different tensors under one
name (the stages of a pipeline) do not make one file, and are refused.
"""

import math
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric.ckpt_server.format.manifest import state_digest
from fabric.ckpt_server.format.safetensors_file import (
    ELEMENT_BYTES,
    TensorEntry,
    TensorSpan,
    build_preamble,
    canonical_json,
    file_order,
    parse_json,
    read_preamble,
)
from fabric.ckpt_server.format.tensor_slices import Shard
from fabric.errors import StateError
from fabric.protocol.messages.rank_messages import replica_digest
from fabric.protocol.rules.tensor_region import TensorRegion

if TYPE_CHECKING:
    from fabric.ckpt_server.reading.state_source import BlockState

_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _RankPart:
    """``span`` of the file of ``state`` holds ``box`` of a tensor. ``again``: an earlier rank has it, too."""

    state: "BlockState"
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

    def __init__(self, name: str, parts: "Sequence[BlockState]") -> None:
        self.name = name
        self._states = sorted(parts, key=lambda part: part.rank)
        self._check_one_state()
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
        self.manifest = {"digest": self._named([part.manifest["digest"] for part in self._states])}
        self._spans, self._begins = spans, [span.begin for span in spans]
        self._parts = {tensor: held for tensor, _, _, held in layout}

    @property
    def digest(self) -> str:
        """Of the state, as the job names it; all of durable parts is read and verified for that."""
        return self._named([part.digest for part in self._states])

    def _named(self, digests: list[str]) -> str:
        """The digest of the state whose parts have these ``digests``."""
        manifests = [part.manifest for part in self._states]
        if any("content" not in x or x["digest"] != d for x, d in zip(manifests, digests, strict=True)):
            return replica_digest(digests)
        return state_digest(manifests[0])

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

    def _check_one_state(self) -> None:
        ranks, first = [part.rank for part in self._states], self._states[0].manifest
        if ranks != list(range(self._states[0].ranks)):
            raise StateError(
                f"{self.name} names ranks {', '.join(map(str, ranks))} of {self._states[0].ranks}: name one"
                " address of each rank, or a single rank's"
            )
        for part in self._states:
            identity = [part.manifest[key] for key in ("generation", "step", "ranks")]
            if identity != [first[key] for key in ("generation", "step", "ranks")]:
                raise StateError(
                    f"{self.name}: rank {part.rank} has another state (step {part.step}) than rank 0 (step"
                    f" {first['step']}): name one step of all, http://host:port/v1/snapshots/STEP"
                )

    def _description(self) -> Any:
        """Return the description of the state, which is equal at all ranks except for the shards."""
        try:
            descriptions = [_without_shards(parse_json(part.header.metadata)) for part in self._states]
        except (RecursionError, LookupError, TypeError) as error:
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


def _without_shards(node: Any) -> Any:
    if isinstance(node, dict):
        if "$shard" in node:
            return node["$shard"][0]
        return {key: _without_shards(inner) for key, inner in node.items()}
    return [_without_shards(inner) for inner in node] if isinstance(node, list) else node
