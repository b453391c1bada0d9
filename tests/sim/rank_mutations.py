"""Deliberate bugs in the ranks of a replica; the worlds of ``ranks`` must notice each bug."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import rank_messages as ro
from fabric.protocol.ranks import HostVoice, Ranks

Patch = pytest.MonkeyPatch


def a_commit_decided_per_lane(patch: Patch) -> None:
    """Bug: rank 0 commits when its own lane is reduced, even if other lanes are not."""
    exchanged = Ranks._on_exchanged

    def on_exchanged(ranks: Ranks, who: Any, events: Any, now: float) -> None:
        exchanged(ranks, who, events, now)
        known = ranks._reduced[events[0].epoch, events[0].step]
        if who[0] == 0 and len(known) < ranks.size:
            ranks._record_event(events[0], now)

    patch.setattr(Ranks, "_on_exchanged", on_exchanged)


def go_on_without_a_lost_rank(patch: Patch) -> None:
    on_one = Ranks._on_one

    def forgetful(ranks: Ranks, rank: int, event: ro.RankEvent, now: float) -> None:
        if not isinstance(event, ro.RankLost):
            on_one(ranks, rank, event, now)

    patch.setattr(Ranks, "_on_one", forgetful)


def compute_is_over_when_rank_0_is_done(patch: Patch) -> None:
    on_main = Ranks._on_main

    def impatient(ranks: Ranks, who: Any, events: Any, now: float) -> None:
        said = events[0] if who[0] == 0 else ranks._main.get(0)
        if isinstance(said, io.Computed):
            for other in range(ranks.size):
                if other not in who:
                    ranks._main.setdefault(other, said)
        on_main(ranks, who, events, now)

    patch.setattr(Ranks, "_on_main", impatient)


def install_when_rank_0_has_its_part(patch: Patch) -> None:
    on_state = Ranks._on_state

    def hasty(ranks: Ranks, who: Any, events: Any, number: int, now: float) -> None:
        if who[0] == 0 and number == ranks._fetching.number:
            for other in range(1, ranks.size):
                ranks._fetching.ended[other] = events[0]
        on_state(ranks, who, events, number, now)

    patch.setattr(Ranks, "_on_state", hasty)


def the_exchange_begins_with_the_first_rank(patch: Patch) -> None:
    def hasty(ranks: Ranks, _: object, events: Sequence[io.Streaming], now: float) -> None:
        ranks._record_event(events[0], now)

    patch.setattr(Ranks, "_on_streaming", hasty)


def the_word_of_a_rank_outlives_its_order(patch: Patch) -> None:
    on_computed = Ranks._on_computed

    def remembering(ranks: Ranks, *arguments: Any) -> None:
        words = dict(ranks._streaming)
        on_computed(ranks, *arguments)
        ranks._streaming |= words

    patch.setattr(Ranks, "_on_computed", remembering)


def a_voice_answers_for_a_rank_that_has_not(patch: Patch) -> None:
    take = HostVoice.take

    def hasty(voice: HostVoice, rank: int, outcome: ro.RankOutcome) -> Any:
        said = take(voice, rank, outcome)
        if isinstance(outcome.event, io.Exchanged) and not said:
            voice._waiting.clear()
            return [ro.FromHost(voice.ranks, (outcome.event,) * len(voice.ranks), outcome.number)]
        return said

    patch.setattr(HostVoice, "take", hasty)


def a_voice_keeps_the_loss_of_a_rank_to_itself(patch: Patch) -> None:
    take = HostVoice.take

    def silent(voice: HostVoice, rank: int, outcome: ro.RankOutcome) -> Any:
        return [] if isinstance(outcome.event, ro.RankLost) else take(voice, rank, outcome)

    patch.setattr(HostVoice, "take", silent)


def what_one_rank_says_counts_for_its_host(patch: Patch) -> None:
    sum_up = HostVoice._sum_up

    def equal(voice: HostVoice) -> Any:
        return [replace(x, events=(x.events[0],) * len(x.events)) for x in sum_up(voice)]

    patch.setattr(HostVoice, "_sum_up", equal)


MUTATIONS: dict[str, Callable[[Patch], None]] = {
    mutation.__name__: mutation
    for mutation in (
        a_commit_decided_per_lane,
        go_on_without_a_lost_rank,
        compute_is_over_when_rank_0_is_done,
        install_when_rank_0_has_its_part,
        the_exchange_begins_with_the_first_rank,
        the_word_of_a_rank_outlives_its_order,
        a_voice_answers_for_a_rank_that_has_not,
        a_voice_keeps_the_loss_of_a_rank_to_itself,
        what_one_rank_says_counts_for_its_host,
    )
}
