"""Compares policies for one cluster over several seeds, and recommends one with a reason."""

import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.model import Member, Value, apportion
from fabric.plan.closed_forms import (
    availability,
    best_redundancy,
    masked_failures,
    masked_failures_replication,
    optimal_interval,
)
from fabric.plan.cluster import Cluster
from fabric.plan.engine import FailurePolicy, MaskingCost, SimulatedJob, TimeLedger, simulate
from fabric.plan.failures import FailureModel
from fabric.protocol.rules.assignment import spread
from fabric.protocol.rules.spare import (
    StackedShards,
    best_offsets,
    has_distinct_differences,
    ring_layout,
)

# The policies that the simulator compares: what a step costs under each, and what a failure does.


# Seconds to remove failed groups from the communicator, from SPARe's published runs.
SHRINK_S = 0.1
# For so many members the trainers' own function spreads the micro-batches.
_FEW = 32


class CheckpointRestart(Struct, FailurePolicy):
    """Synchronous training: every failure restarts all groups from the last checkpoint.

    ``interrupts``: whether a failure ends the step at once; otherwise it is noticed at the exchange.
    """

    interrupts: bool = True
    label: str = "checkpoint and restart"


class Replication(Struct, FailurePolicy):
    """Traditional replication: the r groups of a block all compute its r types, in every step."""

    redundancy: int
    _left: list[int] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"replication, r = {self.redundancy}"

    def begin(self, groups: int) -> None:
        blocks = -(-groups // self.redundancy)
        self._left = [min(self.redundancy, groups - block * self.redundancy) for block in range(blocks)]

    def slots(self) -> float:
        return float(self.redundancy)

    def fail(self, groups: list[int]) -> MaskingCost | None:
        for group in groups:
            self._left[group // self.redundancy] -= 1
        return None if 0 in self._left else MaskingCost(0.0, 0, SHRINK_S)


class SPARePolicy(Struct, FailurePolicy):
    """SPARe: stacked shards with adaptive reordering, by the trainers' functions
    (`fabric.protocol.rules.spare`).

    ``offsets``: the offsets of a type's hosts on the ring of groups.
    """

    offsets: tuple[int, ...]
    _shards: StackedShards | None = None

    @property
    def label(self) -> str:
        return f"SPARe, r = {len(self.offsets)}"

    @property
    def shards(self) -> StackedShards:
        assert self._shards is not None, "begin() comes first"
        return self._shards

    def begin(self, groups: int) -> None:
        self._shards = StackedShards(ring_layout(groups, self.offsets))

    def slots(self) -> float:
        return float(self.shards.depth)

    def fail(self, groups: list[int]) -> MaskingCost | None:
        patch = self.shards.fail(groups)
        if patch is None:
            return None
        workers = len(self.shards.alive) if patch.deeper else len(patch.compute)
        return MaskingCost(patch.slots, workers, SHRINK_S)


class FtHsdp(Struct, FailurePolicy):
    """FT-HSDP (arXiv 2602.00277): survivors stall, go on with a smaller global batch, and readmit the dead
    replica.

    ``stall_s``: counted from the start of the interrupted step; it contains the retraining of that step.
    ``rejoin_stall_s``: how long all groups wait when a replica comes back.
    """

    stall_s: float = 180.0
    rejoin_stall_s: float = 0.0
    label: str = "FT-HSDP"
    interrupts: bool = True
    readmits: bool = True
    _groups: int = 0
    _away: int = 0

    def begin(self, groups: int) -> None:
        self._groups, self._away = groups, 0

    def progress(self) -> float:
        return (self._groups - self._away) / self._groups

    def fail(self, groups: list[int]) -> MaskingCost | None:
        self._away += len(groups)
        return None if self._away >= self._groups else MaskingCost(0.0, 0, self.stall_s)

    def rejoin(self, groups: list[int]) -> float:
        self._away -= len(groups)
        return self.rejoin_stall_s


class ConstantBatch(Struct, FailurePolicy):
    """This project's policy: the global batch stays equal; survivors compute the dead groups' micro-batches.

    Every group can read every shard. After a failed round the survivors keep their gradients and compute the
    micro-batches of the dead. A repaired group catches up while the others step, and joins at a step
    boundary.

    ``micro_batches``: per group and step (G). ``stall_s``: from a death to the retried round.
    """

    micro_batches: int = 8
    stall_s: float = 0.5
    readmits: bool = True
    _groups: int = 0
    _alive: set[int] = field(default_factory=set)
    _sizes: dict[int, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"constant batch, {self.micro_batches} micro-batches"

    def begin(self, groups: int) -> None:
        self._groups, self._alive, self._sizes = groups, set(range(groups)), {}

    def slots(self) -> float:
        return self._busiest(len(self._alive)) / self.micro_batches

    def _busiest(self, alive: int) -> int:
        if alive not in self._sizes:
            self._sizes[alive] = max(apportion(self.micro_batches * self._groups, [1] * alive))
        return self._sizes[alive]

    def fail(self, groups: list[int]) -> MaskingCost | None:
        orphans = sum(self._busiest(len(self._alive)) for _ in groups)
        self._alive.difference_update(groups)
        if not self._alive:
            return None
        extra = busiest_of_spread(orphans, len(self._alive))
        return MaskingCost(extra / self.micro_batches, min(orphans, len(self._alive)), self.stall_s)

    def rejoin(self, groups: list[int]) -> float:
        self._alive.update(groups)
        return 0.0


def busiest_of_spread(orphans: int, alive: int) -> int:
    """Return how many of ``orphans`` micro-batches the busiest of ``alive`` equal members gets.

    For few members `rules.assignment.spread` computes it; for many equal members it is the quotient, rounded
    up (a test compares the two).
    """
    if alive > _FEW:
        return -(-orphans // alive)
    members = tuple(Member(f"r{number}", 1, "", "") for number in range(alive))
    shares = spread(range(orphans), members, {member.replica: 1 for member in members})
    return max(len(ids) for ids in shares.values())


# Student's t for a 95 % interval, for 1 to 10 degrees of freedom; with more degrees it is near 1.96.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


def process_pool(workers: int) -> ProcessPoolExecutor:
    """Return a pool of ``workers`` fresh processes, at least one.

    They are spawned and not forked, because a forked process would lack the threads of the caller.
    """
    return ProcessPoolExecutor(max(1, workers), mp_context=multiprocessing.get_context("spawn"))


class Estimate(Value):
    """A mean over seeds and the half width of its 95 % confidence interval (0 for one seed)."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        if len(values) < 2:
            return cls(values[0], 0.0)
        freedom = len(values) - 1
        t = _T95[freedom - 1] if freedom <= len(_T95) else 1.96
        return cls(statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values)))


class PolicyOption(Value):
    """A policy with its settings for one cluster.

    ``make`` returns a new policy object for each run. ``settings``: such as "checkpoint every 15 steps".
    """

    name: str
    settings: str
    job: SimulatedJob
    make: Callable[[], FailurePolicy]


class PolicyResult(Value):
    """One option over all seeds.

    ``effective``: effective training time, 0 to 1. ``time_to_train``: a multiple of the ideal job's.
    ``available``: the share of time outside global restarts. ``shares``: the share of each entry of the time
    ledger. ``finished``: False if a run was given up; the figures then cover the time until that.
    """

    name: str
    label: str
    settings: str
    effective: Estimate
    time_to_train: Estimate
    available: Estimate
    shares: dict[str, float]
    finished: bool


def options_for(cluster: Cluster, spares: int | None = None) -> list[PolicyOption]:
    """Return the options that are compared: each policy with the best settings that its published formulas
    give."""
    # The two policies that go on after a failure save in the background. No replica waits for a save, and
    # only the loss of all replicas needs the checkpoint.
    interval_s = optimal_interval(cluster.save_s, cluster.mtbf_s, cluster.restart_s)
    job = replace(cluster.job(), save_s=0.0, save_every=max(1, round(interval_s / cluster.step_s)))
    ours = partial(ConstantBatch, cluster.micro_batches, cluster.stall_s)
    count = worthwhile_spares(cluster) if spares is None else spares
    options = [
        _checkpointed("checkpoint and restart", cluster, cluster.mtbf_s, CheckpointRestart),
        *_redundant(cluster),
        PolicyOption("FT-HSDP", "stalls of 180 s, joins of 100 s", job, partial(FtHsdp, 180.0, 100.0)),
        PolicyOption("fabric", f"{cluster.micro_batches} micro-batches per replica", job, ours),
    ]
    if count:
        with_spares = replace(job, spares=count)
        options.append(PolicyOption("fabric with spares", f"{count} spare replicas", with_spares, ours))
    return options


def _checkpointed(
    name: str, cluster: Cluster, up_s: float, make: Callable[[], FailurePolicy], factor: float = 1.0
) -> PolicyOption:
    """An option with checkpoints. ``factor``: how many times longer a step takes under the policy."""
    interval_s = optimal_interval(cluster.save_s, up_s, cluster.restart_s)
    every = max(1, round((interval_s - cluster.save_s) / (cluster.step_s * factor)))
    job = replace(cluster.job(), save_every=every)
    return PolicyOption(name, f"checkpoint every {every} steps", job, make)


def _redundant(cluster: Cluster) -> list[PolicyOption]:
    groups = cluster.replicas
    if groups < 4:
        return []
    optimum = best_redundancy(
        groups,
        save_s=cluster.save_s,
        restart_s=cluster.restart_s,
        mtbf_s=cluster.mtbf_s,
        most=min(12, groups // 2),
    )
    offsets = best_offsets(groups, optimum.redundancy)
    note = (
        ""
        if has_distinct_differences(groups, offsets)
        else ", consecutive hosts: too few groups for a Golomb ruler"
    )
    up_s = max(1.0, masked_failures(groups, optimum.redundancy)) * cluster.mtbf_s
    spare = _checkpointed("SPARe", cluster, up_s, partial(SPARePolicy, offsets), optimum.overhead)
    candidates = [r for r in (2, 3, 4) if r <= groups // 2]
    replicated = min(candidates, key=lambda r: replication_cost(cluster, r))
    up_s = masked_failures_replication(groups, replicated) * cluster.mtbf_s
    return [
        _checkpointed("replication", cluster, up_s, partial(Replication, replicated), replicated),
        replace(spare, settings=spare.settings + note),
    ]


def replication_cost(cluster: Cluster, redundancy: int) -> float:
    """Return the time to train under replication, over that of a run without failures: r / A*."""
    up_s = masked_failures_replication(cluster.replicas, redundancy) * cluster.mtbf_s
    interval_s = optimal_interval(cluster.save_s, up_s, cluster.restart_s)
    if interval_s == 0:
        return float(redundancy)
    return redundancy / max(1e-9, availability(interval_s, cluster.save_s, up_s, cluster.restart_s))


def worthwhile_spares(cluster: Cluster) -> int:
    """Return the average number of spares in use: the failures within one repair time, rounded up (Little's
    law)."""
    repair_s = cluster.restart_s + cluster.repair_median_s * math.exp(cluster.repair_sigma**2 / 2)
    away = repair_s / cluster.mtbf_s
    return min(math.ceil(away), max(1, cluster.replicas // 4))


def _run_seed(failures: FailureModel, option: PolicyOption, seed: int) -> TimeLedger:
    """One run of one option; at the top of the module, so that a process pool can call it."""
    return simulate(option.job, option.make(), failures, seed)


def compare(
    cluster: Cluster,
    *,
    seeds: int = 5,
    options: Iterable[PolicyOption] | None = None,
    failures: FailureModel | None = None,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[PolicyResult]:
    """Simulate every option with ``seeds`` seeds in ``workers`` processes; return the best option first.

    ``progress`` is called with the numbers of finished and of all runs. Raises ValueError for fewer than one
    seed.
    """
    if seeds < 1:
        raise ValueError(f"--seeds must be 1 or more, not {seeds}")
    chosen = list(options_for(cluster) if options is None else options)
    process = cluster.failures() if failures is None else failures
    runs = [option for option in chosen for _ in range(seeds)]
    work = partial(_run_seed, process)
    numbers = [seed for _ in chosen for seed in range(seeds)]
    with process_pool(workers) if workers > 1 else nullcontext() as pool:
        run_all, ledgers = map if pool is None else pool.map, list[TimeLedger]()
        for ledger in run_all(work, runs, numbers):
            ledgers.append(ledger)
            progress(len(ledgers), len(runs))
    outcomes = [
        _outcome(option, ledgers[number * seeds : (number + 1) * seeds])
        for number, option in enumerate(chosen)
    ]
    return sorted(outcomes, key=lambda outcome: (not outcome.finished, -outcome.effective.mean))


PARTS = ("training", "redundant", "stall", "recovery", "rework", "checkpoint")


def _outcome(option: PolicyOption, ledgers: Sequence[TimeLedger]) -> PolicyResult:
    total_s = sum(ledger.total_s for ledger in ledgers)
    shares = {part: sum(getattr(ledger, f"{part}_s") for ledger in ledgers) / total_s for part in PARTS}
    return PolicyResult(
        option.name,
        option.make().label,
        option.settings,
        Estimate.of([ledger.effective for ledger in ledgers]),
        Estimate.of([ledger.total_s / option.job.ideal_s for ledger in ledgers]),
        Estimate.of([ledger.available for ledger in ledgers]),
        shares,
        all(ledger.finished for ledger in ledgers),
    )


def recommendation(cluster: Cluster, outcomes: Sequence[PolicyResult]) -> str:
    """One sentence that says which policy to run, and why."""
    best = outcomes[0]
    baseline = next((o for o in outcomes if o.name == "checkpoint and restart"), None)
    against = ""
    if baseline is not None and baseline is not best:
        against = (
            f", against {baseline.effective.mean:.1%} with checkpoint and restart"
            if baseline.finished
            else "; with checkpoint and restart the job would not finish"
        )
    biggest = max((part for part in PARTS if part != "training"), key=lambda part: best.shares[part])
    return (
        f"Run {best.name} ({best.settings}): {best.effective.mean:.1%} effective training time at a"
        f" failure every"
        f" {_span(cluster.mtbf_s)}{against}; what remains is mostly {_MEANING[biggest]}."
    )


_MEANING = {
    "redundant": "work of absent replicas and waiting for the slowest",
    "stall": "stalls after failures",
    "recovery": "restarts",
    "rework": "repeated steps",
    "checkpoint": "checkpoints",
}


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"
