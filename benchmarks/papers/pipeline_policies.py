"""Policies for replicas of pipelines: what a step costs under each while some devices are dead or slow.

A policy gets the devices' speeds and returns the length of a step; `pipeline_runs` plays failures over time.
ReCycle and Oobleck follow the short descriptions in their papers; docstrings state the rules that we added.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from fabric.health.planning import cut_layers, micro_batch_shares, select_group
from papers.pipelines import Grid, Owners, StepWork, at_home, migrated, rerouted, step_time

_MOST_RANKS = 1 << 12  # of a group


@dataclass(frozen=True, slots=True)
class GroupedModel:
    """The layouts into which a model can be cut. Unlike the planner's, a pipeline may change its groups."""

    layers: int
    sizes: tuple[int, ...]  # allowed ranks of a stage
    most_layers: int = 0  # layers that fit into the memory of a stage; 0: no limit
    can_repartition: bool = True  # whether stages may have other numbers of layers

    def __post_init__(self) -> None:
        if self.layers < 1 or self.most_layers < 0:
            raise ValueError("a model has at least 1 layer and no negative size: mend its description")

    def group(self, speeds: list[float]) -> tuple[int, ...]:
        """The best ranks of a stage whose ranks have these speeds (0: dead); empty where none is allowed."""
        living = [rank for rank, speed in enumerate(speeds) if speed > 0]
        sizes = {k for k in self.sizes if k <= len(living)}
        sizes |= {len(speeds)} if len(living) == len(speeds) else set()
        chosen = select_group([speeds[rank] for rank in living], sizes) if sizes else ()
        return tuple(living[rank] for rank in chosen)

    def cut(self, speeds: list[float]) -> tuple[int, ...]:
        """The layers of stages with these speeds. Raises ValueError where they cannot hold the layers."""
        most = self.most_layers or self.layers
        if self.layers > most * len(speeds):
            raise ValueError(f"{len(speeds)} stages of at most {most} layers cannot hold {self.layers}")
        full: set[int] = set()
        while True:  # a stage that would get more than it can hold gets that, and the others share the rest
            others = [stage for stage in range(len(speeds)) if stage not in full]
            rest = cut_layers(self.layers - most * len(full), [speeds[stage] for stage in others])
            layers = dict.fromkeys(full, most) | dict(zip(others, rest, strict=True))
            above = {stage for stage in others if layers[stage] > most}
            if not above:
                return tuple(layers[stage] for stage in range(len(speeds)))
            full |= above


def model_cut(layers: int, heads: int, hidden: int, most_layers: int = 0) -> GroupedModel:
    """A model that tensor parallelism cuts: its groups have the sizes of `group_sizes`."""
    return GroupedModel(layers, group_sizes(_MOST_RANKS, heads, hidden), most_layers)


def group_sizes(ranks: int, heads: int, hidden: int, least: int = 1) -> tuple[int, ...]:
    """The powers of two from ``least`` to ``ranks`` that divide the heads and the hidden size."""
    powers = (1 << power for power in range(max(ranks, 0).bit_length()))
    return tuple(k for k in powers if least <= k <= ranks and heads % k == 0 and hidden % k == 0)


Devices = np.ndarray[tuple[int, int, int], np.dtype[np.float64]]  # replica, stage, rank -> speed; 0: dead


@dataclass(frozen=True, slots=True)
class PipelineJob:
    """A job of equal replicas, each a pipeline of tensor-parallel groups."""

    cut: GroupedModel
    replicas: int = 2
    stages: int = 4
    group: int = 4  # number of ranks of a stage
    micro_batches: int = 16  # micro-batches per replica and step
    layer_s: float = 0.01  # seconds of one operation (F, B or W) of one layer on a whole healthy group
    transfer_s: float = 0.001  # seconds of a transfer between neighbouring stages

    def __post_init__(self) -> None:
        if min(self.replicas, self.stages, self.group, self.micro_batches) < 1:
            raise ValueError("a job of pipelines has at least 1 replica, stage, rank and micro-batch")
        if not (self.layer_s > 0 and math.isfinite(self.layer_s) and self.transfer_s >= 0):
            raise ValueError(f"a layer takes {self.layer_s:g} s: give more than zero")
        if self.cut.layers < self.stages:
            raise ValueError(f"{self.cut.layers} layers cannot be cut into {self.stages} stages")

    @property
    def total(self) -> int:
        """Micro-batches of the global batch."""
        return self.replicas * self.micro_batches

    def healthy(self) -> Devices:
        return np.ones((self.replicas, self.stages, self.group))

    def even_layers(self, stages: int) -> tuple[int, ...]:
        return cut_layers(self.cut.layers, [1.0] * stages)

    def work(self, layers: tuple[int, ...], speeds: Grid, counts: tuple[int, ...]) -> StepWork:
        """A step of replicas with one split of the layers; ``speeds``: of groups, 0 for a dead group."""
        with np.errstate(divide="ignore"):
            times = np.array(layers) * self.layer_s / (speeds / self.group)
        return StepWork(times, counts, self.transfer_s)

    def alone(self, layers: tuple[int, ...], speeds: tuple[float, ...], count: int) -> float:
        """The seconds in which one replica computes ``count`` micro-batches."""
        if count == 0:
            return 0.0
        work = self.work(layers, np.array([speeds]), (count,))
        return step_time(work, at_home(work))


class PipelinePolicy(Hashable, Protocol):
    """The reaction of a job to dead and slow devices."""

    @property
    def label(self) -> str: ...

    @property
    def stall_s(self) -> float:
        """How long all replicas wait after each failure."""

    @property
    def away_s(self) -> float:
        """How long the failed replica is away after that wait, while the others step."""

    def step_s(self, job: PipelineJob, devices: Devices) -> float:
        """The seconds of a step; inf where the job cannot go on."""


def group_speeds(devices: Devices) -> Grid:
    """The speed of each unchanged group: its slowest rank's, or 0 with a dead rank."""
    speeds: Grid = devices.shape[2] * devices.min(axis=2)
    return speeds


def chosen_speeds(job: PipelineJob, devices: Devices) -> Grid:
    """The speed of each group after selective exclusion; 0 where the model allows no group."""
    speeds = np.zeros(devices.shape[:2])
    for place in np.ndindex(speeds.shape):
        if chosen := job.cut.group(devices[place].tolist()):
            speeds[place] = len(chosen) * devices[place][list(chosen)].min()
    return speeds


@dataclass(frozen=True, slots=True)
class ReCycle:
    """ReCycle (arXiv 2405.14009): data-parallel peers of a dead stage compute its micro-batches, partly in
    bubbles.

    One dead rank ends its group. The policy ignores slow devices. Our assumption: if a stage is dead in all
    replicas, a restart forms whole pipelines from the living groups.
    """

    label: str = "ReCycle"
    stall_s: float = 30.0
    away_s: float = 0.0

    def step_s(self, job: PipelineJob, devices: Devices) -> float:
        speeds = group_speeds(devices)
        counts = (job.micro_batches,) * job.replicas
        work = replace(job.work(job.even_layers(job.stages), speeds, counts), defers_weights=True)
        owners = rerouted(work)
        if owners is not None:
            return step_time(work, owners)
        return _whole_pipelines(job, speeds)


def _whole_pipelines(job: PipelineJob, speeds: Grid) -> float:
    living = np.sort(speeds[speeds > 0])[::-1]
    pipelines = len(living) // job.stages
    if not pipelines:
        return math.inf
    grid = living[: pipelines * job.stages].reshape(pipelines, job.stages)
    counts = micro_batch_shares(job.total, [1.0] * pipelines)
    work = replace(job.work(job.even_layers(job.stages), grid, counts), defers_weights=True)
    return step_time(work, at_home(work))


@dataclass(frozen=True, slots=True)
class Oobleck:
    """Oobleck (arXiv 2309.08125): a pipeline goes on with fewer nodes, by a template made before the job.

    Our assumptions: a node is the group of a stage, and a dead rank ends it. Templates split the layers
    evenly, and a pipeline's micro-batches are proportional to its nodes. The policy ignores slow devices. A
    pipeline that is too small for the model pauses.
    """

    label: str = "Oobleck"
    stall_s: float = 60.0
    away_s: float = 0.0

    def step_s(self, job: PipelineJob, devices: Devices) -> float:
        pipelines = [tuple(row[row > 0].tolist()) for row in group_speeds(devices)]
        most = job.cut.most_layers or job.cut.layers
        able = [speeds for speeds in pipelines if len(speeds) * most >= job.cut.layers]
        if not able:
            return math.inf
        counts = micro_batch_shares(job.total, [float(len(speeds)) for speeds in able])
        return max(
            job.alone(job.even_layers(len(speeds)), speeds, count)
            for speeds, count in zip(able, counts, strict=True)
        )


@dataclass(frozen=True, slots=True)
class ResiHp:
    """ResiHP (arXiv 2605.06374): exclusion of ranks, one split of the layers for all, and migration of
    micro-batches."""

    excludes: bool = True
    repartitions: bool = True
    migrates: bool = True
    delta: float = 0.5
    stall_s: float = 30.0
    away_s: float = 0.0
    name: str = "ResiHP"

    @property
    def label(self) -> str:
        return self.name

    def step_s(self, job: PipelineJob, devices: Devices) -> float:
        speeds = chosen_speeds(job, devices) if self.excludes else group_speeds(devices)
        layers = job.even_layers(job.stages)
        if self.repartitions:
            # Our assumption: with migration, a stage has the sum of the replicas' speeds.
            together = speeds.sum(axis=0) if self.migrates else speeds[(speeds > 0).all(axis=1)].min(axis=0)
            if together.size and (together > 0).all():
                layers = job.cut.cut(together.tolist())
        if not self.migrates:
            return _whole_replicas(job, layers, speeds)
        work = job.work(layers, speeds, (job.micro_batches,) * job.replicas)
        # Our assumption: the memory holds twice what 1F1B needs. With less, replicas wait for each other.
        work = replace(work, extra_in_flight=job.stages)
        owners: Owners | None = migrated(work, self.delta, room=2.0)
        return math.inf if owners is None else step_time(work, owners)


def _whole_replicas(job: PipelineJob, layers: tuple[int, ...], speeds: Grid) -> float:
    """Replicas with a dead stage are away; the others divide the batch evenly, as without a scheduler."""
    able = [tuple(row.tolist()) for row in speeds if (row > 0).all()]
    if not able:
        return math.inf
    counts = micro_batch_shares(job.total, [1.0] * len(able))
    return max(job.alone(layers, row, count) for row, count in zip(able, counts, strict=True))


@dataclass(frozen=True, slots=True)
class Unequal:
    """This project's policy: each replica in its own best layout, and shares by what each can compute.

    The planner's own functions choose (`fabric.health.planning`), and a stage of a pipeline may lose ranks. A
    replica that changes leaves and rejoins while the others step. ``repartitions`` False keeps the layers
    even.
    """

    stall_s: float = 0.5
    away_s: float = 60.0
    label: str = "fabric"
    shares: bool = True
    repartitions: bool = True

    def step_s(self, job: PipelineJob, devices: Devices) -> float:
        cut = replace(job.cut, can_repartition=self.repartitions)
        able = [layout_speeds for row in devices if (layout_speeds := _own_layout(job, cut, row)) is not None]
        if not able:
            return math.inf
        capacities = [1 / max(n / v for n, v in zip(*pair, strict=True)) for pair in able]
        counts = micro_batch_shares(job.total, capacities if self.shares else [1.0] * len(able))
        return max(job.alone(*pair, count) for pair, count in zip(able, counts, strict=True))


def _own_layout(
    job: PipelineJob, cut: GroupedModel, row: np.ndarray[tuple[int, int], np.dtype[np.float64]]
) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
    """The layers and the speeds of the stages of one replica in its best layout, None where it has none."""
    chosen = [cut.group(stage) for stage in row.tolist()]
    speeds = [len(x) * row[stage][list(x)].min() for stage, x in enumerate(chosen) if x]
    if not speeds or (len(speeds) < job.stages and not cut.can_repartition):
        return None
    try:
        return cut.cut(speeds) if cut.can_repartition else job.even_layers(job.stages), tuple(speeds)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Unmitigated:
    """Plain hybrid parallelism: the slowest device sets the pace, and a dead device stops its replica."""

    stall_s: float = 0.0
    away_s: float = 0.0
    label: str = "unmitigated"
    _even: ResiHp = field(default=ResiHp(excludes=False, repartitions=False, migrates=False))

    def step_s(self, job: PipelineJob, devices: Devices) -> float:
        return self._even.step_s(job, devices)
