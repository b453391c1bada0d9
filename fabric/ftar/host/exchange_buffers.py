"""The memory of one exchange: what is reduced, where the result goes, and what a neighbour can see of both.

Pieces come in (``take``, or straight into ``landing``) and go out (``outgoing``). A link that carries bytes
sends them from wherever they are. A link that carries references sends places in shared memory, so whatever
others must see has to lie there: memory of the caller's that does already is used as it is, other memory
has a staging segment beside it, into which no more is copied than others read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fabric.ftar.host.shm_segments import OwnSegments, SegmentRef, SharedSegment
from fabric.ftar.reduce_ops import Reduction
from fabric.ftar.ring_schedule import RingPiece


class StagingMemory:
    """Staging memory by use, made when first needed and kept for the exchanges to come.

    All of it is shown memory, for what is staged is staged for a neighbour; only partial results in float32
    are needed on links of bytes too. ``private`` makes it of plain memory.
    """

    def __init__(self, segments: OwnSegments) -> None:
        self._segments = segments
        self._shared: dict[str, SharedSegment] = {}
        self._private: dict[str, torch.Tensor] = {}

    def get(self, use: str, nbytes: int, shared: bool) -> torch.Tensor:
        """``nbytes`` bytes for ``use``; what they hold is undefined. Raises ConfigError without memory."""
        if not shared:
            memory = self._private.get(use)
            if memory is None or memory.numel() < nbytes:
                memory = self._private[use] = torch.zeros(nbytes, dtype=torch.uint8)
            return memory[:nbytes]
        shown = self._shared.get(use)
        if shown is None or shown.nbytes < nbytes:
            if shown is not None:
                self._segments.unregister(shown.memory)
                del self._shared[use]
            shown = self._shared[use] = self._segments.allocate(nbytes)
        return shown.memory[:nbytes]


@dataclass(slots=True)
class Operands:
    """``source`` and ``result`` are 1-D CPU tensors of one type and length, and may be one memory.

    ``work`` holds what is sent on: the result itself, or its staging. ``widens`` says that partial results
    are float32, which ``wide`` holds where any are kept here. ``staged`` is where the member's own elements
    are copied to before others read them, None where they read the source as it is; it begins with element
    ``staged_from``. ``borrowed``, by (first element, whether it is a result): places in others' memory of a
    piece that is to go on.
    """

    source: torch.Tensor
    result: torch.Tensor
    reduction: Reduction
    work: torch.Tensor
    widens: bool = False
    wide: torch.Tensor | None = None
    staged: torch.Tensor | None = None
    staged_from: int = 0
    digests: dict[int, int] = field(default_factory=dict)
    borrowed: dict[tuple[int, bool], list[SegmentRef]] = field(default_factory=dict)

    def item_bytes(self, piece: RingPiece) -> int:
        """Bytes of one element of ``piece`` on its way."""
        return 4 if self.is_wide(piece) else self.source.element_size()

    def nbytes(self, piece: RingPiece) -> int:
        """Bytes of ``piece`` on its way."""
        return (piece.stop - piece.start) * self.item_bytes(piece)

    def outgoing(self, piece: RingPiece) -> torch.Tensor:
        """What is to be sent as ``piece``."""
        if not piece.hop:
            return self.own(piece)
        part = slice(piece.start, piece.stop)
        if self.is_wide(piece):
            assert self.wide is not None
            return self.wide[part]
        return self.work[part]

    def own(self, piece: RingPiece) -> torch.Tensor:
        """This member's own elements of ``piece``, where others can read them if they must."""
        part = slice(piece.start, piece.stop)
        if self.staged is None:
            return self.source[part]
        staged = self.staged[piece.start - self.staged_from : piece.stop - self.staged_from]
        copy(staged, self.source[part])
        return staged

    def landing(self, piece: RingPiece) -> torch.Tensor:
        """Where a received result belongs."""
        return (self.result if piece.last else self.work)[piece.start : piece.stop]

    def landed(self, piece: RingPiece) -> None:
        """A result was received into its ``landing``."""
        if not piece.last:
            self._keep(piece)

    def keep(self, piece: RingPiece, received: torch.Tensor, lent: bool) -> None:
        """Keep a result that lies in another's memory; ``lent`` says that it goes on from there."""
        if lent:
            copy(self.result[piece.start : piece.stop], received)
        else:
            copy(self.landing(piece), received)
            self.landed(piece)

    def take(self, piece: RingPiece, received: Sequence[torch.Tensor]) -> None:
        """Add to the partial result ``piece``: what the members before brought to it, in their order, one
        tensor each, or the first of them a sum of several (see ``typed``)."""
        part = slice(piece.start, piece.stop)
        out = self.work if piece.last or self.wide is None else self.wide
        self.reduction.fold(received, self.source[part], out[part], piece.last)
        if piece.last:
            self._keep(piece)

    def typed(self, piece: RingPiece, memory: torch.Tensor) -> torch.Tensor:
        """``memory`` (bytes) as the elements of ``piece`` on its way over a link of bytes."""
        return memory.view(torch.float32 if self.is_wide(piece) else self.source.dtype)

    def is_wide(self, piece: RingPiece) -> bool:
        """Whether ``piece`` is a partial result in float32 of smaller elements."""
        return self.widens and not piece.gather and piece.hop > 0

    def _keep(self, piece: RingPiece) -> None:
        if self.work is not self.result:
            part = slice(piece.start, piece.stop)
            copy(self.result[part], self.work[part])


def make_operands(
    source: torch.Tensor,
    result: torch.Tensor,
    reduction: Reduction,
    readable: range,
    world: int,
    partial: bool,
    workspace: StagingMemory,
    visible: Callable[[torch.Tensor], bool] | None,
) -> Operands:
    """Operands with the staging that they need.

    ``readable`` is the range of elements of the source that others may read. ``visible`` says whether memory
    can be seen by the next member, and is None where that gets bytes. ``partial`` says whether partial
    results are kept here, or places alone.
    """
    operands = Operands(source, result, reduction, work=result)
    operands.widens = world > 2 and reduction.is_wide(source.dtype)
    length, item_bytes = source.numel(), source.element_size()
    shared = visible is not None
    if operands.widens and partial:
        operands.wide = workspace.get("wide", length * 4, shared).view(torch.float32)
    if visible is not None:
        if not visible(result):
            operands.work = workspace.get("result", length * item_bytes, shared).view(source.dtype)
        if readable and not visible(source):
            staged = workspace.get("source", len(readable) * item_bytes, shared)
            operands.staged, operands.staged_from = staged.view(source.dtype), readable.start
    return operands


def raw(memory: torch.Tensor) -> memoryview:
    """The bytes of a 1-D contiguous CPU tensor."""
    data: memoryview = memory.view(torch.uint8).numpy().data
    return data


def copy(into: torch.Tensor, memory: torch.Tensor) -> None:
    """Copy elements of one type, on this thread alone."""
    np.copyto(into.view(torch.uint8).numpy(), memory.view(torch.uint8).numpy())
