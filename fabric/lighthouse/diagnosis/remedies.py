"""Plans what would help against slow replicas: other shares, another layout, or a spare in the place of one.

The planner knows the layouts that launchers offer. It takes for granted that a script cannot build a layout
that it has refused, and that a replica without `fabric launch` keeps its layout.

Shares that a leader has lowered stay until this lighthouse has measured that their replica is well. After a
fail-over no speed is known, which proves nothing.
"""

import contextlib
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from fabric.errors import ConfigError
from fabric.health.alarm import SHORT
from fabric.health.detector import JobDetector, ReplicaSpeed
from fabric.health.localise import SLOW, Scope, Slowdown
from fabric.health.planning import ModelCut, Remedy, RemedyKind, ReplicaHealth, StageLayout, propose
from fabric.model import (
    NOT_LAUNCHED,
    Adaptation,
    LaunchedLayouts,
    Member,
    MemberSpeed,
    Record,
    ReplicaProcess,
    Value,
    apportion,
)
from fabric.protocol.leader.adaptations import ACT
from fabric.protocol.leader.core import LeaderCore
from fabric.protocol.messages.leader_events import LayoutAdvised, SharesAdvised
from fabric.protocol.rules.assignment import FULL_SPEED, asked_share, objection_to_shares, with_shares
from fabric.runtime.rank_layout import LayoutOrder, RankLayout, parse_layout

REPLAN = 1.25  # a planned speed stays while the measured speed differs by less than this factor
LASTING = SHORT  # steps that a replica must have been slow: another layout costs a rejoin
# A layout of one rank and one layer: the computation of shares needs no other detail.
_LAYOUT = StageLayout(((0,),), (1,))

Speeds = dict[ReplicaProcess, int]  # process -> its speed in thousandths
T = TypeVar("T", Remedy, LayoutAdvised)


class SlowReplica(Value):
    """A member that has been slow for a while."""

    member: Member
    launched: LaunchedLayouts
    speeds: Mapping[int, float]  # slow rank -> its speed relative to its past; the other ranks have 1
    stages: tuple[int, ...]  # rank -> its pipeline stage; empty: not known
    is_confirmed: bool  # whether a micro-benchmark has shown that its device is slow


class RemedyPlan(Struct, Generic[T]):
    """The newest plan of one kind of remedy. It is made again when its basis changes, and told once."""

    advice: T | None = None  # what is not in force
    basis: object = None
    _told: object = None

    def is_news(self, key: object) -> bool:
        """Whether advice or an order of this key was not the last one that was told; None tells nothing."""
        before, self._told = self._told, key
        return key is not None and key != before


class RemedyAdvisor:
    """Plans remedies; in the mode ``act`` it has orders for the leader, else advice for people."""

    def __init__(self) -> None:
        self.confirmed: set[str] = set()  # slow replicas whose devices a micro-benchmark has found slow
        self._slow_since: dict[str, int] = {}  # slow replica -> the step at which it was first reported
        self.forget()

    def forget(self) -> None:
        """Drop the plans and orders, because the job is complete, or wants none."""
        self._shares, self._layout = RemedyPlan[Remedy](), RemedyPlan[LayoutAdvised]()
        self._wanted_before = Speeds()  # of the newest look at the shares
        self._orders: dict[type, SharesAdvised | LayoutAdvised] = {}  # the newest of each kind

    def take_order(self) -> SharesAdvised | LayoutAdvised | None:
        """Return the shares that the leader shall write, or the layout that it shall order, once."""
        return self._orders.pop(SharesAdvised, None) or self._orders.pop(LayoutAdvised, None)

    def advise(
        self,
        core: LeaderCore,
        slow: Mapping[str, Slowdown],
        detector: JobDetector,
        failed: set[str],
        step: int,
    ) -> list[tuple[str, str]]:
        """Plan again where the slow replicas or their speeds have changed.

        Return new advice: replica and reason. While a member may have ``failed``, the plans stay.
        ``step``: the newest step.
        """
        record, since = core.state.record, self._slow_since
        self._slow_since = {name: min(since.get(name, step), step) for name in slow}
        self.confirmed &= slow.keys()
        if record is None or failed:
            return []
        news = self._advise_shares(core, record, slow, detector)
        changed = {x.replica for x in record.adaptation.layouts}
        may_change = [
            x
            for name, x in slow.items()
            if x.scope is not Scope.JOB
            and name not in changed
            and name not in core.limits.overrides.vetoed
            and step - self._slow_since[name] >= LASTING
        ]
        slowest = max(may_change, key=lambda x: x.factor, default=None)
        replica = self._slow_replica(core, record, slowest, detector) if slowest is not None else None
        return news + self._advise_layout(core, record, replica)

    # --- shares ---------------------------------------------------------------------------------------------

    def _advise_shares(
        self, core: LeaderCore, record: Record, slow: Mapping[str, Slowdown], detector: JobDetector
    ) -> list[tuple[str, str]]:
        """While the whole job is slow, the plan stays."""
        if any(x.scope is Scope.JOB for x in slow.values()):
            return []
        plan, present = self._shares, {x.process: x.speed for x in record.adaptation.speeds}
        wanted = self._wanted(core, record, slow, {x.replica: x for x in detector.speeds()})
        lowers, total = bool(wanted.items() - present.items()), _micro_batches(core, record)
        if plan.basis != (record.epoch, wanted):
            is_possible = lowers and 1 < len(record.roster) <= total
            plan.basis = record.epoch, wanted
            plan.advice = _plan_shares(record, wanted, total) if is_possible else None
        advice = plan.advice
        if core.adaptations.mode != ACT:
            if plan.is_news(dict(advice.shares) if advice is not None else None) and advice is not None:
                slowest = max(slow.values(), key=lambda x: x.factor, default=None)
                return [(slowest.replica if slowest is not None else "", advice.reason)]
            return []
        may_order = wanted != present and (advice is not None or not lowers)
        if plan.is_news((record.epoch, wanted) if may_order else None):
            well = ", ".join(sorted(name for name, _ in present.keys() - wanted.keys()))
            gain, cost_s, reason = 0.0, 0.0, f"{well} computes as fast as its equals again"
            if advice is not None and lowers:
                gain, cost_s, reason = advice.gain, advice.cost_s, advice.reason
            speeds = _member_speeds(wanted)
            self._orders[SharesAdvised] = SharesAdvised(record.epoch, speeds, gain, cost_s, reason)
        return []

    def _wanted(
        self,
        core: LeaderCore,
        record: Record,
        slow: Mapping[str, Slowdown],
        measured: Mapping[str, ReplicaSpeed],
    ) -> Speeds:
        """The speeds that shares should follow: of the slow members, and of those not known to be well."""
        present = {x.process: x.speed for x in record.adaptation.speeds}
        adapted = slow.keys() | {process.replica for process in present}
        healthy = [x.speed for name, x in measured.items() if name not in adapted]
        usual, wanted = median(healthy) if healthy else 1.0, Speeds()
        for member in record.roster:
            process, measure = member.process, measured.get(member.replica)
            before = present.get(process) or self._wanted_before.get(process)
            if member.replica in core.limits.overrides.vetoed:
                continue
            if member.replica in slow and measure is not None:
                if measure.is_settled:
                    speed = max(1, min(FULL_SPEED - 1, round(FULL_SPEED * measure.speed / usual)))
                    stays = before is not None and 1 / REPLAN <= before / speed <= REPLAN
                    before = before if stays else speed
                wanted |= {process: before} if before is not None else {}
            elif process in present:
                # A member that is not called slow is well once it is measured as fast as its equals.
                is_measured = measure is not None and measure.relative is not None
                if not is_measured or (measure and measure.speed * SLOW < usual):
                    wanted[process] = present[process]
        self._wanted_before = wanted
        return wanted

    # --- layouts --------------------------------------------------------------------------------------------

    def _advise_layout(
        self, core: LeaderCore, record: Record, slow: SlowReplica | None
    ) -> list[tuple[str, str]]:
        if slow is None:
            self._orders.pop(LayoutAdvised, None)
            self._layout = RemedyPlan()
            return []
        peers, plan = core.state.liveness.peers.items(), self._layout
        waiting = (name for name, peer in peers if peer.connected and peer.session.spare)
        spares = tuple(sorted(name for name in waiting if record.member(name) is None))
        rounded = {rank: round(speed, 1) for rank, speed in slow.speeds.items()}
        basis = record.epoch, replace(slow, speeds=rounded), spares
        if basis == plan.basis:
            return []
        plan.basis, plan.advice = basis, plan_layout(core, record, slow, spares)
        if (advice := plan.advice) is None:
            return []
        epoch = record.epoch if core.adaptations.mode == ACT else 0
        if not plan.is_news((epoch, advice.process, advice.layout)):
            return []
        if epoch:
            self._orders[LayoutAdvised] = replace(advice, epoch=epoch)
            return []
        return [(advice.process.replica, advice.reason)]

    def _slow_replica(
        self, core: LeaderCore, record: Record, slowdown: Slowdown, detector: JobDetector
    ) -> SlowReplica | None:
        """The planner's view of the slow replica; None if it is not a member."""
        member = record.member(slowdown.replica)
        if member is None or slowdown.scope not in (Scope.RANK, Scope.STAGE, Scope.REPLICA):
            return None
        peer = core.state.liveness.peers.get(member.replica)
        launched = peer.session.launched if peer is not None else NOT_LAUNCHED
        speeds = detector.speeds_of(slowdown)
        if not speeds:
            speeds = dict.fromkeys(range(1 + len(member.ranks)), 1.0 / slowdown.factor)
        is_confirmed = member.replica in self.confirmed
        return SlowReplica(member, launched, speeds, detector.stages_of(member.replica), is_confirmed)

    # --- for people -----------------------------------------------------------------------------------------

    def to_json(self, core: LeaderCore) -> dict[str, Any]:
        """The advice, and what is in force."""
        record, shares, layout = core.state.record, self._shares.advice, self._layout.advice
        adaptation = record.adaptation if record is not None else Adaptation()
        shown: dict[str, Any] = {
            "advice": None,
            "shares": None,
            "vetoed": list(core.limits.overrides.vetoed),
            "actions_last_hour": len(core.adaptations.recent_actions(record)) if record is not None else 0,
            "layout_advice": None,
            "layouts": [
                {"replica": x.replica, "layout": x.layout, "usual": x.usual, "at": x.at, "reason": x.reason}
                for x in adaptation.layouts
            ],
        }
        if shares is not None:
            why = objection_to_shares(record.sharing) if record is not None else ""
            shown["advice"] = {
                "remedy": str(shares.kind),
                "micro_batches": dict(shares.shares),
                **_worth(shares),
                "held": core.adaptations.held or why,
            }
        if adaptation.speeds and record is not None:
            shown["shares"] = {
                "speeds": {x.replica: x.speed / FULL_SPEED for x in adaptation.speeds},
                "micro_batches": _counts(record.roster, _micro_batches(core, record)),
                **_worth(adaptation),
            }
        if layout is not None:
            shown["layout_advice"] = {
                "remedy": layout.remedy,
                "replica": layout.process.replica,
                "layout": layout.layout,
                **_worth(layout),
                "held": core.relayouts.held,
            }
        return shown


def _worth(x: Remedy | LayoutAdvised | Adaptation) -> dict[str, Any]:
    return {"gain": round(x.gain, 4), "cost_s": round(x.cost_s, 2), "reason": x.reason}


def _member_speeds(speeds: Speeds) -> tuple[MemberSpeed, ...]:
    return tuple(MemberSpeed(*process, speed) for process, speed in speeds.items())


def _counts(roster: Sequence[Member], total: int) -> dict[str, int]:
    """Micro-batches by replica."""
    counts = apportion(total, [member.shares for member in roster])
    return {member.replica: count for member, count in zip(roster, counts, strict=True)}


def _plan_shares(record: Record, wanted: Speeds, total: int) -> Remedy | None:
    """Plan shares by these speeds, if they gain enough."""
    asked = [asked_share(record, member) for member in record.roster]
    now = _counts(record.roster, total)
    replicas = []
    for member, share in zip(record.roster, asked, strict=True):
        speed = share * wanted.get(member.process, FULL_SPEED) / FULL_SPEED
        replicas.append(ReplicaHealth(member.replica, _LAYOUT, (speed,), now[member.replica]))
    for remedy in propose(total, replicas, ModelCut()):
        if remedy.kind is RemedyKind.SHARES:
            adaptation = Adaptation(_member_speeds(wanted), micro_batches=total)
            return replace(remedy, shares=_counts(with_shares(record.roster, asked, adaptation), total))
    return None


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
