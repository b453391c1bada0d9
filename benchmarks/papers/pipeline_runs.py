"""Failures of single devices over time, played against a policy for replicas of pipelines."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from papers.pipeline_policies import Devices, PipelineJob, PipelinePolicy


@dataclass(frozen=True, slots=True)
class DeviceChange:
    """A device dies, becomes slow or recovers."""

    at_s: float
    device: tuple[int, int, int]  # replica, stage, rank
    speed: float  # relative speed of the device; 0: dead; 1: healthy


@dataclass(frozen=True, slots=True)
class DeviceFaults:
    """Faults at fixed intervals, each at a random healthy device."""

    interval_s: float
    count: int
    slow_share: float = 0.0  # share of the faults that slow a device; the others kill it
    slow_speeds: tuple[float, float] = (0.3, 0.8)  # range of the uniformly drawn speed of a slowed device
    repair_s: float = math.inf  # seconds until a device recovers; inf: never

    def __post_init__(self) -> None:
        if not (self.interval_s > 0 and self.count >= 0 and self.repair_s > 0):
            raise ValueError("faults of devices need positive times and a number of at least 0")
        if not 0 <= self.slow_share <= 1 or not 0 < self.slow_speeds[0] <= self.slow_speeds[1]:
            raise ValueError("the share of slow devices must be 0 to 1, and their speeds positive")

    def draw(self, job: PipelineJob, seed: int) -> list[DeviceChange]:
        """The changes for one seed, ordered by time."""
        rng = np.random.default_rng(seed)
        shape = (job.replicas, job.stages, job.group)
        back = np.full(math.prod(shape), -math.inf)
        changes: list[DeviceChange] = []
        for number in range(1, self.count + 1):
            at_s = number * self.interval_s
            healthy = np.flatnonzero(back <= at_s)
            if not len(healthy):
                break
            place = int(rng.choice(healthy))
            replica, stage, rank = (int(index) for index in np.unravel_index(place, shape))
            slow = rng.random() < self.slow_share
            speed = float(rng.uniform(*self.slow_speeds)) if slow else 0.0
            back[place] = at_s + self.repair_s
            changes.append(DeviceChange(at_s, (replica, stage, rank), speed))
            if math.isfinite(self.repair_s):
                changes.append(DeviceChange(at_s + self.repair_s, (replica, stage, rank), 1.0))
        return sorted(changes, key=lambda change: (change.at_s, change.device))


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """The outcome of a job in a window of time."""

    window_s: float
    micro_batches: float
    stopped_s: float  # seconds without a finished step

    @property
    def throughput(self) -> float:
        """Micro-batches per second."""
        return self.micro_batches / self.window_s


def run_pipelines(
    job: PipelineJob,
    policy: PipelinePolicy,
    changes: Sequence[DeviceChange],
    until_s: float,
    since_s: float = 0.0,
) -> PipelineRun:
    """Play the changes; count from ``since_s`` to ``until_s``. A part of a step counts as a part."""
    if not 0 <= since_s < until_s:
        raise ValueError(f"the window from {since_s:g} to {until_s:g} s is empty: end it later")
    micro_batches = stopped_s = 0.0
    for phase in _phases(job, policy, changes, until_s):
        length_s = phase.end_s - max(phase.start_s, since_s)
        if length_s <= 0:
            continue
        step_s = math.inf if phase.devices is None else _step_s(job, policy, phase.devices)
        if math.isfinite(step_s):
            micro_batches += job.total * length_s / step_s
        else:
            stopped_s += length_s
    return PipelineRun(until_s - since_s, micro_batches, stopped_s)


@dataclass(frozen=True, slots=True)
class _Phase:
    start_s: float
    end_s: float
    devices: Devices | None  # speeds of the devices; None: all replicas wait


def _phases(
    job: PipelineJob, policy: PipelinePolicy, changes: Sequence[DeviceChange], until_s: float
) -> Iterator[_Phase]:
    """The phases of a run without gaps: after a change a stall, then the replica's absence, then the rest."""
    devices = job.healthy()
    ends = [min(at_s, until_s) for at_s in (*(change.at_s for change in changes), until_s)]
    yield _Phase(0.0, ends[0], devices)
    for change, start_s, end_s in zip(changes, ends, ends[1:], strict=False):
        devices = devices.copy()
        devices[change.device] = change.speed
        without = devices.copy()
        without[change.device[0]] = 0
        stalled_s = min(start_s + policy.stall_s, end_s)
        away_s = min(stalled_s + policy.away_s, end_s)
        yield _Phase(start_s, stalled_s, None)
        yield _Phase(stalled_s, away_s, without)
        yield _Phase(away_s, end_s, devices)


def _step_s(job: PipelineJob, policy: PipelinePolicy, devices: Devices) -> float:
    """The time of a step. Ranks of a group and replicas of a job are alike: their order does not matter."""
    by_group = np.sort(devices, axis=2)
    order = np.lexsort(by_group.reshape(job.replicas, -1).T[::-1])
    return _step_of(job, policy, by_group[order].tobytes())


@lru_cache(maxsize=4096)
def _step_of(job: PipelineJob, policy: PipelinePolicy, state: bytes) -> float:
    shape = (job.replicas, job.stages, job.group)
    return policy.step_s(job, np.frombuffer(state).reshape(shape))


def mean_throughput(runs: Iterable[PipelineRun]) -> float:
    """The mean of micro-batches per second over several runs."""
    values = [run.throughput for run in runs]
    return sum(values) / len(values)
