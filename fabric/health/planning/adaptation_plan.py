"""The content of a plan of adaptation, and the rule that says which plan is in force when two planners write.

A plan is adopted with all its entries or refused with one sentence. Versions grow by one. So when two
planners start from the same plan, the later writer is refused and plans again from the stored record.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fabric.health.planning.layout import StageLayout


@dataclass(frozen=True, slots=True)
class LayerMove:
    """One layer that moves to another stage of the same replica."""

    layer: int
    source: int  # number of the stage that gives the layer
    target: int  # number of the stage that gets the layer


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One replica's part of a plan."""

    replica: str
    incarnation: int  # when the plan was made; 0: the replica was away, and its next start takes the layout
    layout: StageLayout
    micro_batches: int  # number of micro-batches per step
    standbys: tuple[int, ...] = ()  # living ranks that do not compute
    moves: tuple[LayerMove, ...] = ()
    rejoins: bool = False  # whether the replica leaves and comes back in this layout
    donors: tuple[str, ...] = ()  # replicas that have its state; empty with ``rejoins``: last checkpoint


@dataclass(frozen=True, slots=True)
class AdaptationPlan:
    """Layouts and micro-batches of all replicas, in force from one step boundary on."""

    version: int
    replicas: tuple[ReplicaPlan, ...]
    leaves: str = ""  # the replica that a drain takes out
    joins: str = ""  # the spare that takes the drained replica's place

    @property
    def micro_batches(self) -> int:
        return sum(entry.micro_batches for entry in self.replicas)

    def of(self, replica: str) -> ReplicaPlan | None:
        """The entry of one replica, None where the plan leaves it out."""
        return next((entry for entry in self.replicas if entry.replica == replica), None)


@dataclass(frozen=True, slots=True)
class Adoption:
    """The outcome of an attempt to adopt a plan."""

    in_force: AdaptationPlan | None
    refusal: str = ""  # the reason of a refusal in one sentence; empty: the plan was adopted


def adopt(
    in_force: AdaptationPlan | None,
    proposed: AdaptationPlan,
    roster: Mapping[str, int],
    spares: Mapping[str, int],
    micro_batches: int,
) -> Adoption:
    """Take ``proposed`` whole, or keep ``in_force`` and say why.

    ``roster`` and ``spares``: replica -> incarnation. ``micro_batches``: of the global batch.
    """
    refusal = (
        _version_refusal(in_force.version if in_force else 0, proposed)
        or _roster_refusal(proposed, roster, spares)
        or _donor_refusal(proposed, roster)
    )
    if not refusal and proposed.micro_batches != micro_batches:
        refusal = (
            f"plan {proposed.version} gives out {proposed.micro_batches} micro-batches, and the global batch"
            f" has {micro_batches}: plan again"
        )
    return Adoption(in_force, refusal) if refusal else Adoption(proposed)


def _version_refusal(version: int, plan: AdaptationPlan) -> str:
    if plan.version == version + 1:
        return ""
    return f"plan {plan.version} does not follow plan {version}, which is in force: plan again from it"


def _roster_refusal(plan: AdaptationPlan, roster: Mapping[str, int], spares: Mapping[str, int]) -> str:
    """Why the entries do not fit the replicas of the job."""
    names = [entry.replica for entry in plan.replicas]
    if len(set(names)) != len(names):
        return f"plan {plan.version} names a replica twice: plan again"
    if plan.joins and plan.joins not in spares:
        return f"plan {plan.version} needs the spare {plan.joins}, which is gone: plan again"
    there = {**roster, **spares}
    for entry in plan.replicas:
        if entry.incarnation != there.get(entry.replica, 0):
            return (
                f"plan {plan.version} is for incarnation {entry.incarnation} of replica {entry.replica},"
                f" and {there.get(entry.replica, 0)} is there now: plan again"
            )
    left_out = sorted(roster.keys() - {*names, plan.leaves})
    return f"plan {plan.version} leaves out replica {left_out[0]}: plan again with it" if left_out else ""


def _donor_refusal(plan: AdaptationPlan, roster: Mapping[str, int]) -> str:
    for entry in plan.replicas:
        if entry.donors and not any(donor in roster for donor in entry.donors):
            return f"all donors of replica {entry.replica} in plan {plan.version} are gone: plan again"
    return ""


def layer_moves(before: StageLayout, after: StageLayout) -> tuple[LayerMove, ...]:
    """The layers that change their stage; a stage is numbered within its own layout."""
    stages = zip(_stage_of(before.layers), _stage_of(after.layers), strict=False)
    return tuple(LayerMove(layer, old, new) for layer, (old, new) in enumerate(stages) if old != new)


def _stage_of(layers: Iterable[int]) -> list[int]:
    return [stage for stage, count in enumerate(layers) for _ in range(count)]
