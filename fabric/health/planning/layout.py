"""One replica's layout of ranks: which ranks work at which stage, how many layers each stage has, how fast
it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fabric.health.planning.partition import (
    GroupChoice,
    check_speeds,
    cut_layers,
    select_group,
)


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The stages of one replica. A replica without a pipeline has one stage."""

    groups: tuple[tuple[int, ...], ...]  # stage -> the ranks that work there
    layers: tuple[int, ...]  # stage -> its layers

    def __post_init__(self) -> None:
        ranks = [rank for group in self.groups for rank in group]
        if not self.groups or not all(self.groups) or len(set(ranks)) != len(ranks):
            raise ValueError("a stage has no rank, or a rank is at two stages: give each rank one stage")
        if len(self.layers) != len(self.groups) or min(self.layers) < 1:
            raise ValueError(f"{len(self.groups)} stages have the layers {self.layers}: give each at least 1")

    @property
    def stages(self) -> int:
        return len(self.groups)

    def stage_speeds(self, speeds: Sequence[float]) -> tuple[float, ...]:
        """Stage -> k times its slowest rank's speed; 0 where a rank is dead."""
        return tuple(len(group) * min(speeds[rank] for rank in group) for group in self.groups)

    def stage_times(self, speeds: Sequence[float]) -> tuple[float, ...]:
        """Stage -> the time of a micro-batch, l_s / v_s; inf where a rank is dead."""
        stages = zip(self.layers, self.stage_speeds(speeds), strict=True)
        return tuple(layers / speed if speed > 0 else math.inf for layers, speed in stages)

    def slowest_stage(self, speeds: Sequence[float]) -> float:
        """The time of a micro-batch at the slowest stage."""
        return max(self.stage_times(speeds))

    def step_time(self, micro_batches: int, speeds: Sequence[float]) -> float:
        """The time of a step: one micro-batch goes through all stages, the others follow the slowest stage.

        For equal stages this is the makespan of 1F1B, for unequal ones an upper bound of it.
        """
        if micro_batches == 0:
            return 0.0
        times = self.stage_times(speeds)
        return math.fsum(times) + (micro_batches - 1) * max(times)


@dataclass(frozen=True, slots=True)
class ModelCut:
    """The layouts into which the script can cut the model."""

    layers: int
    sizes: tuple[int, ...] = ()  # allowed ranks of a stage
    most_layers: int = 0  # layers that fit into the memory of a stage; 0: no limit
    can_repartition: bool = True  # whether the script can build other splits of the layers
    can_resize: bool = True  # whether the script can build groups of other sizes

    def __post_init__(self) -> None:
        if self.layers < 1 or self.most_layers < 0:
            raise ValueError("a model has at least 1 layer and no negative size: mend its description")

    def allows(self, ranks: int) -> tuple[int, ...]:
        """The sizes of a group of up to ``ranks`` ranks."""
        return tuple(k for k in self.sizes if k <= ranks)


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """The planner's knowledge of one replica: its layout and its measured speeds."""

    replica: str
    incarnation: int  # 0: the replica is away
    layout: StageLayout  # the layout in force, which is the usual one: another one gets no advice
    speeds: tuple[float, ...]  # rank -> throughput relative to a healthy rank; 0: dead
    micro_batches: int  # micro-batches per step at present

    @property
    def present(self) -> bool:
        """Whether the replica takes part in steps: it is there, and no rank that it needs is dead."""
        return self.incarnation > 0 and math.isfinite(self.layout.slowest_stage(self.speeds))

    def check(self, layers: int) -> None:
        """Raise ValueError for values that are not speeds, and where speeds, layers and layouts do not
        fit."""
        if sum(self.layout.layers) != layers:
            raise ValueError(
                f"replica {self.replica} has {sum(self.layout.layers)} layers and the model {layers}:"
                " give each layer one stage"
            )
        ranks = {rank for group in self.layout.groups for rank in group}
        if ranks and not 0 <= min(ranks) <= max(ranks) < len(self.speeds):
            raise ValueError(f"replica {self.replica} has {len(self.speeds)} speeds for rank {max(ranks)}")
        try:
            check_speeds(self.speeds, "rank")
        except ValueError as error:
            raise ValueError(f"replica {self.replica}: {error}") from None


def resplit(layout: StageLayout, speeds: Sequence[float], cut: ModelCut) -> StageLayout:
    """The same groups with the layers cut to their speeds; stages with a dead rank are left out."""
    alive = [group for group in layout.groups if min(speeds[rank] for rank in group) > 0]
    if not alive:
        raise ValueError("all stages have a dead rank: wait for a machine")
    stage_speeds = [len(group) * min(speeds[rank] for rank in group) for group in alive]
    return StageLayout(tuple(alive), cut_layers(cut.layers, stage_speeds, cut.most_layers))


def exclude(layout: StageLayout, speeds: Sequence[float], cut: ModelCut) -> StageLayout:
    """For each stage the fastest group that the model allows, with the layers cut to the groups' speeds.

    A stage without a group that the model allows is left out, and the other stages take its layers. Raises
    ValueError where no stage is left, or the rest cannot hold the layers.
    """
    choices: list[GroupChoice] = []
    for group in layout.groups:
        living = sum(speeds[rank] > 0 for rank in group)
        sizes = {*cut.allows(living), *([len(group)] if living == len(group) else [])}
        if sizes:
            choices.append(select_group({rank: speeds[rank] for rank in group}, sizes))
    if not choices:
        raise ValueError("no stage has a group of living ranks that the model allows: wait for a machine")
    if not cut.can_repartition and len(choices) < layout.stages:
        raise ValueError(
            "a stage has no living group and the script cannot move its layers: wait for a machine"
        )
    layers = layout.layers
    if cut.can_repartition:
        layers = cut_layers(cut.layers, [choice.speed for choice in choices], cut.most_layers)
    return StageLayout(tuple(choice.ranks for choice in choices), layers)
