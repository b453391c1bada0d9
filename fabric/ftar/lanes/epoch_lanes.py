"""The lanes of each epoch, as its record gives them, and this rank's part in them."""

import math
import threading
from dataclasses import dataclass, field
from functools import lru_cache

import xxhash

from fabric.errors import RoundAborted
from fabric.ftar.lanes.held_parameters import dtype_of
from fabric.ftar.lanes.rank_lanes import RankLanes
from fabric.model import Member, Record
from fabric.protocol.rules.lanes import HeldParameter, Lane, ReplicaLayout, lanes_of
from fabric.protocol.rules.layout_text import read_layout


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

        A release that exchanges no presence has another digest.
        """
        return xxhash.xxh3_64_hexdigest("\n".join([*self.described, "presence"]).encode())

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
        rank_lanes = RankLanes(lanes, place, self.rank, self.layout.ranks[self.rank])
        after = (place + 1) % len(record.roster)
        rings = tuple(
            LaneRing(number, lanes[number].holders[after], record.roster[after])
            for number in rank_lanes.numbers
        )
        cuts = "\n".join(sorted({x.cuts for x in record.roster}))
        return EpochLanes(rank_lanes, rings, xxhash.xxh3_64_hexdigest(cuts.encode()))
