"""Plans the layout in which a slow replica would hold up its job less, or the spare that would replace it.

The planner knows the layouts that launchers offer. It takes for granted that a script cannot build a layout
that it has refused, and that a replica without `fabric launch` keeps its layout.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from fabric.errors import ConfigError
from fabric.health.alarm import SHORT
from fabric.health.detector import ReplicaSpeed
from fabric.health.localise import SLOW, Scope, Slowdown
from fabric.health.planning import ModelCut, Remedy, RemedyKind, ReplicaHealth, StageLayout, propose
from fabric.health.rank_detector import RankDetector
from fabric.model import (
    NOT_LAUNCHED,
    Adaptation,
    LaunchedLayouts,
    Member,
    MemberSpeed,
    Record,
    ReplicaProcess,
    apportion,
)
from fabric.protocol.leader.adaptations import ACT
from fabric.protocol.leader.core import LeaderCore
from fabric.protocol.messages.leader_events import LayoutAdvised, SharesAdvised
from fabric.protocol.rules.assignment import FULL_SPEED, asked_share, objection_to_shares, with_shares
from fabric.runtime.rank_layout import LayoutOrder, RankLayout, parse_layout

# The shares that would help against slow replicas, planned from measured speeds for people and the
# leader.
#
# Shares that a leader has lowered stay until this lighthouse has measured that their replica is well.
# After a fail-over no speed is known, which proves nothing.


REPLAN = 1.25  # a planned speed stays while the measured speed differs by less than this factor
# A layout of one rank and one layer: the computation of shares needs no other detail.
_LAYOUT = StageLayout(((0,),), (1,))
_CUT = ModelCut()

Speeds = dict[ReplicaProcess, int]  # process -> its speed in thousandths


class ShareAdvisor:
    """Plans shares for slow replicas; in the mode ``act`` it returns an order for the leader."""

    def __init__(self) -> None:
        self.advice: Remedy | None = None  # of the newest plan that is not in force
        self._planned: tuple[int, Speeds] | None = None  # the epoch and speeds of the newest plan
        self._ordered: tuple[int, Speeds] | None = None  # the epoch and speeds of the newest order

    def forget(self) -> None:
        """Drop the plan, because the job is complete, or wants none."""
        self.advice = self._planned = self._ordered = None

    def advise(
        self, core: LeaderCore, slow: Mapping[str, Slowdown], speeds: Iterable[ReplicaSpeed], failed: set[str]
    ) -> Remedy | SharesAdvised | None:
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
        is_new = self.advice is not None and (before is None or before.shares != self.advice.shares)
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
            elif process in present:
                # A member that is not called slow is well once it is measured as fast as its equals.
                is_measured = present_speed is not None and present_speed.relative is not None
                if not is_measured or (present_speed and present_speed.speed * SLOW < usual):
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
                "remedy": str(advice.kind),
                "micro_batches": dict(advice.shares),
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


def _counts(roster: Sequence[Member], total: int) -> dict[str, int]:
    """Micro-batches by replica."""
    counts = apportion(total, [member.shares for member in roster])
    return {member.replica: count for member, count in zip(roster, counts, strict=True)}


def _plan(record: Record, wanted: Speeds, total: int) -> Remedy | None:
    """Plan shares by these speeds, if they gain enough."""
    asked = [asked_share(record, member) for member in record.roster]
    adaptation = Adaptation(
        tuple(MemberSpeed(*process, speed) for process, speed in wanted.items()), micro_batches=total
    )
    now = _counts(record.roster, total)
    replicas = tuple(
        ReplicaHealth(
            member.replica,
            _LAYOUT,
            (share * wanted.get(member.process, FULL_SPEED) / FULL_SPEED,),
            now[member.replica],
        )
        for member, share in zip(record.roster, asked, strict=True)
    )
    remedy = next((x for x in propose(total, replicas, _CUT) if x.kind is RemedyKind.SHARES), None)
    if remedy is None:
        return None
    counts = _counts(with_shares(record.roster, asked, adaptation), total)
    return replace(remedy, shares=counts)


LASTING = SHORT  # steps that a replica must have been slow: another layout costs a rejoin


@dataclass(frozen=True, slots=True)
class SlowReplica:
    """A member that has been slow for a while."""

    member: Member
    launched: LaunchedLayouts
    speeds: Mapping[int, float]  # slow rank -> its speed relative to its past; the other ranks have 1
    stages: tuple[int, ...]  # rank -> its pipeline stage; empty: not known
    is_confirmed: bool  # whether a micro-benchmark has shown that its device is slow


class LayoutAdvisor:
    """Plans for the slowest replica; in the mode ``act`` it returns an order for the leader."""

    def __init__(self) -> None:
        self.advice: LayoutAdvised | None = None  # of epoch 0
        self._planned: object = None  # what the newest plan was made from
        self._newest: object = None  # epoch of the newest order (0: advice alone), process and layout

    def forget(self) -> None:
        """Drop the plan, because the job is complete, or wants none."""
        self.advice = self._planned = self._newest = None

    def advise(self, core: LeaderCore, slow: SlowReplica | None) -> LayoutAdvised | None:
        """Plan again where the slow replica or its speeds have changed; return new advice or a new order.

        Advice alone has epoch 0.
        """
        record = core.state.record
        if record is None or slow is None:
            self.forget()
            return None
        peers = core.state.liveness.peers.items()
        waiting = (name for name, peer in peers if peer.connected and peer.session.spare)
        spares = tuple(sorted(name for name in waiting if record.member(name) is None))
        rounded = {rank: round(speed, 1) for rank, speed in slow.speeds.items()}
        basis = record.epoch, replace(slow, speeds=rounded), spares
        if basis == self._planned:
            return None
        self._planned, self.advice = basis, plan_layout(core, record, slow, spares)
        if self.advice is None:
            return None
        advice = replace(self.advice, epoch=record.epoch if core.adaptations.mode == ACT else 0)
        if (newest := (advice.epoch, advice.process, advice.layout)) == self._newest:
            return None
        self._newest = newest
        return advice

    def to_json(self, core: LeaderCore) -> dict[str, Any]:
        """The advice, and the changed layouts, for people."""
        advice, record = self.advice, core.state.record
        return {
            "layout_advice": None
            if advice is None
            else {
                "remedy": advice.remedy,
                "replica": advice.process.replica,
                "layout": advice.layout,
                "gain": round(advice.gain, 4),
                "cost_s": round(advice.cost_s, 2),
                "reason": advice.reason,
                "held": core.adaptations.layouts.held,
            },
            "layouts": [
                {"replica": x.replica, "layout": x.layout, "usual": x.usual, "at": x.at, "reason": x.reason}
                for x in (record.adaptation.layouts if record is not None else ())
            ],
        }


def keep_their_layouts(core: LeaderCore) -> set[str]:
    """The replicas that get no advice: those under a veto, and those in a changed layout."""
    changed = core.state.record.adaptation.layouts if core.state.record is not None else ()
    return {*core.limits.overrides.vetoed, *(x.replica for x in changed)}


def slow_replica(
    core: LeaderCore, slowdown: Slowdown, ranks: RankDetector, confirmed: bool
) -> SlowReplica | None:
    """The planner's view of the slow replica; None if it is not a member."""
    record = core.state.record
    member = record.member(slowdown.replica) if record is not None else None
    if member is None or slowdown.scope not in (Scope.RANK, Scope.STAGE, Scope.REPLICA):
        return None
    peer = core.state.liveness.peers.get(member.replica)
    launched = peer.session.launched if peer is not None else NOT_LAUNCHED
    speeds = ranks.speeds_of(slowdown)
    if not speeds:
        speeds = dict.fromkeys(range(1 + len(member.ranks)), 1.0 / slowdown.factor)
    return SlowReplica(member, launched, speeds, ranks.stages_of(member.replica), confirmed)


def plan_layout(
    core: LeaderCore, record: Record, slow: SlowReplica, spares: tuple[str, ...]
) -> LayoutAdvised | None:
    """The cheapest remedy for ``slow`` beyond shares; None where none gains enough."""
    try:
        layout = parse_layout(slow.launched.layout).over(1 + len(slow.member.ranks))
    except ConfigError:
        return None
    layers, micro_batches = sum(layout.layers) or 1, _micro_batches(core, record)
    usual, cut = _usual(layout, slow), ModelCut()
    if slow.launched.allowed:  # other layers for its stages, or fewer ranks of one stage
        sizes = tuple(sorted({x.ranks for x in _smaller(layout, slow.launched)}))
        cut = ModelCut(sizes, can_repartition=bool(layout.layers))
    counts = apportion(micro_batches, [member.shares for member in record.roster])
    replicas = []
    for member, count in zip(record.roster, counts, strict=True):
        if member is not slow.member:
            replicas.append(_healthy(core, member.replica, layers, count))
            continue
        speeds = tuple(slow.speeds.get(rank, 1.0) for rank in range(layout.ranks))
        replicas.append(ReplicaHealth(member.replica, usual, speeds, count))
    waiting = tuple(_healthy(core, name, layers, 0) for name in spares)
    for remedy in propose(micro_batches, replicas, cut, waiting):
        if remedy.replica == slow.member.replica:
            order = _order(remedy, layout, slow)
            if order is not None:
                x, process = remedy, slow.member.process
                return LayoutAdvised(0, process, order, x.gain, x.cost_s, x.reason, str(x.kind))
    return None


def _order(remedy: Remedy, layout: RankLayout, slow: SlowReplica) -> str | None:
    """The order to the replica's launcher, empty for a drain; None where this remedy is not possible."""
    if remedy.kind is RemedyKind.DRAIN:
        return "" if remedy.joins and slow.is_confirmed else None
    if remedy.layout is None:
        return None
    if remedy.kind is RemedyKind.REPARTITION:
        order = LayoutOrder(replace(layout, layers=remedy.layout.layers))
        return None if str(order) in slow.launched.refused else str(order)
    (chosen,) = remedy.layout.groups
    without = tuple(rank for rank in range(layout.ranks) if rank not in chosen)
    allowed = _smaller(layout, slow.launched)
    return next((str(LayoutOrder(x, without)) for x in allowed if x.ranks == len(chosen)), None)


def _usual(layout: RankLayout, slow: SlowReplica) -> StageLayout:
    """The present layout of the replica. Its ranks' stages are known where it has layers."""
    numbers = sorted(set(slow.stages))
    groups = [tuple(rank for rank, at in enumerate(slow.stages) if at == stage) for stage in numbers]
    if layout.layers and len(groups) == layout.stages:
        return StageLayout(tuple(groups), layout.layers)
    return StageLayout((tuple(range(layout.ranks)),), (sum(layout.layers) or 1,))


def _smaller(layout: RankLayout, launched: LaunchedLayouts) -> list[RankLayout]:
    """The offered layouts of fewer ranks, preferred first; none for a pipeline, which keeps its ranks."""
    if layout.layers:
        return []
    offered = [parse_layout(text) for text in launched.allowed if text not in launched.refused]
    return [x for x in offered if x.ranks < layout.ranks and not x.layers]


def _healthy(core: LeaderCore, name: str, layers: int, micro_batches: int) -> ReplicaHealth:
    """A replica whose ranks all have the usual speed. Without known stages it counts as one stage."""
    peer = core.state.liveness.peers.get(name)
    size = 1 + len(peer.session.ranks) if peer is not None else 1
    usual = StageLayout((tuple(range(size)),), (layers,))
    with contextlib.suppress(ConfigError):
        own = parse_layout(peer.session.launched.layout if peer is not None else "").over(size)
        if sum(own.layers) == layers and own.stages > 1:
            group = size // own.stages
            groups = tuple(tuple(range(first, first + group)) for first in range(0, size, group))
            usual = StageLayout(groups, own.layers)
    return ReplicaHealth(name, usual, (1.0,) * size, micro_batches)


def _micro_batches(core: LeaderCore, record: Record) -> int:
    peers = [core.state.liveness.peers[name] for name in record.names if name in core.state.liveness.peers]
    return max((peer.micro_batches for peer in peers), default=0)
