"""Deliberate bugs in who is waited for, for how long, and who is blamed: the worlds of ``stall_worlds`` must
notice each; and in the fallback of a join, which those of ``late_worlds`` must."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from fabric.model import Fence, Record
from fabric.protocol import leader_reforms
from fabric.protocol import member as member_core
from fabric.protocol import member_io as io
from fabric.protocol.leader import Leader
from fabric.protocol.member import Member

Patch = pytest.MonkeyPatch


def wait_for_ever_for_an_answer(patch: Patch) -> None:
    patch.setattr(Leader, "_expire_mute", lambda leader, record: None)


def wait_for_ever_for_user_code(patch: Patch) -> None:
    patch.setattr(Leader, "_expire_late", lambda leader, peer, beat: None)


def wait_for_ever_for_a_newcomer_in_its_first_round(patch: Patch) -> None:
    bounded = Member.stall_deadline

    def deadline(member: Member) -> float | None:
        round_ = member.round
        return None if round_ is not None and member._newcomers_first(round_) else bounded(member)

    patch.setattr(Member, "stall_deadline", deadline)


def evict_nobody_who_stalls(patch: Patch) -> None:
    patch.setattr(Leader, "_worst", lambda leader, record: ("", ""))


def forget_whom_the_exchange_waited_for(patch: Patch) -> None:
    on_failed = Member.on_exchange_failed

    def failed(member: Member, event: io.ExchangeFailed) -> None:
        on_failed(member, replace(event, waited_for=""))

    patch.setitem(member_core._HANDLERS, io.ExchangeFailed, failed)


def excuse_nobody(patch: Patch) -> None:
    def accused(waiting: dict[str, tuple[str, ...]], names: tuple[str, ...]) -> tuple[str, ...]:
        awaited = {other for others in waiting.values() for other in others}
        return tuple(n for n in names if n in awaited)

    patch.setattr(leader_reforms, "unexcused", accused)


def wait_for_ever_for_a_state(patch: Patch) -> None:
    patch.setattr(Leader, "_expire_awaited", lambda leader, record: None)


# With the kind of world (of ``stall_worlds.KINDS``) that is to show it.
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
    """However often a newcomer falls off, it is told to replay again."""
    patch.setattr(Leader, "_admit_awaited", lambda leader, record: False)


def serve_the_awaited_a_step_that_nobody_reaches(patch: Patch) -> None:
    ask = Leader._ask_to_serve

    def asked(leader: Leader, record: Record, joiner: str, step: int) -> None:
        ask(leader, record, joiner, step + leader._is_awaited(joiner))

    patch.setattr(Leader, "_ask_to_serve", asked)


def let_the_awaited_in_with_what_it_had(patch: Patch) -> None:
    """It says that it is at the step of the others, whatever it holds."""
    is_at = Member._is_at

    def there(member: Member, where: Record | Fence, step: int) -> bool:
        if isinstance(where, Record) and member._is_awaited(where):
            member.state.step, member.state.generation = step, where.generation
            return True
        return is_at(member, where, step)

    patch.setattr(Member, "_is_at", there)


def admit_the_awaited_by_a_planned_epoch(patch: Patch) -> None:
    write = Leader._write_epoch

    def planned(leader: Leader, record: Record, roster: tuple, forced: bool, why: str, **more: str) -> None:
        awaits = any(x.awaited and not record.lists(x.replica, x.incarnation) for x in roster)
        write(leader, record, roster, forced and not awaits, why, **more)

    patch.setattr(Leader, "_write_epoch", planned)


def count_the_awaited_as_knowing(patch: Patch) -> None:
    """From its admission on it passes for one that knows every step."""
    knows = Leader._knows

    def known(leader: Leader, member: object) -> bool:
        return getattr(member, "awaited") or knows(leader, member)  # type: ignore[arg-type]  # noqa: B009

    patch.setattr(Leader, "_knows", known)


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
