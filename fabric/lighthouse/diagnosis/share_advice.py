"""The shares that would help against slow replicas, planned from measured speeds for people and the leader.

Shares that a leader has lowered stay until this lighthouse has measured that their replica is well. After a
fail-over no speed is known, which proves nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fabric.health.detector import ReplicaSpeed
from fabric.health.localise import SLOW, Scope, Slowdown
from fabric.health.planning.layout import ModelCut, ReplicaHealth, StageLayout
from fabric.health.planning.remedies import ActionRules, JobHealth, RemedyKind, propose
from fabric.model import Adaptation, Member, MemberSpeed, Record, ReplicaProcess, apportion
from fabric.protocol.leader.adaptations import ACT
from fabric.protocol.leader.core import LeaderCore
from fabric.protocol.messages.leader_events import SharesAdvised
from fabric.protocol.rules.shares import FULL_SPEED, asked_share, objection_to_shares, with_shares

REPLAN = 1.25  # a planned speed stays while the measured speed differs by less than this factor
# A layout of one rank and one layer: the computation of shares needs no other detail.
_LAYOUT = StageLayout(((0,),), (1,))
_CUT = ModelCut(1, can_repartition=False, can_resize=False)

Speeds = dict[ReplicaProcess, int]  # process -> its speed in thousandths


@dataclass(frozen=True, slots=True)
class Advice:
    """The shares that would help, and why."""

    micro_batches: Mapping[str, int]  # micro-batches of the whole step, by replica
    gain: float  # gain of throughput, as a share
    cost_s: float  # time that the job loses by the change
    reason: str


class ShareAdvisor:
    """Plans shares for slow replicas; in the mode ``act`` it returns an order for the leader."""

    def __init__(self) -> None:
        self.advice: Advice | None = None  # of the newest plan that is not in force
        self._planned: tuple[int, Speeds] | None = None  # the epoch and speeds of the newest plan
        self._ordered: tuple[int, Speeds] | None = None  # the epoch and speeds of the newest order

    def forget(self) -> None:
        """Drop the plan, because the job is complete, or wants none."""
        self.advice = self._planned = self._ordered = None

    def advise(
        self,
        core: LeaderCore,
        slow: Mapping[str, Slowdown],
        speeds: Iterable[ReplicaSpeed],
        failed: set[str],
    ) -> Advice | SharesAdvised | None:
        """Plan again where the slow replicas or their speeds have changed; return new advice or a new order.

        While a member may have ``failed``, or the whole job is slow, the plan stays.
        """
        record = core.state.record
        if record is None or failed or any(x.scope is Scope.JOB for x in slow.values()):
            return None
        measured = {x.replica: x for x in speeds}
        wanted = self._wanted(core, record, slow, measured)
        before, total = self.advice, _micro_batches(core, record)
        if self._planned != (record.epoch, wanted):
            self._planned = record.epoch, wanted
            self.advice = None
            present = {x.process: x.speed for x in record.adaptation.speeds}
            if wanted.items() - present.items() and 1 < len(record.roster) <= total:
                self.advice = _plan(record, wanted, total)
        if core.adaptations.mode == ACT:
            return self._new_order(record, wanted)
        is_new = self.advice is not None and (
            before is None or before.micro_batches != self.advice.micro_batches
        )
        return self.advice if is_new else None

    def _wanted(
        self,
        core: LeaderCore,
        record: Record,
        slow: Mapping[str, Slowdown],
        measured: Mapping[str, ReplicaSpeed],
    ) -> Speeds:
        """The speeds that shares should follow: of the slow members, and of those not known to be well."""
        present = {x.process: x.speed for x in record.adaptation.speeds}
        earlier = self._planned[1] if self._planned is not None else {}
        adapted = slow.keys() | {process.replica for process in present}
        healthy = [x.speed for name, x in measured.items() if name not in adapted]
        usual, wanted = median(healthy) if healthy else 1.0, Speeds()
        for member in record.roster:
            process, present_speed = member.process, measured.get(member.replica)
            before = present.get(process) or earlier.get(process)
            if member.replica in core.limits.overrides.vetoed:
                continue
            if member.replica in slow and present_speed is not None:
                if not present_speed.is_settled:
                    wanted |= {process: before} if before is not None else {}
                    continue
                speed = max(1, min(FULL_SPEED - 1, round(FULL_SPEED * present_speed.speed / usual)))
                stays = before is not None and 1 / REPLAN <= before / speed <= REPLAN
                wanted[process] = before if stays and before is not None else speed
            elif process in present and not _is_well(present_speed, usual):
                wanted[process] = present[process]
        return wanted

    def _new_order(self, record: Record, wanted: Speeds) -> SharesAdvised | None:
        present = {x.process: x.speed for x in record.adaptation.speeds}
        lowers = bool(wanted.items() - present.items())
        if wanted == present or self._ordered == (record.epoch, wanted) or (lowers and self.advice is None):
            return None
        self._ordered = record.epoch, wanted
        advice = self.advice if lowers else None
        well = ", ".join(sorted(name for name, _ in present.keys() - wanted.keys()))
        return SharesAdvised(
            epoch=record.epoch,
            speeds=tuple(MemberSpeed(*process, speed) for process, speed in wanted.items()),
            gain=advice.gain if advice is not None else 0.0,
            cost_s=advice.cost_s if advice is not None else 0.0,
            reason=advice.reason if advice is not None else f"{well} computes as fast as its equals again",
        )

    def to_json(self, core: LeaderCore) -> dict[str, Any]:
        """The advice, and the shares in force, for people."""
        advice, record = self.advice, core.state.record
        adaptation = record.adaptation if record is not None else Adaptation()
        why = objection_to_shares(record.sharing) if record is not None else ""
        return {
            "advice": None
            if advice is None
            else {
                "remedy": "shares",
                "micro_batches": dict(advice.micro_batches),
                "gain": round(advice.gain, 4),
                "cost_s": advice.cost_s,
                "reason": advice.reason,
                "held": core.adaptations.held or why,
            },
            "shares": None
            if not adaptation.speeds or record is None
            else {
                "speeds": {x.replica: x.speed / FULL_SPEED for x in adaptation.speeds},
                "micro_batches": _counts(record.roster, _micro_batches(core, record)),
                "gain": round(adaptation.gain, 4),
                "cost_s": adaptation.cost_s,
                "reason": adaptation.reason,
            },
            "vetoed": list(core.limits.overrides.vetoed),
            "actions_last_hour": len(core.adaptations.recent_actions(record)) if record is not None else 0,
        }


def _is_well(measured: ReplicaSpeed | None, usual: float) -> bool:
    """Whether a member that is not called slow is measured as fast as its equals."""
    return measured is not None and measured.relative is not None and measured.speed * SLOW >= usual


def _micro_batches(core: LeaderCore, record: Record) -> int:
    peers = [core.state.liveness.peers[name] for name in record.names if name in core.state.liveness.peers]
    return max((peer.micro_batches for peer in peers), default=0)


def _counts(roster: Sequence[Member], total: int) -> dict[str, int]:
    """Micro-batches by replica."""
    counts = apportion(total, [member.shares for member in roster])
    return {member.replica: count for member, count in zip(roster, counts, strict=True)}


def _plan(record: Record, wanted: Speeds, total: int) -> Advice | None:
    """Plan shares by these speeds, if they gain enough."""
    asked = [asked_share(record, member) for member in record.roster]
    adaptation = Adaptation(
        tuple(MemberSpeed(*process, speed) for process, speed in wanted.items()), micro_batches=total
    )
    now = _counts(record.roster, total)
    replicas = tuple(
        ReplicaHealth(
            member.replica,
            member.incarnation,
            _LAYOUT,
            (share * wanted.get(member.process, FULL_SPEED) / FULL_SPEED,),
            now[member.replica],
        )
        for member, share in zip(record.roster, asked, strict=True)
    )
    remedies = propose(JobHealth(total, replicas, _CUT), ActionRules())
    remedy = next((x for x in remedies if x.kind is RemedyKind.SHARES and not x.undoes), None)
    if remedy is None:
        return None
    counts = _counts(with_shares(record.roster, asked, adaptation), total)
    return Advice(counts, remedy.gain, remedy.cost_s, remedy.reason)
