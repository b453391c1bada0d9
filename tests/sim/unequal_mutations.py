"""Deliberate bugs in how replicas of unequal layouts share lanes, states and gradients; the worlds of
``unequal`` must notice each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from fabric.client.state.fetch_thread import PieceFetcher
from fabric.client.state.state_loader import StateLoader
from fabric.ftar import lanes
from fabric.ftar.lanes import RankLanes
from fabric.model import Member, SnapshotRef
from fabric.protocol.ranks import Ranks
from fabric.protocol.rules.lanes import Lane, ReplicaLayout, lanes_of

Patch = pytest.MonkeyPatch


def _change_lanes(patch: Patch, change: Callable[[tuple[Lane, ...]], tuple[Lane, ...]]) -> None:
    patch.setattr(lanes, "lanes_of", lambda layouts: change(lanes_of(layouts)))
    # The cache of the lanes of a roster must not outlive the bug.
    patch.setattr(lanes, "_lanes_of_roster", lanes._lanes_of_roster.__wrapped__)


def sum_copies_wherever_they_lie(patch: Patch) -> None:
    """Copies of a piece lie at different places of their lanes, so their sums have different bits."""

    def ungrouped(lanes: tuple[Lane, ...]) -> tuple[Lane, ...]:
        return tuple(replace(x, pieces=tuple(replace(p, group=0) for p in x.pieces)) for x in lanes)

    _change_lanes(patch, ungrouped)


def lose_the_last_piece_of_a_lane(patch: Patch) -> None:
    def shortened(lanes: tuple[Lane, ...]) -> tuple[Lane, ...]:
        return tuple(replace(x, pieces=x.pieces[:-1] or x.pieces) for x in lanes)

    _change_lanes(patch, shortened)


def keep_the_lanes_of_the_first_roster(patch: Patch) -> None:
    """As long as the roster has as many members."""
    known: dict[tuple[str, ...], tuple[Lane, ...]] = {}

    def first(layouts: Mapping[str, ReplicaLayout]) -> tuple[Lane, ...]:
        return known.setdefault(tuple(layouts), lanes_of(layouts))

    patch.setattr(lanes, "lanes_of", first)
    patch.setattr(lanes, "_lanes_of_roster", lanes._lanes_of_roster.__wrapped__)


def reduce_lanes_in_an_order_of_ones_own(patch: Patch) -> None:
    made = RankLanes.__init__

    def init(lanes: RankLanes, every: Sequence[Lane], place: int, *others: Any) -> None:
        made(lanes, every, place, *others)
        if place % 2:
            lanes.sections = lanes.sections[::-1]

    patch.setattr(RankLanes, "__init__", init)


def load_parts_of_several_layouts(patch: Patch) -> None:
    def served(loader: StateLoader, urls: Mapping[int, Sequence[str]], state: SnapshotRef) -> Any:
        return urls

    patch.setattr(StateLoader, "_of_one_layout", served)


def read_gradients_from_the_rank_of_the_same_number(patch: Patch) -> None:
    parts = PieceFetcher._parts

    def own_rank(pieces: PieceFetcher, member: Member) -> Any:
        rank = pieces._lanes.rank
        return {k: v for k, v in parts(pieces, member).items() if k == rank} or parts(pieces, member)

    patch.setattr(PieceFetcher, "_parts", own_rank)


def name_a_round_by_rank_0_alone(patch: Patch) -> None:
    patch.setattr(Ranks, "_together", lambda ranks, digests: digests[0])


MUTATIONS: dict[str, Callable[[Patch], None]] = {
    mutation.__name__: mutation
    for mutation in (
        sum_copies_wherever_they_lie,
        lose_the_last_piece_of_a_lane,
        keep_the_lanes_of_the_first_roster,
        reduce_lanes_in_an_order_of_ones_own,
        load_parts_of_several_layouts,
        read_gradients_from_the_rank_of_the_same_number,
        name_a_round_by_rank_0_alone,
    )
}
