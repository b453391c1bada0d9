"""The lanes of each epoch, as its record gives them, this rank's part in them, and one ring per lane.

The rings are the data plane of a rank in a job whose replicas have unequal layouts. A rank is in several
rings at once, but reduces one lane after the other, in the order of their numbers. All ranks keep this order,
so no two ranks wait for each other. The rings are of one kind, on the host or on a device.
"""

import math
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import xxhash

from fabric.errors import ConfigError, IllegalTransition, RoundAborted
from fabric.ftar.buckets import lay_out
from fabric.ftar.plane import DataPlane, Ring, RingNotes
from fabric.ftar.reduce_ops import SUM, Reduction
from fabric.model import Member, Record
from fabric.protocol.rules.lanes import (
    HeldParameter,
    Lane,
    Piece,
    ReplicaLayout,
    TensorRegion,
    lanes_of,
    lanes_of_rank,
)
from fabric.protocol.rules.layout_text import read_layout

# Which part of each parameter lies in this process, and where those parts lie in a flat gradient.


def held_parameters(parameters: Iterable[tuple[str, torch.Tensor]]) -> tuple[HeldParameter, ...]:
    """Return the parts of ``parameters`` in this process, in the same order.

    Raises ConfigError for a placement whose local tensor is not a part of the parameter.
    """
    return tuple(_held(name, parameter) for name, parameter in parameters)


def _held(name: str, parameter: torch.Tensor) -> HeldParameter:
    dtype, shape = str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape)
    if not hasattr(parameter, "device_mesh"):
        return HeldParameter(name, dtype, shape, TensorRegion.whole(shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = parameter.placements  # type: ignore[attr-defined]
    if any(p.is_partial() for p in placements):
        raise ConfigError(f"{name} is a partial sum at each rank: shard or replicate every parameter")
    sizes, begin = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, placements)
    if math.prod(sizes) == 0:
        begin = (0,) * len(shape)
    return HeldParameter(name, dtype, shape, TensorRegion(tuple(map(int, begin)), tuple(map(int, sizes))))


def dtype_of(held: HeldParameter) -> torch.dtype:
    """Return the type of its elements. Raises ConfigError where torch does not have it."""
    dtype = getattr(torch, held.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"{held.name} is of {held.dtype[:40]!r}: run the same release of torch on all ranks"
        )
    return dtype


class FlatPlaces:
    """Views of a flat gradient in which a rank that holds ``row`` keeps its parts, as ``FlatGradients``.

    ``late``: as there.
    """

    def __init__(self, row: Sequence[HeldParameter], late: Collection[str] = ()) -> None:
        self._held = {held.name: held for held in row}
        self._begins: dict[str, int] = {}
        self.presence_begins: dict[str, int] = {}  # the byte at which each parameter's presence begins
        self.nbytes = 0
        shapes = [
            (x.name, torch.nn.Parameter(torch.empty(x.region.sizes, dtype=dtype_of(x), device="meta"), False))
            for x in row
        ]
        for bucket in lay_out(shapes, late=late):
            at, itemsize = bucket.begin, bucket.dtype.itemsize
            for name, parameter in bucket.parameters:
                self._begins[name] = at
                at += parameter.numel() * itemsize
            for name, _ in bucket.parameters:
                self.presence_begins[name] = at
                at += itemsize
            self.nbytes = bucket.end

    def regions(self) -> Iterable[HeldParameter]:
        """The parts that have elements."""
        return (held for held in self._held.values() if held.region.elements)

    def view(self, flat: torch.Tensor, name: str, region: TensorRegion) -> torch.Tensor:
        """Return, as a view of ``flat``, the ``region`` of parameter ``name``, which this rank holds."""
        held, begin = self._held[name], self._begins[name]
        dtype = dtype_of(held)
        part = flat[begin : begin + held.region.elements * dtype.itemsize].view(dtype)
        return part.view(held.region.sizes)[region.within(held.region)]

    def presence(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """Return, as a view of ``flat``, the bytes that tell whether parameter ``name`` has a gradient."""
        begin = self.presence_begins[name]
        return flat[begin : begin + dtype_of(self._held[name]).itemsize]


# The lanes of one rank in one epoch: its pieces go from its flat gradient to each lane, and back.
#
# With each piece travels the presence of its parameter, as in a bucket of replicas of equal layouts.


@dataclass(frozen=True, slots=True)
class LaneSection:
    """The pieces of one data type and group in a lane, which one exchange reduces as one buffer."""

    lane: int
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    group: int = 0
    exact: int = 0  # how many of the last pieces must not travel in fewer bytes

    @property
    def coarse(self) -> int:
        """How many of the first elements may travel in fewer bytes. Pieces with copies may not: the rings of
        two copies may have other links, which round otherwise."""
        return (
            0
            if self.group
            else sum(piece.region.elements for piece in self.pieces[: len(self.pieces) - self.exact])
        )

    @property
    def elements(self) -> int:
        return sum(piece.region.elements for piece in self.pieces)

    @property
    def size(self) -> int:
        """Elements of its memory: those of the pieces, then each piece's presence."""
        return self.elements + len(self.pieces)


def _by_kind(lane: Lane) -> dict[tuple[str, int], list[Piece]]:
    """Return the lane's pieces by data type and group."""
    kinds: dict[tuple[str, int], list[Piece]] = {}
    for piece in lane.pieces:
        kinds.setdefault((piece.dtype, piece.group), []).append(piece)
    return kinds


class RankLanes:
    """The sections of all lanes in which ``rank`` takes part, in the order in which all ranks reduce them.

    ``place``: the index of its replica in the layouts. ``row``: what the rank holds. A piece lies in several
    of its lanes where other replicas have more copies; the rank takes the result of the lowest copy.
    ``late``: the names of what is final only after backward. It never travels in fewer bytes, and comes last.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        place: int,
        rank: int,
        row: Sequence[HeldParameter],
        late: Collection[str] = (),
    ) -> None:
        self.lanes = tuple(lanes)
        self.numbers = lanes_of_rank(lanes, place, rank)
        self._places = FlatPlaces(row, late)
        dtypes = {held.dtype: dtype_of(held) for held in row}
        self.sections = tuple(
            LaneSection(
                number,
                dtypes[word],
                tuple(sorted(pieces, key=lambda piece: piece.name in late)),
                group,
                sum(piece.name in late for piece in pieces),
            )
            for number in self.numbers
            for (word, group), pieces in sorted(_by_kind(lanes[number]).items())
        )
        self._lowest: dict[tuple[str, TensorRegion], int] = {}  # piece -> the copy whose result is taken
        for piece in (piece for section in self.sections for piece in section.pieces):
            key = piece.name, piece.region
            self._lowest[key] = min(piece.copy, self._lowest.get(key, piece.copy))
        self._indices: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}  # of each section's presence

    @torch.no_grad()
    def gather(self, section: LaneSection, flat: torch.Tensor, into: torch.Tensor) -> None:
        """Copy the section's pieces and their presence out of the flat gradient."""
        for piece, part in self._parts(section, into):
            part.copy_(self._places.view(flat, piece.name, piece.region))
        words, index = self._presence(section, flat)
        into[section.elements :].copy_(words[index])

    @torch.no_grad()
    def scatter(self, section: LaneSection, reduced: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy the section's reduced pieces and their presence to their places in the flat gradient."""
        for piece, part in self._parts(section, reduced):
            if self._lowest[piece.name, piece.region] == piece.copy:
                self._places.view(flat, piece.name, piece.region).copy_(part)
        words, index = self._presence(section, flat)
        # The pieces of one parameter may come by several lanes, in any order: one that is present suffices.
        present = reduced[section.elements :].clamp(max=1).to(words.dtype)
        words[index] = torch.maximum(words[index], present)

    def _presence(self, section: LaneSection, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``flat`` in the section's type, and the index of each piece's presence there."""
        key, itemsize = (section.lane, section.dtype, section.group), section.dtype.itemsize
        if key not in self._indices:
            begins = [self._places.presence_begins[piece.name] // itemsize for piece in section.pieces]
            self._indices[key] = torch.tensor(begins, device=flat.device)
        return flat[: flat.numel() // itemsize * itemsize].view(section.dtype), self._indices[key]

    def _parts(self, section: LaneSection, memory: torch.Tensor) -> list[tuple[Piece, torch.Tensor]]:
        parts, begin = [], 0
        for piece in section.pieces:
            end = begin + piece.region.elements
            parts.append((piece, memory[begin:end].view(piece.region.sizes)))
            begin = end
        return parts


@dataclass(frozen=True, slots=True)
class LaneRing:
    """This rank's place in one lane's ring."""

    lane: int
    next_rank: int
    next_member: Member


@dataclass(frozen=True, slots=True)
class EpochLanes:
    """One epoch's lanes at this rank. ``name`` (16 hex) identifies the layouts of the epoch's members."""

    rank_lanes: RankLanes
    rings: tuple[LaneRing, ...]
    name: str


@lru_cache(maxsize=4)
def _lanes_of_roster(cuts: tuple[str, ...]) -> tuple[Lane, ...]:
    """Return the lanes of members with these layouts, cached: for a large model this takes a second."""
    return lanes_of({str(place): read_layout(text) for place, text in enumerate(cuts)})


@dataclass(slots=True)
class LaneDirectory:
    """Makes the lanes of epochs for ``rank`` of ``replica``, and keeps them until the epoch is over."""

    replica: str
    rank: int
    layout: ReplicaLayout
    text: str
    late: frozenset[str] = frozenset()  # the names of what is final only after backward; it travels exactly
    _epochs: dict[int, EpochLanes] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def layout_name(self) -> str:
        """A short name of this replica's layout. Equal layouts have equal names."""
        return xxhash.xxh3_64_hexdigest(self.text.encode())

    @property
    def model_bytes(self) -> int:
        """Bytes of the whole model's gradient."""
        return sum(math.prod(x.shape) * dtype_of(x).itemsize for x in self._parameters())

    @property
    def described(self) -> tuple[str, ...]:
        """A line for each parameter of the model, equal for every layout."""
        return tuple(f"{x.name} {x.dtype}{list(x.shape)}" for x in self._parameters())

    @property
    def model_name(self) -> str:
        """A digest of the parameters' names, shapes and types, equal for every layout.

        A release that exchanges no presence, or has other late values, has another digest.
        """
        return xxhash.xxh3_64_hexdigest("\n".join([*self.described, "presence", *sorted(self.late)]).encode())

    def _parameters(self) -> list[HeldParameter]:
        """Every parameter of the model once, by name."""
        held = {x.name: x for row in self.layout.ranks for x in row}
        return [held[name] for name in sorted(held)]

    def enter(self, record: Record) -> EpochLanes:
        """Make and return the lanes of ``record``, which lists this replica."""
        with self._lock:
            if record.epoch not in self._epochs:
                self._epochs[record.epoch] = self._make(record)
            return self._epochs[record.epoch]

    def get(self, epoch: int) -> EpochLanes:
        """Return the lanes of an epoch that ``enter`` has made. Raises RoundAborted where it is over."""
        with self._lock:
            if epoch not in self._epochs:
                raise RoundAborted(f"epoch {epoch} is over")
            return self._epochs[epoch]

    def retire(self, before_epoch: int) -> None:
        """Forget the lanes of older epochs. Any number of newer epochs may be announced while one runs."""
        with self._lock:
            self._epochs = {epoch: x for epoch, x in self._epochs.items() if epoch >= before_epoch}

    def _make(self, record: Record) -> EpochLanes:
        lanes = _lanes_of_roster(tuple(x.cuts for x in record.roster))
        place = record.names.index(self.replica)
        rank_lanes = RankLanes(lanes, place, self.rank, self.layout.ranks[self.rank], self.late)
        after = (place + 1) % len(record.roster)
        rings = tuple(
            LaneRing(number, lanes[number].holders[after], record.roster[after])
            for number in rank_lanes.numbers
        )
        cuts = "\n".join(sorted({x.cuts for x in record.roster}))
        return EpochLanes(rank_lanes, rings, xxhash.xxh3_64_hexdigest(cuts.encode()))


class LanePlane:
    """DataPlane whose exchanges name their lane: ``install_lane`` and ``reduce_lane``.

    ``registers``: the rings need to know the memory to which results are copied, as on a device.
    """

    def __init__(self, make_ring: Callable[[], DataPlane], registers: bool = False) -> None:
        self._make_ring = make_ring
        self._lock = threading.Lock()
        self._rings: dict[int, DataPlane] = {}
        self._bounds: dict[str, float] = {}
        self._aborted: dict[int, tuple[str, str]] = {}  # epoch -> reason, for lanes linked later
        self._retired_before = 0
        self._waiting_s: dict[str, float] = {}
        self._sending_s: dict[str, float] = {}
        self._memory: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}  # (lane, type, group) -> memory
        self._registers = registers
        self.notes = RingNotes()
        self.shares_memory = self._ring(0).shares_memory
        self.kind = self._ring(0).kind
        self.connections = self._ring(0).connections

    def _ring(self, lane: int) -> DataPlane:
        with self._lock:
            ring = self._rings.get(lane)
            if ring is None:
                ring = self._rings[lane] = self._make_ring()
                ring.set_bounds(**self._bounds)
                ring.retire(self._retired_before)
                for epoch, cause in self._aborted.items():
                    ring.abort(epoch, *cause)
            return ring

    def _all(self) -> list[DataPlane]:
        with self._lock:
            return list(self._rings.values())

    @property
    def waiting_for(self) -> str:
        return next((ring.waiting_for for ring in self._all() if ring.waiting_for), "")

    @property
    def waiting_s(self) -> dict[str, float]:
        return dict(self._waiting_s)

    @property
    def sending_s(self) -> dict[str, float]:
        return dict(self._sending_s)

    def set_bounds(self, exchange_s: float | None = None, entry_s: float | None = None) -> None:
        given = {"exchange_s": exchange_s, "entry_s": entry_s}
        self._bounds.update({name: value for name, value in given.items() if value is not None})
        for ring in self._all():
            ring.set_bounds(exchange_s, entry_s)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return ordinary memory, because pieces are copied to their lanes anyway."""
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")

    def register(self, descriptor: int, memory: torch.Tensor) -> None:
        """Register ``memory`` where results are copied to it. Neighbours read lanes, not flat gradients."""
        if self._registers:
            self._ring(0).register(descriptor, memory)

    def unregister(self, memory: torch.Tensor) -> None:
        if self._registers:
            self._ring(0).unregister(memory)

    def install(self, ring: Ring, *_sockets: object, **_further: object) -> None:
        """Raise IllegalTransition: here every link belongs to a lane, see ``install_lane``."""
        raise IllegalTransition(f"epoch {ring.epoch} has lanes: name the lane of every link")

    def install_lane(
        self,
        lane: int,
        ring: Ring,
        next_socket: socket.socket | None,
        previous_socket: socket.socket | None,
        further_next: Sequence[socket.socket] = (),
        further_previous: Sequence[socket.socket] = (),
    ) -> None:
        """Take the links of one lane: see ``DataPlane.install``."""
        self._ring(lane).install(ring, next_socket, previous_socket, further_next, further_previous)

    def memory(self, section: LaneSection) -> torch.Tensor:
        """Return memory for a section's pieces, which the lane's neighbours on this host can read."""
        key = section.lane, section.dtype, section.group
        ring, size = self._ring(section.lane), section.size
        memory = self._memory.get(key)
        if memory is None or memory.numel() < size:
            if memory is not None:
                ring.unregister(memory.view(torch.uint8))
            nbytes = size * section.dtype.itemsize
            memory = self._memory[key] = ring.allocate(nbytes).view(section.dtype)
        return memory[:size]

    def reduce_lane(
        self, lane: int, epoch: int, step: int, part: torch.Tensor, reduction: Reduction = SUM
    ) -> None:
        """Sum ``part`` over the lane's ranks, in place: see ``DataPlane.all_reduce``."""
        ring = self._ring(lane)
        ring.all_reduce(epoch, step, part, reduction=reduction)
        self._waiting_s, self._sending_s = ring.waiting_s, ring.sending_s

    def all_reduce(self, epoch: int, *_buffers: object, **_options: object) -> None:
        """Raise IllegalTransition: here every exchange belongs to a lane, see ``reduce_lane``."""
        raise IllegalTransition(f"epoch {epoch} has lanes: reduce one of them")

    def abort(self, epoch: int, why: str, about: str = "") -> None:
        with self._lock:
            if epoch >= self._retired_before:
                self._aborted.setdefault(epoch, (why, about))
        for ring in self._all():
            ring.abort(epoch, why, about)

    def retire(self, before_epoch: int) -> None:
        with self._lock:
            self._retired_before = max(self._retired_before, before_epoch)
            self._aborted = {e: cause for e, cause in self._aborted.items() if e >= self._retired_before}
        for ring in self._all():
            ring.retire(before_epoch)

    def close(self) -> None:
        for ring in self._all():
            ring.close()
