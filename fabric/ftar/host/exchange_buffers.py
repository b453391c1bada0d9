"""The memory of one exchange: the gradient, the result, and the parts of both that a neighbour can read.

Pieces come in (``take``, or straight into ``landing``) and go out (``outgoing``). A link that carries bytes
sends from any memory. A link that carries references sends places in shared memory, so the elements that
other members read must lie there. The caller's memory is used directly if it is shared. Otherwise the
elements that other members read are copied to a staging segment.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fabric.ftar.host.piece_moves import coded_bytes, fold
from fabric.ftar.host.shm_segments import OwnSegments, SegmentRef, SharedSegment
from fabric.ftar.reduce_ops import Reduction, address_of
from fabric.ftar.ring_schedule import DTYPE_CODES, RingPiece


class StagingMemory:
    """Staging memory by use, allocated when first needed and kept for later exchanges.

    It is shared memory, because a neighbour reads it. Only what goes over links of bytes alone lies in plain
    memory: float32 partial results, and pieces in a form.
    """

    def __init__(self, segments: OwnSegments) -> None:
        self._segments = segments
        self._shared: dict[str, SharedSegment] = {}
        self._private: dict[str, torch.Tensor] = {}

    def get(self, use: str, nbytes: int, shared: bool) -> torch.Tensor:
        """Return ``nbytes`` of undefined content for ``use``. Raises ConfigError where no memory is left."""
        if not shared:
            memory = self._private.get(use)
            if memory is None or memory.numel() < nbytes:
                memory = self._private[use] = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
            return memory[:nbytes]
        segment = self._shared.get(use)
        if segment is None or segment.nbytes < nbytes:
            if segment is not None:
                self._segments.unregister(segment.memory)
                del self._shared[use]
            segment = self._shared[use] = self._segments.allocate(nbytes)
        return segment.memory[:nbytes]


@dataclass(slots=True)
class Operands:
    """``source`` and ``result`` are 1-D CPU tensors of one type and length. They may be the same memory."""

    source: torch.Tensor
    result: torch.Tensor
    reduction: Reduction
    work: torch.Tensor  # memory from which results are sent on: the result itself, or its staging
    widens: bool = False  # partial results are float32 although the elements are smaller
    wide: torch.Tensor | None = None  # partial results in float32, where this member keeps partial results
    staged: torch.Tensor | None = None  # copy of own elements for other members, None without staging
    staged_from: int = 0  # the first element of ``staged``
    form: int = 0  # the form in which the first ``coarse`` elements travel over links of bytes
    coarse: int = 0
    # Memory for pieces that travel on in a form. Each lies where its elements would lie in float32, and never
    # needs more room than they, but for one element alone.
    onward: torch.Tensor | None = None
    parts: Sequence[torch.Tensor] = ()  # where own elements lie on links of bytes; empty: in ``source``
    digests: dict[int, bytes] = field(default_factory=dict)  # of pieces to send on, by first element
    _bytes: dict[int, memoryview] = field(default_factory=dict)  # of a whole memory, by its identity
    _lying: list[memoryview] = field(default_factory=list)  # the bytes of ``parts``
    # (first element, whether the piece is a result) -> references to the piece in other members' memory, to
    # pass on.
    borrowed: dict[tuple[int, bool], list[SegmentRef]] = field(default_factory=dict)

    def lying(self, piece: RingPiece) -> tuple[memoryview, ...]:
        """Return the places of this member's own elements of ``piece``, one after the other."""
        if not self.parts:
            return (self.bytes_of(self.source, piece),)
        if not self._lying:
            self._lying = [raw_to_read(part) for part in self.parts]
        places, item = [], self.source.element_size()
        low, high = piece.start * item, piece.stop * item
        for part in self._lying:
            if low < len(part) and high > 0:
                places.append(part[max(low, 0) : high])
            low, high = low - len(part), high - len(part)
        return tuple(places)

    def bytes_of(self, memory: torch.Tensor, piece: RingPiece) -> memoryview:
        """Return the bytes of ``piece`` in ``memory``, one of these operands."""
        if id(memory) not in self._bytes:
            self._bytes[id(memory)] = raw(memory)
        item = memory.element_size()
        return self._bytes[id(memory)][piece.start * item : piece.stop * item]

    def nbytes(self, piece: RingPiece) -> int:
        """Return the bytes of ``piece`` while it travels."""
        return (piece.stop - piece.start) * self.wire_dtype(piece).itemsize

    def form_of(self, piece: RingPiece) -> int:
        """Return the form in which ``piece`` travels over a link of bytes; 0: as it is."""
        return self.form if piece.start < self.coarse else 0

    def carried(self, piece: RingPiece) -> int:
        """Return the bytes of ``piece`` on a link of bytes."""
        form = self.form and self.form_of(piece)
        return coded_bytes(form, piece.stop - piece.start) if form else self.nbytes(piece)

    def coded(self, piece: RingPiece) -> memoryview | None:
        """Return the memory in which ``piece`` travels on in its form; None where it does not."""
        if self.onward is None or not self.form_of(piece):
            return None
        return raw(self.onward[piece.start : piece.stop + 1])[: self.carried(piece)]

    def going(self, piece: RingPiece) -> torch.Tensor:
        """Return the memory in which ``piece``, which has come, lies to be sent on."""
        if self.is_wide(piece):
            assert self.wide is not None
            return self.wide
        return self.work

    def own(self, piece: RingPiece) -> torch.Tensor:
        """Return this member's own elements of ``piece``, in shared memory if others must read them."""
        part = slice(piece.start, piece.stop)
        if self.staged is None:
            return self.source[part]
        staged = self.staged[piece.start - self.staged_from : piece.stop - self.staged_from]
        copy(staged, self.source[part])
        return staged

    def landing(self, piece: RingPiece) -> torch.Tensor:
        """Return the memory in which a received result has its place."""
        return self.result if piece.last else self.work

    def total(self, piece: RingPiece) -> torch.Tensor:
        """Return the memory for the sum of the partial result ``piece`` and own elements."""
        return self.work if piece.last or self.wide is None else self.wide

    def arrived(self, piece: RingPiece) -> None:
        """Note that a result was received into its ``landing``, or that a sum is in its ``total``."""
        if piece.last != piece.gather and self.work is not self.result:
            part = slice(piece.start, piece.stop)
            copy(self.result[part], self.work[part])

    def keep(self, piece: RingPiece, received: torch.Tensor, lent: bool) -> None:
        """Keep a result that lies in another's memory; ``lent``: the next member reads it there too."""
        if lent:
            copy(self.result[piece.start : piece.stop], received)
        else:
            copy(self.landing(piece)[piece.start : piece.stop], received)
            self.arrived(piece)

    def take(self, piece: RingPiece, received: Sequence[torch.Tensor]) -> None:
        """Add own elements to the partial result ``piece``.

        ``received`` has the elements of the members before, in ring order: one tensor per member, but the
        first tensor may be the sum of several members (see ``wire_dtype``).
        """
        total, how = self.total(piece), self.reduction
        element, first, kept = (DTYPE_CODES[x.dtype] for x in (self.source, received[0], total))
        parts = tuple(raw(part) for part in received)
        own, into = self.bytes_of(self.source, piece), self.bytes_of(total, piece)
        form = self.form_of(piece) if piece.last else 0
        fold(parts, own, into, element, first, kept, how.code, how.weight, piece.last, form)
        self.arrived(piece)

    def wire_dtype(self, piece: RingPiece) -> torch.dtype:
        """Return the type of the elements of ``piece`` while it travels."""
        return torch.float32 if self.is_wide(piece) else self.source.dtype

    def is_wide(self, piece: RingPiece) -> bool:
        """Whether ``piece`` is a partial result in float32 of smaller elements."""
        return self.widens and not piece.gather and piece.hop > 0


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
    """Make operands with the staging that they need.

    ``readable`` is the range of elements of the source that other members may read. ``visible`` says whether
    the next member can read a memory; it is None where that member gets bytes. ``partial``: this member keeps
    partial results, and not references alone.
    """
    operands = Operands(source, result, reduction, work=result)
    operands.widens = world > 2 and reduction.is_wide(source.dtype)
    operands.form, operands.coarse = reduction.form(source.dtype), reduction.coarse
    length, item_bytes = source.numel(), source.element_size()
    shared = visible is not None
    if operands.form and not shared:
        operands.onward = workspace.get("onward", (length + 1) * 4, shared).view(torch.float32)
    if operands.widens and partial:
        operands.wide = workspace.get("wide", length * 4, shared).view(torch.float32)
    if visible is not None:
        if not visible(result):
            operands.work = workspace.get("result", length * item_bytes, shared).view(source.dtype)
        if readable and not visible(source):
            staged = workspace.get("source", len(readable) * item_bytes, shared)
            operands.staged, operands.staged_from = staged.view(source.dtype), readable.start
    return operands


def raw_to_read(memory: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without asking to write there.

    ``raw`` would end the lazy copy that shows a write to a sent gradient. The caller keeps the tensor.
    """
    return memoryview((ctypes.c_char * memory.nbytes).from_address(address_of(memory)))


def raw(memory: torch.Tensor) -> memoryview:
    """Return the bytes of a 1-D contiguous CPU tensor."""
    data: memoryview = memory.view(torch.uint8).numpy().data
    return data


def copy(into: torch.Tensor, memory: torch.Tensor) -> None:
    """Copy elements of one type, on this thread alone."""
    np.copyto(into.view(torch.uint8).numpy(), memory.view(torch.uint8).numpy())
