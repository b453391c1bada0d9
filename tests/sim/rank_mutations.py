"""Deliberate bugs in the ranks of a replica; the worlds of ``ranks`` must notice each bug."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import rank_messages as ro
from fabric.protocol.ranks import RankLost, Ranks

Patch = pytest.MonkeyPatch


def a_commit_decided_per_lane(patch: Patch) -> None:
    """Bug: rank 0 commits when its own lane is reduced, even if other lanes are not."""
    exchanged, part = Ranks._on_exchanged, Ranks._part

    def on_exchanged(ranks: Ranks, rank: int, event: io.Exchanged, now: float) -> None:
        exchanged(ranks, rank, event, now)
        known = ranks._reduced[event.epoch, event.step]
        if rank == 0 and len(known) < ranks.size:
            ranks._record_event(event, now)

    def of_rank(ranks: Ranks, effect: Any, rank: int) -> Any:
        if isinstance(effect, io.Publish | io.Apply) and effect.prepared is not None:
            known = ranks._reduced.get((effect.prepared.epoch, effect.prepared.step), {})
            digest = known[rank].gradient_digest if rank in known else ""
            return replace(effect, prepared=replace(effect.prepared, gradient_digest=digest))
        return part(ranks, effect, rank)

    patch.setattr(Ranks, "_on_exchanged", on_exchanged)
    patch.setattr(Ranks, "_part", of_rank)


def go_on_without_a_lost_rank(patch: Patch) -> None:
    def lost(ranks: Ranks, event: RankLost) -> None:
        """Nothing."""

    patch.setattr(Ranks, "_on_lost", lost)


def compute_is_over_when_rank_0_is_done(patch: Patch) -> None:
    on_main = Ranks._on_main

    def impatient(ranks: Ranks, rank: int, event: ro.RankEvent, now: float) -> None:
        said = event if rank == 0 else ranks._main.get(0)
        if isinstance(said, io.Computed):
            for other in range(ranks.size):
                if other != rank:
                    ranks._main.setdefault(other, said)
        on_main(ranks, rank, event, now)

    patch.setattr(Ranks, "_on_main", impatient)


def install_when_rank_0_has_its_part(patch: Patch) -> None:
    on_state = Ranks._on_state

    def hasty(ranks: Ranks, rank: int, outcome: ro.RankOutcome, now: float) -> None:
        if rank == 0 and outcome.number == ranks._fetching.number:
            for other in range(1, ranks.size):
                ranks._fetching.ended[other] = outcome.event
        on_state(ranks, rank, outcome, now)

    patch.setattr(Ranks, "_on_state", hasty)


def the_exchange_begins_with_the_first_rank(patch: Patch) -> None:
    def hasty(ranks: Ranks, rank: int, event: io.Streaming, now: float) -> None:
        ranks._record_event(event, now)

    patch.setattr(Ranks, "_on_streaming", hasty)


def the_word_of_a_rank_outlives_its_order(patch: Patch) -> None:
    on_computed = Ranks._on_computed

    def remembering(ranks: Ranks, *arguments: Any) -> None:
        words = dict(ranks._streaming)
        on_computed(ranks, *arguments)
        ranks._streaming |= words

    patch.setattr(Ranks, "_on_computed", remembering)


MUTATIONS: dict[str, Callable[[Patch], None]] = {
    mutation.__name__: mutation
    for mutation in (
        a_commit_decided_per_lane,
        go_on_without_a_lost_rank,
        compute_is_over_when_rank_0_is_done,
        install_when_rank_0_has_its_part,
        the_exchange_begins_with_the_first_rank,
        the_word_of_a_rank_outlives_its_order,
    )
}
