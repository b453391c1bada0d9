"""Deliberate bugs in unequal shares: the worlds of ``adapt_worlds`` must notice each."""

from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace
from sim.faults import Aims

from fabric.model import Adaptation, Member, MemberSpeed, Record
from fabric.protocol.leader import adaptations, record_writer
from fabric.protocol.leader.adaptations import Adaptations
from fabric.protocol.leader.starts import Starts
from fabric.protocol.messages import leader_events as io
from fabric.protocol.rules import assignment

Patch = pytest.MonkeyPatch


def change_shares_within_an_epoch(patch: Patch) -> None:
    """Change the shares within an epoch: members then work by the old shares, and the decision's table by the
    new ones.
    """

    def written(part: Adaptations, record: Record, adaptation: Adaptation, why: str) -> None:
        asked = [part.writer.asked(record, x) for x in record.roster]
        roster = assignment.with_shares(record.roster, asked, adaptation)
        part.writer.write(replace(record, roster=roster, adaptation=adaptation))

    patch.setattr(Adaptations, "_write", written)


def give_newcomers_the_share_that_they_asked_for(patch: Patch) -> None:
    with_shares = assignment.with_shares

    def mixed(roster: Sequence[Member], asked: Sequence[int], adaptation: Adaptation) -> tuple[Member, ...]:
        given = with_shares(roster, asked, adaptation)
        return tuple(
            replace(x, shares=share) if x.joining else x for x, share in zip(given, asked, strict=True)
        )

    patch.setattr(record_writer, "with_shares", mixed)


def keep_the_speed_of_a_process_that_is_gone(patch: Patch) -> None:
    patch.setattr(record_writer, "for_roster", lambda adaptation, roster: adaptation)


def leave_a_slow_member_without_work(patch: Patch) -> None:
    def proportional(
        roster: Sequence[Member], asked: Sequence[int], adaptation: Adaptation
    ) -> tuple[Member, ...]:
        return assignment.with_shares(roster, asked, replace(adaptation, micro_batches=10**6))

    patch.setattr(record_writer, "with_shares", proportional)


def follow_advice_for_an_epoch_that_is_over(patch: Patch) -> None:
    follow = Adaptations._follow

    def late(part: Adaptations, record: Record) -> bool:
        if part.advice is not None:
            listed = {x.process for x in record.roster}
            fitting = tuple(x for x in part.advice.speeds if x.process in listed)
            part.advice = replace(part.advice, epoch=record.epoch, speeds=fitting)
        return follow(part, record)

    patch.setattr(Adaptations, "_follow", late)


def act_in_every_mode(patch: Patch) -> None:
    patch.setattr(Adaptations, "mode", adaptations.ACT)


def act_against_a_veto(patch: Patch) -> None:
    objection = Adaptations._objection

    def allowed(part: Adaptations, record: Record, speeds: tuple[MemberSpeed, ...], recent: int) -> str:
        why = objection(part, record, speeds, recent)
        return "" if "veto" in why else why

    patch.setattr(Adaptations, "_objection", allowed)


def act_beyond_the_budget(patch: Patch) -> None:
    patch.setattr(Adaptations, "recent_actions", lambda part, record: ())


def forget_the_actions_of_the_last_leader(patch: Patch) -> None:
    recent_actions = Adaptations.recent_actions
    first: dict[Adaptations, tuple[float, ...]] = {}  # leader -> the actions that it found in the record

    def own(part: Adaptations, record: Record) -> tuple[float, ...]:
        found = first.setdefault(part, record.adaptation.acted)
        return tuple(at for at in recent_actions(part, record) if at not in found)

    patch.setattr(Adaptations, "recent_actions", own)


def forget_the_actions_at_a_cold_start(patch: Patch) -> None:
    start = Starts.start

    def forgetful(starts: Starts, record: Record | None) -> None:
        if record is not None:
            record = replace(record, adaptation=Adaptation())
        start(starts, record)

    patch.setattr(Starts, "start", forgetful)


def give_shares_back_without_advice(patch: Patch) -> None:
    """The detector of the next leader knows no speeds yet, which proves nothing."""
    follow = Adaptations._follow

    def undone(part: Adaptations, record: Record) -> bool:
        if part.advice is None and record.adaptation.speeds:
            part.advice = io.SharesAdvised(record.epoch, (), 0.0, 0.0, "no slow member is known")
        return follow(part, record)

    patch.setattr(Adaptations, "_follow", undone)


def never_give_shares_back(patch: Patch) -> None:
    follow = Adaptations._follow

    def lowering(part: Adaptations, record: Record) -> bool:
        kept = part.advice is None or set(part.advice.speeds) != set()
        return kept and follow(part, record)

    patch.setattr(Adaptations, "_follow", lowering)


def keep_lower_shares_when_switched_off(patch: Patch) -> None:
    patch.setattr(Adaptations, "_take_back", lambda part, record: False)


# A leader that lowered shares dies, and the next one sees slow replicas again.
AFTER_AN_ACTION: Aims = (
    ("commit", "slow replica"),
    ("commit", "slow replica"),
    ("commit", "lighthouse crash"),
    ("commit", "lighthouse crash"),
)
# All die once shares were lowered.
ALL_AFTER_AN_ACTION: Aims = (
    ("commit", "slow replica"),
    ("shares", "kill everybody"),
    ("cold start", "slow replica"),
)

SHARES: dict[str, tuple[Callable[[Patch], None], Aims]] = {
    mutation.__name__: (mutation, aims)
    for mutation, aims in (
        (change_shares_within_an_epoch, ()),
        (give_newcomers_the_share_that_they_asked_for, ()),
        (keep_the_speed_of_a_process_that_is_gone, ()),
        (leave_a_slow_member_without_work, ()),
        (follow_advice_for_an_epoch_that_is_over, ()),
        (act_in_every_mode, ()),
        (act_against_a_veto, ()),
        (act_beyond_the_budget, ()),
        (forget_the_actions_of_the_last_leader, AFTER_AN_ACTION),
        (forget_the_actions_at_a_cold_start, ALL_AFTER_AN_ACTION),
        (give_shares_back_without_advice, ()),
        (never_give_shares_back, ()),
        (keep_lower_shares_when_switched_off, ()),
    )
}
