"""Deliberate bugs in how a job ends; each must be noticed in the worlds that are about that."""

from collections.abc import Callable

import pytest

from fabric.model import Ended, Record
from fabric.protocol import member as member_core
from fabric.protocol import member_io as io
from fabric.protocol import messages as m
from fabric.protocol.leader import Leader
from fabric.protocol.member import Member

Patch = pytest.MonkeyPatch


def wait_for_a_lighthouse_for_ever(patch: Patch) -> None:
    patch.setattr(Member, "_end_alone_when_due", lambda member: None)
    patch.setattr(Member, "end_deadline", lambda member: None)


def wait_for_the_autonomy_when_all_have_finished(patch: Patch) -> None:
    patch.setattr(Member, "_have_all_finished", lambda member, record: False)


def end_alone_before_all_have_finished(patch: Patch) -> None:
    patch.setattr(Member, "_have_all_finished", lambda member, record: True)


def ask_for_more_than_others_have_finished(patch: Patch) -> None:
    patch.setattr(Member, "_stop_when_others_have_finished", lambda member: None)


def let_a_newcomer_end_the_job(patch: Patch) -> None:
    patch.setattr(Member, "_takes_part", lambda member: member.current is not None)


def wait_in_the_roster_without_the_state(patch: Patch) -> None:
    patch.setattr(Member, "_stop_when_left_behind", lambda member: None)


def wait_outside_for_another_end(patch: Patch) -> None:
    patch.setattr(Leader, "_refuse_early_ends", lambda leader, record: None)
    end_with_any_state(patch)


def end_with_any_state(patch: Patch) -> None:
    def complete(member: Member, message: m.Complete) -> None:
        member._do(io.Finish(message.step))
        member.stopped = True

    patch.setitem(member_core._FROM_LEADER, m.Complete, complete)


def forget_word_of_the_end(patch: Patch) -> None:
    patch.setattr(Leader, "note_ended", lambda leader, replica, ended: None)


def tell_members_nothing_of_my_end(patch: Patch) -> None:
    patch.setattr(Member, "_tell_members", lambda member, why="": None)


def mark_the_end_where_the_first_word_of_it_says(patch: Patch) -> None:
    def note(leader: Leader, _: str, ended: Ended | None) -> None:
        if ended is not None and leader.record is not None:
            leader.ended = ended.step + 1

    patch.setattr(Leader, "note_ended", note)


def end_with_who_wanted_more_unsaid(patch: Patch) -> None:
    """A member stops for others' end, and does not say so: they wait for it."""

    def records(member: Member) -> list[Record]:
        return []

    stop = Member._stop_when_others_have_finished

    def stopped(member: Member) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Member, "_records", records)
            stop(member)

    patch.setattr(Member, "_stop_when_others_have_finished", stopped)


MUTATIONS: dict[str, Callable[[Patch], None]] = {
    mutation.__name__: mutation
    for mutation in (
        wait_for_a_lighthouse_for_ever,
        end_alone_before_all_have_finished,
        ask_for_more_than_others_have_finished,
        let_a_newcomer_end_the_job,
        wait_in_the_roster_without_the_state,
        wait_outside_for_another_end,
        forget_word_of_the_end,
        tell_members_nothing_of_my_end,
        wait_for_the_autonomy_when_all_have_finished,
        mark_the_end_where_the_first_word_of_it_says,
        end_with_who_wanted_more_unsaid,
    )
}
