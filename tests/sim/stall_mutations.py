"""Deliberate bugs in waits and blame, which ``stall_worlds`` must notice, and in blocking joins, which
``late_worlds`` must notice.
"""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from fabric.model import Fence, Member, Record
from fabric.protocol.leader import evictions
from fabric.protocol.leader.evictions import Evictions, RingRebuilder
from fabric.protocol.leader.joins import Joins
from fabric.protocol.leader.record_writer import RecordWriter
from fabric.protocol.leader.state import JobState
from fabric.protocol.member.rounds import Rounds
from fabric.protocol.member.state import KnownEpochs
from fabric.protocol.messages import member_events as io

Patch = pytest.MonkeyPatch


def wait_for_ever_for_an_answer(patch: Patch) -> None:
    patch.setattr(Evictions, "evict_unresponsive", lambda evictions, record: None)


def wait_for_ever_for_user_code(patch: Patch) -> None:
    patch.setattr(Evictions, "evict_stragglers", lambda evictions, peer, beat: None)


def wait_for_ever_for_a_newcomer_in_its_first_round(patch: Patch) -> None:
    bounded = Rounds.stall_deadline

    def deadline(member: Rounds) -> float | None:
        round_ = member.round
        return None if round_ is not None and member._newcomers_first(round_) else bounded(member)

    patch.setattr(Rounds, "stall_deadline", deadline)


def evict_nobody_who_stalls(patch: Patch) -> None:
    patch.setattr(RingRebuilder, "worst", lambda rebuilds, record: ("", ""))


def forget_whom_the_exchange_waited_for(patch: Patch) -> None:
    on_failed = Rounds.on_exchange_failed

    def failed(member: Rounds, event: io.ExchangeFailed) -> None:
        on_failed(member, replace(event, waited_for=""))

    patch.setattr(Rounds, "on_exchange_failed", failed)


def excuse_nobody(patch: Patch) -> None:
    def accused(waiting: dict[str, tuple[str, ...]], names: tuple[str, ...]) -> tuple[str, ...]:
        awaited = {other for others in waiting.values() for other in others}
        return tuple(n for n in names if n in awaited)

    patch.setattr(evictions, "root_waiters", accused)


def wait_for_ever_for_a_state(patch: Patch) -> None:
    patch.setattr(Evictions, "evict_slow_joiners", lambda evictions, record: None)


# Bug -> its patch, and the kind of world (of ``stall_worlds.KINDS``) that must show the bug.
STALLS: dict[str, tuple[Callable[[Patch], None], str]] = {
    mutation.__name__: (mutation, kind)
    for mutation, kind in (
        (wait_for_ever_for_an_answer, "mute"),
        (wait_for_ever_for_user_code, "slow user code"),
        (wait_for_ever_for_a_newcomer_in_its_first_round, "hung"),
        (evict_nobody_who_stalls, "hung"),
        (forget_whom_the_exchange_waited_for, "hung"),
        (excuse_nobody, "hung"),
        (wait_for_ever_for_a_state, "starving"),
    )
}


def never_fall_back(patch: Patch) -> None:
    """Bug: a newcomer that falls behind repeatedly never gets a blocking join."""
    patch.setattr(Joins, "admit_blocking_join", lambda joins, record: False)


def serve_the_awaited_a_step_that_nobody_reaches(patch: Patch) -> None:
    ask = Joins.ask_to_serve

    def asked(joins: Joins, record: Record, joiner: str, step: int) -> None:
        ask(joins, record, joiner, step + joins.state.is_blocking_join(joiner))

    patch.setattr(Joins, "ask_to_serve", asked)


def let_the_awaited_in_with_what_it_had(patch: Patch) -> None:
    """Bug: in a blocking join the newcomer reports the others' step with its old state."""
    is_at = KnownEpochs.is_at

    def there(member: KnownEpochs, where: Record | Fence, step: int) -> bool:
        if isinstance(where, Record) and member.is_awaited(where):
            member._memory.state.step, member._memory.state.generation = step, where.generation
            return True
        return is_at(member, where, step)

    patch.setattr(KnownEpochs, "is_at", there)


def admit_the_awaited_by_a_planned_epoch(patch: Patch) -> None:
    write = RecordWriter.write_epoch

    def planned(
        writer: RecordWriter, record: Record, roster: tuple, forced: bool, why: str, **more: str
    ) -> None:
        awaits = any(x.blocking_join and not record.lists(x.replica, x.incarnation) for x in roster)
        write(writer, record, roster, forced and not awaits, why, **more)

    patch.setattr(RecordWriter, "write_epoch", planned)


def count_the_awaited_as_knowing(patch: Patch) -> None:
    """Bug: a newcomer in a blocking join counts as a member that knows the state."""
    knows = JobState.knows

    def known(state: JobState, member: Member) -> bool:
        return member.blocking_join or knows(state, member)

    patch.setattr(JobState, "knows", known)


JOINS: dict[str, Callable[[Patch], None]] = {
    mutation.__name__: mutation
    for mutation in (
        never_fall_back,
        serve_the_awaited_a_step_that_nobody_reaches,
        let_the_awaited_in_with_what_it_had,
        admit_the_awaited_by_a_planned_epoch,
        count_the_awaited_as_knowing,
    )
}
