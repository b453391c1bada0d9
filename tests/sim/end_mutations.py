"""Deliberate bugs in the end of a job; the worlds of ``end_worlds`` must notice each bug."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from fabric.model import JobEnd, Record
from fabric.protocol.leader.job_endings import Endings
from fabric.protocol.member.ending import Ending
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m

Patch = pytest.MonkeyPatch


def wait_for_a_lighthouse_for_ever(patch: Patch) -> None:
    patch.setattr(Ending, "_end_alone_when_due", lambda member: None)
    patch.setattr(Ending, "end_deadline", lambda member: None)


def wait_for_the_autonomy_when_all_have_finished(patch: Patch) -> None:
    patch.setattr(Ending, "_have_all_finished", lambda member, record: False)


def end_alone_before_all_have_finished(patch: Patch) -> None:
    patch.setattr(Ending, "_have_all_finished", lambda member, record: True)


def ask_for_more_than_others_have_finished(patch: Patch) -> None:
    patch.setattr(Ending, "_stop_when_others_have_finished", lambda member: None)


def let_a_newcomer_end_the_job(patch: Patch) -> None:
    patch.setattr(Ending, "_takes_part", lambda ending: ending._epochs.current is not None)


def wait_in_the_roster_without_the_state(patch: Patch) -> None:
    patch.setattr(Ending, "_stop_when_left_behind", lambda member: None)


def wait_outside_for_another_end(patch: Patch) -> None:
    patch.setattr(Endings, "refuse_early_ends", lambda endings, record: None)
    end_with_any_state(patch)


def end_with_any_state(patch: Patch) -> None:
    def complete(member: Ending, message: m.Complete) -> None:
        member._context.emit(io.Finish(message.step))
        member._context.stopped = True

    patch.setattr(Ending, "on_complete", complete)


def forget_word_of_the_end(patch: Patch) -> None:
    patch.setattr(Endings, "note_ended", lambda endings, replica, ended: None)


def tell_members_nothing_of_my_end(patch: Patch) -> None:
    patch.setattr(Ending, "_tell_members", lambda member, why="": None)


def mark_the_end_where_the_first_word_of_it_says(patch: Patch) -> None:
    def note(endings: Endings, _: str, ended: JobEnd | None) -> None:
        if ended is not None and endings.state.record is not None:
            endings.end_step = ended.step + 1

    patch.setattr(Endings, "note_ended", note)


def end_with_who_wanted_more_unsaid(patch: Patch) -> None:
    """Bug: a member stops because another member has finished, but does not send Finished."""

    def records(member: Ending) -> list[Record]:
        return []

    stop = Ending._stop_when_others_have_finished

    def stopped(member: Ending) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Ending, "_records", records)
            stop(member)

    patch.setattr(Ending, "_stop_when_others_have_finished", stopped)


def wait_for_the_state_of_a_newcomer(patch: Patch) -> None:
    """Bug: at the end all wait for a newcomer in a blocking join as for one that replays."""
    complete = Endings.complete

    def completed(endings: Endings, record: Record) -> bool:
        roster = tuple(replace(x, blocking_join=False) for x in record.roster)
        return complete(endings, replace(record, roster=roster))

    patch.setattr(Endings, "complete", completed)


def wait_alone_for_the_state_of_a_newcomer(patch: Patch) -> None:
    """Bug: without a lighthouse all wait for the end of a newcomer that never got its state."""
    patch.setattr(Ending, "_with_state", lambda ending, record: list(record.roster))


MUTATIONS_OF_LATE: dict[str, Callable[[Patch], None]] = {
    mutation.__name__: mutation
    for mutation in (wait_for_the_state_of_a_newcomer, wait_alone_for_the_state_of_a_newcomer)
}
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
