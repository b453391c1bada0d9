"""Deliberate bugs in ordered layouts: the worlds of ``relayout_worlds`` must notice each."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from sim.faults import Aims

from fabric.model import Adaptation, LayoutChange, Member, Record
from fabric.protocol.leader import adaptations
from fabric.protocol.leader.adaptations import Adaptations, Relayouts
from fabric.protocol.leader.admission import Admission
from fabric.protocol.leader.liveness import Peer
from fabric.protocol.leader.record_writer import RecordWriter
from fabric.protocol.leader.starts import Starts
from fabric.protocol.member.state import CoreContext

Patch = pytest.MonkeyPatch


def forget_the_order_when_the_usual_layout_is_due(patch: Patch) -> None:
    """A replica that dies before it leaves then comes back in the other layout, and no record says so."""

    leave = Relayouts._leave

    def left(
        part: Relayouts, record: Record, member: Member, order: str, after: Adaptation, why: str
    ) -> None:
        kept = tuple(x for x in after.layouts if x.replica != member.replica or not x.ends)
        leave(part, record, member, order, replace(after, layouts=kept), why)

    patch.setattr(Relayouts, "_leave", left)


def wait_for_ever_for_a_member_that_did_not_hear_its_order(patch: Patch) -> None:
    launched = Relayouts._launched

    def left(part: Relayouts, record: Record, change: LayoutChange) -> Any:
        return None if record.lists(*change.process) else launched(part, record, change)

    patch.setattr(Relayouts, "_launched", left)


def believe_that_each_launcher_obeys(patch: Patch) -> None:
    patch.setattr(Relayouts, "_end", lambda part, record: False)


def keep_a_layout_for_ever(patch: Patch) -> None:
    patch.setattr(Relayouts, "_take_back", lambda part, record: False)


def repeat_an_order_to_come_back_at_once(patch: Patch) -> None:
    """A launcher that lacks a device then leaves again as soon as it is back."""
    end_of = Relayouts._end_of

    def due(part: Relayouts, record: Record, change: LayoutChange) -> str:
        return end_of(part, record, change) or ("it is not in its usual layout" if change.ends else "")

    patch.setattr(Relayouts, "_end_of", due)


def order_against_a_veto(patch: Patch) -> None:
    objection = Relayouts._objection

    def allowed(part: Relayouts, *rest: Any) -> str:
        limits = part.job.limits
        overrides, limits.overrides = limits.overrides, replace(limits.overrides, vetoed=())
        why = objection(part, *rest)
        limits.overrides = overrides
        return why

    patch.setattr(Relayouts, "_objection", allowed)


def order_beyond_the_budget(patch: Patch) -> None:
    patch.setattr(Adaptations, "recent_actions", lambda part, record: ())


def order_in_every_mode(patch: Patch) -> None:
    patch.setattr(Adaptations, "mode", adaptations.ACT)


def drain_a_slow_member_without_a_spare(patch: Patch) -> None:
    patch.setattr(Relayouts, "_spare_waits", lambda part, record: True)


def follow_advice_for_an_epoch_that_is_over(patch: Patch) -> None:
    follow = Relayouts._follow

    def late(part: Relayouts, record: Record) -> bool:
        if part.advice is not None and (member := record.member(part.advice.process.replica)) is not None:
            part.advice = replace(part.advice, epoch=record.epoch, process=member.process)
        return follow(part, record)

    patch.setattr(Relayouts, "_follow", late)


def forget_who_leaves_in_a_forced_epoch(patch: Patch) -> None:
    write_epoch = RecordWriter.write_epoch

    def written(
        writer: RecordWriter, record: Record, roster: tuple[Member, ...], *rest: Any, **more: Any
    ) -> None:
        if more.get("forced", rest[0] if rest else False):
            roster = tuple(replace(x, leaving=False, returns="") for x in roster)
        write_epoch(writer, record, roster, *rest, **more)

    patch.setattr(RecordWriter, "write_epoch", written)


def forget_the_layouts_at_a_cold_start(patch: Patch) -> None:
    start = Starts.start

    def forgetful(starts: Starts, record: Record | None) -> None:
        if record is not None:
            record = replace(record, adaptation=replace(record.adaptation, layouts=()))
        start(starts, record)

    patch.setattr(Starts, "start", forgetful)


def admit_a_process_that_is_about_to_end(patch: Patch) -> None:
    """Its session stays open for a while after it has left."""
    is_welcome = Admission.is_welcome

    def forgetful(part: Admission, record: Record, peer: Peer) -> bool:
        part.ending.clear()
        return is_welcome(part, record, peer)

    patch.setattr(Admission, "is_welcome", forgetful)


def leave_for_good_in_spite_of_an_order(patch: Patch) -> None:
    leave = CoreContext.leave

    def drained(context: CoreContext, entry: Member | None) -> None:
        leave(context, entry and replace(entry, returns=""))

    patch.setattr(CoreContext, "leave", drained)


# The ordered member is cut off before it hears the order, and is left out.
CUT_OFF: Aims = (("commit", "slow replica"), ("layout", "cut off"))
# The member dies between the order to come back in its usual layout and its end.
KILLED: Aims = (("commit", "slow replica"), ("layout taken back", "kill trainer"))
ALL_AFTER_AN_ORDER: Aims = (("commit", "slow replica"), ("left for a layout", "kill everybody"))
ANOTHER_DIES: Aims = (("commit", "slow replica"), ("draining", "kill trainer"))
# The ordered replica cannot be started in its usual layout again.
A_DEVICE_IS_LOST: Aims = (("commit", "slow replica"), ("left for a layout", "lose device"))

RELAYOUTS: dict[str, tuple[Callable[[Patch], None], Aims]] = {
    mutation.__name__: (mutation, aims)
    for mutation, aims in (
        (forget_the_order_when_the_usual_layout_is_due, KILLED),
        (wait_for_ever_for_a_member_that_did_not_hear_its_order, CUT_OFF),
        (believe_that_each_launcher_obeys, ()),
        (keep_a_layout_for_ever, ()),
        (repeat_an_order_to_come_back_at_once, A_DEVICE_IS_LOST),
        (order_against_a_veto, ()),
        (order_beyond_the_budget, ()),
        (order_in_every_mode, ()),
        (drain_a_slow_member_without_a_spare, ()),
        (follow_advice_for_an_epoch_that_is_over, ()),
        (forget_who_leaves_in_a_forced_epoch, ANOTHER_DIES),
        (forget_the_layouts_at_a_cold_start, ALL_AFTER_AN_ORDER),
        (admit_a_process_that_is_about_to_end, ()),
        (leave_for_good_in_spite_of_an_order, ()),
    )
}
