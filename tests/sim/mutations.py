"""Deliberate protocol bugs. Each breaks one rule that looks as if it could be left out; the simulator must
notice every one of them, else it proves nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from sim.faults import Aims

from fabric.model import Record
from fabric.protocol import decide as deciding
from fabric.protocol import member as member_core
from fabric.protocol import member_io as io
from fabric.protocol import messages as m
from fabric.protocol.leader import Leader
from fabric.protocol.liveness import Liveness
from fabric.protocol.member import Member
from fabric.protocol.member_state import Mode
from fabric.protocol.round import Round

Patch = pytest.MonkeyPatch


def commit_before_everybody_holds(patch: Patch) -> None:
    def almost(round_: Round) -> bool:
        return len(round_.bars) >= max(1, len(round_.record.roster) - 1)

    patch.setattr(Round, "complete", almost)


def resume_past_when_anybody_holds(patch: Patch) -> None:
    witnesses = deciding._witnesses

    def holders(record: Record, reports: Mapping[str, m.Report], step: int) -> dict[str, m.Report]:
        found = witnesses(record, reports, step)
        return {n: x for n, x in found.items() if deciding._holds(x, record, step)} or found

    patch.setattr(deciding, "_witnesses", holders)


def redo_although_everybody_holds(patch: Patch) -> None:
    patch.setattr(deciding, "_holds", lambda report, record, step: False)


def drop_the_hold_on_abort(patch: Patch) -> None:
    abort = Member._abort

    def aborted(member: Member, why: str, about: str) -> None:
        abort(member, why, about)
        member.hold = None

    patch.setattr(Member, "_abort", aborted)


def lose_have_on_abort(patch: Patch) -> None:
    abort = Member._abort

    def aborted(member: Member, why: str, about: str) -> None:
        abort(member, why, about)
        member.kept.have.clear()

    patch.setattr(Member, "_abort", aborted)


def adopt_a_decision_again(patch: Patch) -> None:
    on_resume = Member.on_resume

    def heard(member: Member, message: m.Resume) -> None:
        if member.mode is Mode.RUN and member._runs(message.fence.epoch):
            member.mode = Mode.REPORTED
        on_resume(member, message)

    patch.setitem(member_core._FROM_LEADER, m.Resume, heard)


def publish_when_held(patch: Patch) -> None:
    to_roster = Member._to_roster

    def sent(member: Member, message: m.PeerMessage) -> None:
        if isinstance(message, m.Bar) and member.hold is not None:
            member._do(io.Publish(member.state.generation, member.hold))
        to_roster(member, message)

    patch.setattr(Member, "_to_roster", sent)


def share_out_what_somebody_has(patch: Patch) -> None:
    redo = deciding._redo

    def forgetful(record: Record, reports: Mapping[str, m.Report], step: int, micro_batches: int) -> m.Resume:
        return redo(record, {n: replace(x, have=()) for n, x in reports.items()}, step, micro_batches)

    patch.setattr(deciding, "_redo", forgetful)


def announce_before_the_store_has_it(patch: Patch) -> None:
    write = Leader._write

    def written(leader: Leader, record: Record) -> None:
        write(leader, record)
        leader._announce(record)

    patch.setattr(Leader, "_write", written)


def accept_messages_of_older_epochs(patch: Patch) -> None:
    def is_round(member: Member, epoch: int, step: int) -> bool:
        return member.round is not None and member.round.step == step and epoch <= member.round.record.epoch

    def heard(member: Member, event: io.FromPeer) -> None:
        message = event.message
        if member._is_round(message.fence.epoch, message.step):
            member._collect(event.replica, event.incarnation, message)
        elif member.current is None or message.fence.epoch >= member.current.epoch:
            member.links.keep_early((message.fence.epoch, message.step), event, member._floor())
            member._first_data()

    patch.setattr(Member, "_is_round", is_round)
    patch.setitem(member_core._HANDLERS, io.FromPeer, heard)


def go_on_with_newcomers_alone(patch: Patch) -> None:
    patch.setattr(Leader, "_knows", lambda leader, member: True)


def start_again_without_waiting(patch: Patch) -> None:
    patch.setattr(Liveness, "out_of_contact", lambda *_: True)


def forget_the_promise_of_a_report(patch: Patch) -> None:
    on_epoch = Member.on_epoch

    def heard(member: Member, message: m.Epoch) -> None:
        """Answers a forced epoch, and goes on in the old one."""
        record, newest = message.record, member.newest
        newer = newest is not None and record.fence > newest.fence
        if newer and record.is_forced and member._runs(member._epoch()) and member.round is not None:
            mode, round_ = member.mode, member.round
            on_epoch(member, message)
            if member.mode.value == "reported":
                member.mode, member.round, member.report = mode, round_, None
        else:
            on_epoch(member, message)

    patch.setitem(member_core._FROM_LEADER, m.Epoch, heard)


# What to aim at, for the bugs whose moment is short.
AT_THE_BARRIER: Aims = (("bar", "reset link"), ("resume", "kill host"))
IN_RECOVERY: Aims = (("bar", "reset link"), ("decided", "lighthouse crash"))
LATE_MESSAGES: Aims = (("bar", "one-way partition"), ("bar", "kill trainer"))
OUT_OF_SIGHT: Aims = (("bar", "kill trainer"), ("install", "cut control"))

MUTATIONS: dict[str, tuple[Callable[[Patch], None], Aims]] = {
    mutation.__name__: (mutation, aims)
    for mutation, aims in (
        (commit_before_everybody_holds, ()),
        (resume_past_when_anybody_holds, AT_THE_BARRIER),
        (redo_although_everybody_holds, AT_THE_BARRIER),
        (drop_the_hold_on_abort, AT_THE_BARRIER),
        (lose_have_on_abort, ()),
        (adopt_a_decision_again, IN_RECOVERY),
        (publish_when_held, ()),
        (share_out_what_somebody_has, ()),
        (announce_before_the_store_has_it, ()),
        (accept_messages_of_older_epochs, LATE_MESSAGES),
        (go_on_with_newcomers_alone, ()),
        (start_again_without_waiting, OUT_OF_SIGHT),
        (forget_the_promise_of_a_report, ()),
    )
}
