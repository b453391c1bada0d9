"""Deliberate protocol bugs: each breaks one rule that might seem needless, and the simulator must notice it.

These changes are missing, because they are harmless, or because only unit tests notice them:

- A member ignores the order to drop a micro-batch: leaders of this version give none.
- ``Finished`` outlives a cold start: the job is then complete (rule 6 of the leader).
- A member that was left out keeps its prepared round: a decision names another digest.
- A member is ready before it is linked, or a newcomer is admitted before it has heard of the epoch: an epoch
  is lost, and no step.
- A newcomer is offered a state of any digest: it compares the digest itself.
- A rank that could not link stays linked, or a fetch of ranks fails with the first rank: time is lost
  (``tests/protocol/test_rank_digests.py``).
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace
from sim import ring
from sim.faults import Aims
from sim.store import Store

from fabric.model import Record
from fabric.protocol.leader import core as leader_core
from fabric.protocol.leader.evictions import RingRebuilder
from fabric.protocol.leader.job_endings import Endings
from fabric.protocol.leader.record_writer import RecordWriter
from fabric.protocol.leader.state import JobState
from fabric.protocol.member.core import MemberCore
from fabric.protocol.member.membership import Membership
from fabric.protocol.member.rounds import Round, Rounds
from fabric.protocol.member.state import Mode
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages import roster_delta
from fabric.protocol.rules import decide as deciding
from fabric.protocol.rules.assignment import assign

Patch = pytest.MonkeyPatch


def commit_before_all_have_voted(patch: Patch) -> None:
    def almost(round_: Round) -> bool:
        return len(round_.votes) >= max(1, len(round_.record.roster) - 1)

    patch.setattr(Round, "complete", almost)


def resume_past_when_any_has_prepared(patch: Patch) -> None:
    witnesses = deciding._witnesses

    def holders(record: Record, reports: Mapping[str, m.Report], step: int) -> dict[str, m.Report]:
        found = witnesses(record, reports, step)
        return {n: x for n, x in found.items() if deciding._prepared(x, record, step)} or found

    patch.setattr(deciding, "_witnesses", holders)


def redo_although_all_have_prepared(patch: Patch) -> None:
    patch.setattr(deciding, "_prepared", lambda report, record, step: False)


def drop_the_prepared_round_on_abort(patch: Patch) -> None:
    abort = Rounds.abort

    def aborted(member: Rounds, why: str, about: str, **more: bool) -> None:
        abort(member, why, about, **more)
        member.prepared = None

    patch.setattr(Rounds, "abort", aborted)


def lose_have_on_abort(patch: Patch) -> None:
    abort = Rounds.abort

    def aborted(member: Rounds, why: str, about: str, **more: bool) -> None:
        abort(member, why, about, **more)
        member._memory.kept_gradient.have.clear()

    patch.setattr(Rounds, "abort", aborted)


def keep_what_was_given_away(patch: Patch) -> None:
    abort = Rounds.abort

    def aborted(member: Rounds, why: str, about: str, **more: bool) -> None:
        config, member._context.config = member._context.config, replace(member._context.config, retain=True)
        abort(member, why, about, **more)
        member._context.config = config

    patch.setattr(Rounds, "abort", aborted)


def commit_a_gradient_that_was_changed_on_its_way(patch: Patch) -> None:
    on_computed = Rounds.on_computed

    def heard(member: Rounds, event: io.Computed) -> None:
        on_computed(member, replace(event, redo=""))

    patch.setattr(Rounds, "on_computed", heard)


def adopt_a_decision_again(patch: Patch) -> None:
    on_resume = Membership.on_resume

    def heard(member: Membership, message: m.Resume) -> None:
        if member._epochs.mode is Mode.RUN and member._epochs.runs(message.fence.epoch):
            member._epochs.mode = Mode.REPORTED
        on_resume(member, message)

    patch.setattr(Membership, "on_resume", heard)


def publish_when_prepared(patch: Patch) -> None:
    to_roster = Rounds.to_roster

    def sent(member: Rounds, message: m.PeerMessage) -> None:
        if isinstance(message, m.CommitVote) and member.prepared is not None:
            member._context.emit(io.Publish(member._memory.state.generation, member.prepared))
        to_roster(member, message)

    patch.setattr(Rounds, "to_roster", sent)


def share_out_what_somebody_has(patch: Patch) -> None:
    redo = deciding._redo

    def forgetful(record: Record, reports: Mapping[str, m.Report], step: int) -> m.Resume:
        return redo(record, {n: replace(x, have=()) for n, x in reports.items()}, step)

    patch.setattr(deciding, "_redo", forgetful)


def announce_before_the_store_has_it(patch: Patch) -> None:
    write = RecordWriter.write

    def written(writer: RecordWriter, record: Record) -> None:
        write(writer, record)
        writer.announce(record, writer.state.record)

    patch.setattr(RecordWriter, "write", written)


def accept_messages_of_older_epochs(patch: Patch) -> None:
    def is_round(member: Rounds, epoch: int, step: int) -> bool:
        return member.round is not None and member.round.step == step and epoch <= member.round.record.epoch

    def heard(member: MemberCore, event: io.FromPeer) -> None:
        message = event.message
        if member.rounds._is_round(message.fence.epoch, message.step):
            member.rounds._collect(event.replica, event.incarnation, message)
        elif member.epochs.current is None or message.fence.epoch >= member.epochs.current.epoch:
            member.epochs.links.keep_early((message.fence.epoch, message.step), event, member.epochs.epoch())
            member.membership.first_data()

    patch.setattr(Rounds, "_is_round", is_round)
    patch.setattr(MemberCore, "on_peer", heard)


def go_on_with_newcomers_alone(patch: Patch) -> None:
    patch.setattr(JobState, "knows", lambda state, member: True)


def forget_the_promise_of_a_report(patch: Patch) -> None:
    hear_of = Membership.hear_of

    def heard(member: Membership, record: Record) -> None:
        """Bug: a member answers a forced epoch, and goes on in the old epoch."""
        newest = member._epochs.newest
        newer = newest is not None and record.fence > newest.fence
        if (
            newer
            and record.is_forced
            and member._epochs.runs(member._epochs.epoch())
            and member._rounds.round is not None
        ):
            mode, round_ = member._epochs.mode, member._rounds.round
            hear_of(member, record)
            if member._epochs.mode.value == "reported":
                member._epochs.mode, member._rounds.round, member._epochs.report = mode, round_, None
        else:
            hear_of(member, record)

    patch.setattr(Membership, "hear_of", heard)


def resume_by_the_maximum_committed(patch: Patch) -> None:
    def decide(record: Record, reports: Mapping[str, m.Report]) -> deciding.Decision:
        valid = {n: x for n, x in reports.items() if x.state_generation == record.generation}
        if record.cold == record.epoch or not valid:
            return deciding._undivided(record, record.base.step, record.roster, reason="cold start")
        newest = max(x.step for x in valid.values())
        return deciding._redo(record, valid, newest)

    patch.setattr(leader_core, "decide", decide)


def count_newcomers_prepared_rounds(patch: Patch) -> None:
    witnesses = deciding._witnesses

    def everybody(record: Record, reports: Mapping[str, m.Report], step: int) -> Mapping[str, m.Report]:
        return {**reports, **witnesses(record, reports, step)} if witnesses(record, reports, step) else {}

    patch.setattr(deciding, "_witnesses", everybody)


def share_by_step_and_roster_alone(patch: Patch) -> None:
    def share(member: Rounds, record: Record) -> tuple[int, ...]:
        shares = assign(range(member._context.identity.micro_batches), record.roster)
        mine = shares.get(member._context.identity.replica, ())
        return tuple(i for i in mine if i not in member._memory.kept_gradient.have)

    patch.setattr(Rounds, "_share", share)


def rebuild_the_report_for_another_leader(patch: Patch) -> None:
    repeat = Membership._repeat_answer

    def repeated(member: Membership) -> None:
        report, prepared = member._epochs.report, member._rounds.prepared
        if (
            report is not None
            and member._epochs.newest is not None
            and report.fence == member._epochs.newest.fence
        ):
            last_round = member._rounds.last_round
            member._epochs.report = replace(
                report,
                step=member._memory.state.step,
                digest=member._memory.state.digest,
                round_epoch=last_round.epoch,
                round_step=last_round.step,
                round_lacked=tuple(set(member._epochs.newest.names) - set(last_round.roster)),
                prepared=prepared is not None
                and (prepared.epoch, prepared.step) == (last_round.epoch, last_round.step),
                have=tuple(sorted(member._memory.kept_gradient.have)),
                committed_digest=member._memory.state.committed_digest,
            )
        repeat(member)

    patch.setattr(Membership, "_repeat_answer", repeated)


def plan_over_an_unresolved_forced_epoch(patch: Patch) -> None:
    patch.setattr(JobState, "is_settled", lambda state, record: not state.epoch.aborted)


def form_no_new_epoch_after_an_abort(patch: Patch) -> None:
    patch.setattr(RingRebuilder, "rebuild", lambda rebuilds, record: False)


def use_the_result_of_an_old_round(patch: Patch) -> None:
    def exchanged(member: Rounds, event: io.Exchanged) -> None:
        if member.round is not None:
            member.round.gradient_digest = event.gradient_digest

    patch.setattr(Rounds, "on_exchanged", exchanged)


def commit_whatever_is_held(patch: Patch) -> None:
    def resume(member: Rounds, decision: m.Resume, newest: Record) -> None:
        prepared, member.prepared = member.prepared, None
        if prepared is not None and member._memory.state.step == prepared.step:
            member.commit(prepared)

    patch.setattr(Rounds, "resume", resume)


def accept_a_lower_epoch(patch: Patch) -> None:
    hear_of = Membership.hear_of

    def heard(member: Membership, record: Record) -> None:
        newest = member._epochs.newest
        if newest is not None and record.fence < newest.fence:
            member._epochs.newest = None
        hear_of(member, record)

    patch.setattr(Membership, "hear_of", heard)


def accept_a_decision_of_a_lower_epoch(patch: Patch) -> None:
    on_resume = Membership.on_resume

    def heard(member: Membership, message: m.Resume) -> None:
        if member._epochs.newest is not None and member._epochs.mode is Mode.REPORTED:
            message = replace(message, fence=member._epochs.newest.fence)
        on_resume(member, message)

    patch.setattr(Membership, "on_resume", heard)


def apply_a_delta_to_another_roster(patch: Patch) -> None:
    def applied(told: m.RosterDelta, known: Record | None) -> Record:
        return replace(
            told.record, roster=roster_delta._merged(known.roster if known is not None else (), told)
        )

    patch.setattr(roster_delta, "applied", applied)


def take_a_change_without_its_joiners(patch: Patch) -> None:
    merged = roster_delta._merged
    patch.setattr(roster_delta, "_merged", lambda roster, told: merged(roster, replace(told, joined=())))
    patch.setattr(Record, "roster_digest", "blind")


def never_ask_for_the_whole_roster(patch: Patch) -> None:
    on_change = Membership.on_change

    def heard(member: Membership, message: m.RosterDelta) -> None:
        on_change(member, message)
        member._context.effects = [x for x in member._context.effects if not is_ask(x)]

    def is_ask(effect: io.Effect) -> bool:
        return isinstance(effect, io.SendLeader) and isinstance(effect.message, m.RequestRoster)

    patch.setattr(Membership, "on_change", heard)


def say_that_the_round_lacked_nobody(patch: Patch) -> None:
    report = Membership._report

    def lacked(member: Membership, record: Record) -> None:
        last_round, member._rounds.last_round = (
            member._rounds.last_round,
            replace(member._rounds.last_round, roster=record.names),
        )
        report(member, record)
        member._rounds.last_round = last_round

    patch.setattr(Membership, "_report", lacked)


def let_a_deposed_leader_write(patch: Patch) -> None:
    patch.setattr(Store, "_leads", lambda store, revision: True)


def commit_whatever_the_digests_say(patch: Patch) -> None:
    patch.setattr(Round, "disagreement", lambda round_: "")


def commit_a_disputed_result(patch: Patch) -> None:
    patch.setattr(Round, "is_disputed", lambda round_, name: False)


def go_on_with_a_state_that_most_called_wrong(patch: Patch) -> None:
    patch.setattr(deciding, "_outvoted", lambda record, reports: None)


def commit_on_its_own_for_too_long(patch: Patch) -> None:
    commit = Rounds.commit_when_agreed

    def agreed(member: Rounds) -> None:
        last, member._session.contact.last = member._session.contact.last, member._context.now
        commit(member)
        member._session.contact.last = last

    patch.setattr(Rounds, "commit_when_agreed", agreed)


def take_a_write_that_is_not_read_back_for_lost(patch: Patch) -> None:
    resolve = RecordWriter.resolve

    def forget(writer: RecordWriter, record: Record | None) -> Record | None:
        own = resolve(writer, record)
        writer.unsettled.clear()
        return own

    patch.setattr(RecordWriter, "resolve", forget)


def complete_when_one_member_has_finished(patch: Patch) -> None:
    def complete(endings: Endings, record: Record) -> bool:
        if endings.finished:
            endings.writer.write_complete(record, max(endings.finished.values()))
        return bool(endings.finished)

    patch.setattr(Endings, "complete", complete)


def leave_before_the_job_is_complete(patch: Patch) -> None:
    handlers = MemberCore._event_handlers

    def hasty(member: MemberCore) -> dict[type, Any]:
        def closing(event: io.Closing) -> None:
            member.session.on_closing(event)
            step = member.memory.state.step
            member.ending.on_complete(m.Complete(member.epochs.fence(), step))

        return {**handlers(member), io.Closing: closing}

    patch.setattr(MemberCore, "_event_handlers", hasty)


def tell_another_leader_nothing_of_the_end(patch: Patch) -> None:
    on_connected = MemberCore.on_connected

    def connected(member: MemberCore, event: io.LeaderConnected) -> None:
        finished, member.session.contact.finished = member.session.contact.finished, False
        on_connected(member, event)
        member.session.contact.finished = finished

    patch.setattr(MemberCore, "on_connected", connected)


def believe_every_chunk(patch: Patch) -> None:
    patch.setattr(ring, "is_intact", lambda payload, digest: True)


# Faults to aim at rare moments, for bugs that show only then.
AT_THE_BARRIER: Aims = (("commit vote", "reset link"), ("resume", "kill host"))
BEFORE_IT_IS_RESOLVED: Aims = (("commit vote", "kill trainer"), ("report", "drain"))
AFTER_A_COMMIT: Aims = (  # one member commits alone and dies with its commit
    ("commit vote", "partition"),
    ("commit vote", "slow network"),
    ("commit vote", "reset link"),
    ("commit", "kill host"),
    ("commit", "kill host"),
)
IN_RECOVERY: Aims = (("commit vote", "reset link"), ("decided", "lighthouse crash"))
LATE_MESSAGES: Aims = (
    ("commit", "one-way partition"),
    ("commit vote", "kill trainer"),
    ("commit vote", "one-way partition"),
)
LONG_ABSENCE: Aims = (("commit", "slow network"), ("commit vote", "long absence"))
BESIDE_A_NEWCOMER: Aims = (  # the heartbeat about the commit is still on its way
    ("commit vote", "kill trainer"),
    ("admitted", "slow network"),
    ("commit beside a newcomer", "kill trainer"),
    ("commit beside a newcomer", "kill trainer"),
)
DEPOSED: Aims = (("commit vote", "crash in a write"), ("commit vote", "kill trainer"))
FLIPPED: Aims = (("commit vote", "flip in a result"), ("install", "flip in a state"))
FLIPPED_AND_LEFT_ALONE: Aims = (
    ("commit vote", "flip in a result"),
    ("abort", "kill two"),
    ("abort", "kill trainer"),
)
OUTVOTED_AND_LEFT_ALONE: Aims = (
    ("commit vote", "flip in a state"),
    ("abort", "kill two"),
    ("abort", "kill trainer"),
)
ON_THE_WIRE: Aims = (("commit vote", "flip on the wire"), ("resume", "flip on the wire"))
OLD_WORDS: Aims = (("commit vote", "reset link"), ("resume", "old words"), ("commit vote", "old words"))
LATE_RESULT: Aims = (("commit", "slow digest"), ("commit vote", "kill trainer"))
# One member misses an epoch, and a later epoch shows the consequence.
MISSED_WORDS: Aims = (
    ("commit vote", "missed word"),
    ("commit vote", "kill trainer"),
    ("decided", "kill trainer"),
)
AT_THE_END: Aims = (("closing", "lighthouse crash"),)
OLD_DECISIONS: Aims = (("commit vote", "reset link"), ("abort", "old words"), ("commit vote", "reset link"))

MUTATIONS: dict[str, tuple[Callable[[Patch], None], Aims]] = {
    mutation.__name__: (mutation, aims)
    for mutation, aims in (
        (commit_before_all_have_voted, AT_THE_BARRIER),
        (resume_past_when_any_has_prepared, AT_THE_BARRIER),
        (redo_although_all_have_prepared, AFTER_A_COMMIT),
        (drop_the_prepared_round_on_abort, AT_THE_BARRIER),
        (lose_have_on_abort, ()),
        (keep_what_was_given_away, ()),
        (commit_a_gradient_that_was_changed_on_its_way, ()),
        (adopt_a_decision_again, IN_RECOVERY),
        (publish_when_prepared, AT_THE_BARRIER),
        (share_out_what_somebody_has, ()),
        (announce_before_the_store_has_it, ()),
        (accept_messages_of_older_epochs, LATE_MESSAGES),
        (go_on_with_newcomers_alone, ()),
        (commit_on_its_own_for_too_long, LONG_ABSENCE),
        (take_a_write_that_is_not_read_back_for_lost, LONG_ABSENCE),
        (forget_the_promise_of_a_report, ()),
        (resume_by_the_maximum_committed, AFTER_A_COMMIT),
        (count_newcomers_prepared_rounds, BESIDE_A_NEWCOMER),
        (share_by_step_and_roster_alone, ()),
        (rebuild_the_report_for_another_leader, IN_RECOVERY),
        (plan_over_an_unresolved_forced_epoch, BEFORE_IT_IS_RESOLVED),
        (form_no_new_epoch_after_an_abort, ()),
        (use_the_result_of_an_old_round, LATE_RESULT),
        (commit_whatever_is_held, AT_THE_BARRIER),
        (accept_a_lower_epoch, OLD_WORDS),
        (accept_a_decision_of_a_lower_epoch, OLD_DECISIONS),
        (apply_a_delta_to_another_roster, MISSED_WORDS),
        (take_a_change_without_its_joiners, ()),
        (never_ask_for_the_whole_roster, MISSED_WORDS),
        (say_that_the_round_lacked_nobody, BESIDE_A_NEWCOMER),
        (let_a_deposed_leader_write, DEPOSED),
        (commit_whatever_the_digests_say, FLIPPED),
        (commit_a_disputed_result, FLIPPED_AND_LEFT_ALONE),
        (go_on_with_a_state_that_most_called_wrong, OUTVOTED_AND_LEFT_ALONE),
        (believe_every_chunk, ON_THE_WIRE),
        (complete_when_one_member_has_finished, ()),
        (leave_before_the_job_is_complete, ()),
        (tell_another_leader_nothing_of_the_end, AT_THE_END),
    )
}
