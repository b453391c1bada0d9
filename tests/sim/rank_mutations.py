"""Deliberate bugs in the ranks of a replica; the worlds of ``ranks`` must notice each bug."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import rank_messages as ro
from fabric.protocol.ranks import HostVoice, Ranks

Patch = pytest.MonkeyPatch


def a_commit_decided_per_lane(patch: Patch) -> None:
    """Bug: rank 0 commits when its own lane is reduced, even if other lanes are not."""
    take = Ranks._take

    def on_exchanged(ranks: Ranks, who: Any, events: Any, number: int, now: float) -> None:
        take(ranks, who, events, number, now)
        if not isinstance(events[0], io.Exchanged) or who[0] != 0:
            return
        if len(ranks._answers["round", events[0].epoch, events[0].step]) < ranks.size:
            ranks._record_event(events[0], now)

    patch.setattr(Ranks, "_take", on_exchanged)


def go_on_without_a_lost_rank(patch: Patch) -> None:
    on_one = Ranks._on_one

    def forgetful(ranks: Ranks, rank: int, event: ro.RankEvent, number: int, now: float) -> None:
        if not isinstance(event, ro.RankLost):
            on_one(ranks, rank, event, number, now)

    patch.setattr(Ranks, "_on_one", forgetful)


def compute_is_over_when_rank_0_is_done(patch: Patch) -> None:
    take = Ranks._take

    def impatient(ranks: Ranks, who: Any, events: Any, number: int, now: float) -> None:
        main = ranks._answers.setdefault(("main",), {})
        said = events[0] if who[0] == 0 else main.get(0)
        if isinstance(said, io.Computed):
            for other in range(ranks.size):
                if other not in who:
                    main.setdefault(other, said)
        take(ranks, who, events, number, now)

    patch.setattr(Ranks, "_take", impatient)


def install_when_rank_0_has_its_part(patch: Patch) -> None:
    take = Ranks._take

    def hasty(ranks: Ranks, who: Any, events: Any, number: int, now: float) -> None:
        if who[0] == 0 and ranks._is_under_way(number) and isinstance(events[0], io.StateFetched):
            for other in range(1, ranks.size):
                ranks._answers.setdefault(("fetch", number), {})[other] = events[0]
        take(ranks, who, events, number, now)

    patch.setattr(Ranks, "_take", hasty)


def the_exchange_begins_with_the_first_rank(patch: Patch) -> None:
    take = Ranks._take

    def hasty(ranks: Ranks, who: Any, events: Any, number: int, now: float) -> None:
        if isinstance(events[0], io.Streaming):
            ranks._record_event(events[0], now)
        else:
            take(ranks, who, events, number, now)

    patch.setattr(Ranks, "_take", hasty)


def the_word_of_a_rank_outlives_its_order(patch: Patch) -> None:
    take = Ranks._take

    def remembering(ranks: Ranks, who: Any, events: Any, number: int, now: float) -> None:
        question = ("backward",)
        if isinstance(events[0], io.Streaming):
            told = ranks._answers.setdefault(question, {})
            told.update(dict.fromkeys(who, events[0]))
            if len(told) == ranks.size:
                ranks._on_answers(question, [told[rank] for rank in range(ranks.size)], now)
            return
        words = ranks._answers.get(question, {})
        take(ranks, who, events, number, now)
        ranks._answers[question] = words

    patch.setattr(Ranks, "_take", remembering)


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
