"""Every published figure that the models claim to reproduce, next to our figure.

Where a source leaves a detail open, `ASSUMPTIONS` states our assumption, and
`benchmarks/notes/papers.md` repeats it.
Figures with a source "aim" are targets of this project, not published results.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import combinations

from msgspec.structs import replace

from fabric.plan import closed_forms
from fabric.plan.advice import (
    CheckpointRestart,
    ConstantBatch,
    FtHsdp,
    Replication,
    SPARePolicy,
    process_pool,
)
from fabric.plan.engine import FailurePolicy, SimulatedJob, TimeLedger, simulate
from fabric.plan.failures import FailureModel, Fixed, Repair, WeibullRenewal
from fabric.protocol.rules.spare import StackedShards, golomb_offsets, ring_layout
from papers import published_pipelines
from papers.figures import AIM, FT_HSDP, SPARE, TORCHPASS, Figure

ASSUMPTIONS = (
    "SPARe: a group that fails during a global restart begins its restart again; a survivor's failure"
    " clock goes on"
    " through a restart; the clock of a group that had failed starts when training goes on.",
    "SPARe: a patch that does not deepen the stacks is computed by the groups whose stacks changed, and"
    " the slowest of"
    " them decides; available is the share of time outside global restarts.",
    "SPARe: the closed form of the best redundancy (8 for N = 200) and the redundancy of its simulation"
    " (9) differ in"
    " the source; both are printed, not averaged.",
    "FT-HSDP: the stall of 3 min counts from the start of the interrupted step and contains its"
    " retraining; the replica"
    " is back 10 min after it failed; joins cost nothing, as in the published table.",
    "TorchPass: step time, restart time and the cost of exchanges between replicas are not published."
    " They are fitted"
    " to its three results, so these rows show what the results imply and test nothing.",
    *published_pipelines.ASSUMPTIONS,
)


class PlannedRestarts(ConstantBatch):
    """Groups return only by a global restart, as in SPARe, and the batch stays equal.

    The restart is planned (below ``restart_below`` living groups, after a save), so no step is lost.
    """

    readmits: bool = False
    restart_below: int = 1

    def restart_due(self) -> bool:
        return len(self._alive) < self.restart_below


def _within(id_: str, source: str, published: float, ours: float, tolerance: float) -> Figure:
    return Figure(id_, source, published, ours, tolerance, abs(ours - published) <= tolerance)


def _told(id_: str, source: str, ours: float) -> Figure:
    return Figure(id_, source, None, ours, None, True)


# --- closed forms ------------------------------------------------------------------------------------

EULER_GAMMA = 0.5772156649015329


def masked_failures_asymptotic(groups: int, redundancy: int) -> float:
    """mu(N, r) for large N: Gamma(1 + 1/r) * N ** (1 - 1/r)."""
    return math.gamma(1 + 1 / redundancy) * math.pow(groups, 1 - 1 / redundancy)


def best_redundancy_closed_form(groups: int) -> int:
    """r* = floor(log2 N + gamma / ln 2), with Euler's constant gamma."""
    return math.floor(math.log2(groups) + EULER_GAMMA / math.log(2))


def closed_form_figures() -> Iterator[Figure]:
    """Yield the formulas' values, compared to the last published digit."""
    masked = masked_failures_asymptotic(200, 9)
    yield _within("mu(200, 9), asymptotic", SPARE, 105.12, masked, 0.005)
    yield _told("mu(200, 9), series", SPARE, closed_forms.masked_failures(200, 9))
    yield _within("mu_rep(200, 3)", SPARE, 44.05, closed_forms.masked_failures_replication(200, 3), 0.005)
    yield _within("mean c(k), (200, 9)", SPARE, 2.0286, closed_forms.mean_overhead(200, masked), 0.00005)
    interval_s = closed_forms.optimal_interval(60.0, 31558.0, 3600.0)
    yield _within("T_c* (60, 31558, 3600), s", SPARE, 2114.9, interval_s, 0.05)
    share = closed_forms.availability(interval_s, 60.0, 31558.0, 3600.0)
    yield _within("A* (60, 31558, 3600)", SPARE, 0.8467, share, 0.00005)
    best = closed_forms.best_redundancy(200, save_s=60.0, restart_s=3600.0, mtbf_s=300.0)
    yield _within("argmin J, N = 200", SPARE, 8, best.redundancy, 0)
    yield _within("r* closed form, N = 200", SPARE, 8, best_redundancy_closed_form(200), 0)
    masked = mean_masked(ring_layout(7, (0, 1, 3)))
    yield _within("failures masked, N = 7, {0, 1, 3}", SPARE, 3.0, masked, 1e-9)
    for groups, offsets in ((7, (0, 1, 3)), (13, (0, 1, 3, 9))):
        yield _within(
            f"alive subsets with S > c(k), N = {groups}", SPARE, 0, deeper_than_bound(groups, offsets), 0
        )


def mean_masked(stacks: Sequence[Sequence[int]]) -> float:
    """The mean number of failures before a type has no living host, over all orders of failure.

    It is the sum over k >= 1 of the probability that every type has a host after k failures. ``stacks``: the
    types that each group hosts. All 2 ** N sets of failed groups are tried.
    """
    groups = range(len(stacks))
    return math.fsum(
        sum(StackedShards(stacks).fail(failed) is not None for failed in combinations(groups, lost))
        / math.comb(len(stacks), lost)
        for lost in groups[1:]
    )


def deeper_than_bound(groups: int, offsets: tuple[int, ...]) -> int:
    """The number of maskable sets of failures in which the stack depth exceeds c(k)."""
    count = 0
    for lost in range(1, groups):
        for failed in combinations(range(groups), lost):
            shards = StackedShards(ring_layout(groups, offsets))
            if shards.fail(failed) is not None:
                count += shards.depth > closed_forms.stack_depth_bound(groups, lost)
    return count


# --- SPARe and replication ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SpareRun:
    """The published results of both policies at one size, as (redundancy, steps per checkpoint, time,
    available)."""

    groups: int
    scale_s: float
    exchange_s: float
    spare: tuple[int, int, float, float]
    replication: tuple[int, int, float, float]
    gain: float

    def job(self, every: int, steps: int = 10_000) -> SimulatedJob:
        return SimulatedJob(
            groups=self.groups,
            steps=steps,
            compute_s=64.0,
            exchange_s=self.exchange_s,
            jitter=0.05,
            save_s=60.0,
            save_every=every,
            restart_s=3600.0,
        )

    @property
    def failures(self) -> WeibullRenewal:
        return WeibullRenewal(self.scale_s, 0.78)


SPARE_RUNS = (
    _SpareRun(200, 51979.0, 2.0, (9, 15, 2.92, 87.0), (3, 6, 6.07, 61.7), 51.9),
    _SpareRun(600, 155937.0, 6.0, (8, 23, 2.49, 93.9), (3, 8, 4.27, 79.9), 41.7),
    _SpareRun(1000, 259894.0, 10.0, (9, 30, 2.34, 96.5), (3, 10, 3.88, 84.4), 39.6),
)

SIZES = tuple(run.groups for run in SPARE_RUNS)


@dataclass(frozen=True, slots=True)
class _Case:
    job: SimulatedJob
    make: Callable[[], FailurePolicy]
    failures: FailureModel


def _play(case: _Case, seed: int) -> TimeLedger:
    return simulate(case.job, case.make(), case.failures, seed)


@dataclass(frozen=True, slots=True)
class _Means:
    """The means over all seeds of a case."""

    time: float  # time over the ideal time
    error: float  # standard error of ``time``; 0 with one seed, which shows no spread
    available: float  # percent
    effective: float  # percent


class _Pool:
    """Simulates cases with several seeds in parallel processes."""

    def __init__(self, pool: ProcessPoolExecutor, seeds: int) -> None:
        self._pool, self._seeds = pool, seeds

    def start(self, case: _Case) -> Callable[[], _Means]:
        """Start the case. Return a function that waits for its runs."""
        pending = [self._pool.submit(_play, case, seed) for seed in range(self._seeds)]

        def means() -> _Means:
            ledgers = [run.result() for run in pending]
            times = [ledger.total_s / case.job.ideal_s for ledger in ledgers]
            return _Means(
                statistics.fmean(times),
                statistics.stdev(times) / math.sqrt(len(times)) if len(times) > 1 else 0.0,
                100 * statistics.fmean(ledger.available for ledger in ledgers),
                100 * statistics.fmean(ledger.effective for ledger in ledgers),
            )

        return means


def spare_figures(pool: _Pool, groups: Sequence[int] = SIZES) -> Iterator[Figure]:
    """SPARe and replication at the three published sizes, with the source's statements on them."""
    started = []
    for run in (run for run in SPARE_RUNS if run.groups in groups):
        sharded = _Case(
            run.job(run.spare[1]),
            partial(SPARePolicy, golomb_offsets(run.groups, run.spare[0])),
            run.failures,
        )
        replicated = _Case(
            run.job(run.replication[1]), partial(Replication, run.replication[0]), run.failures
        )
        started.append((run, pool.start(sharded), pool.start(replicated)))
    for run, spare_means, copied_means in started:
        name = f"N = {run.groups}"
        spare, copied = spare_means(), copied_means()
        # The share is for what the source leaves open, two standard errors are for the few seeds.
        limit = 0.03 * run.spare[2] + 2 * spare.error
        yield _within(f"SPARe, {name}: time to train", SPARE, run.spare[2], spare.time, limit)
        yield _within(f"SPARe, {name}: available, %", SPARE, run.spare[3], spare.available, 2.0)
        limit = 0.05 * run.replication[2] + 2 * copied.error
        yield _within(f"replication, {name}: time to train", SPARE, run.replication[2], copied.time, limit)
        yield _within(f"replication, {name}: available, %", SPARE, run.replication[3], copied.available, 2.0)
        gain = 100 * (1 - spare.time / copied.time)
        yield _within(f"gain over replication, {name}, %", SPARE, run.gain, gain, 4.0)


def low_redundancy_figure(pool: _Pool) -> Iterator[Figure]:
    """The source says that SPARe with r = 2 loses to replication with r = 3 at N = 200; here with 2,000
    steps."""
    run = SPARE_RUNS[0]
    up_s = closed_forms.masked_failures(200, 2) * 300.0
    every = max(1, round((closed_forms.optimal_interval(60.0, up_s, 3600.0) - 60) / 130))
    spare = pool.start(
        _Case(run.job(every, 2000), partial(SPARePolicy, golomb_offsets(200, 2)), run.failures)
    )
    copied = pool.start(_Case(run.job(6, 2000), partial(Replication, 3), run.failures))
    ratio = spare().time / copied().time
    yield Figure(
        "SPARe at r = 2 over replication at r = 3, N = 200", SPARE, 1.0, ratio, None, ratio > 1, "more than"
    )


# --- FT-HSDP, and our own policy ---------------------------------------------------------------------

# 12 replicas, a failure every 1,080 s, steps of 20 s; a replica returns 600 s after its failure. The first
# interval begins without a failure, so figures compare the later intervals.
_FIRST_STEPS, _PERIODS = 54, 40


def _large_job(steps: int, micro_jitter: float = 0.0, spares: int = 0) -> SimulatedJob:
    return SimulatedJob(
        groups=12,
        steps=steps,
        compute_s=19.0,
        exchange_s=1.0,
        jitter=micro_jitter,
        save_every=1,
        restart_s=600.0,
        restart_fails=False,
        repair=Repair(600.0),
        spares=spares,
        spare_join_s=60.0,
    )


def _after_the_first_interval(ledger: TimeLedger) -> float:
    first_s = _FIRST_STEPS * 20.0
    return 100 * (ledger.training_s - first_s) / (ledger.total_s - first_s)


def ft_hsdp_figures(pool: _Pool) -> Iterator[Figure]:
    """Yield the published table with fixed arrivals, and with Poisson arrivals and the published join
    stall."""
    fixed, poisson = Fixed(1080.0), WeibullRenewal(1080.0 * 12, 1.0)
    synchronous = simulate(_large_job(_FIRST_STEPS + 24 * _PERIODS), CheckpointRestart(), fixed)
    yield _within(
        "synchronous, fixed arrivals, %", FT_HSDP, 44.0, _after_the_first_interval(synchronous), 0.5
    )
    # FT-HSDP makes 865 s of progress per interval, so 4 intervals have 173 steps of 20 s.
    tolerant = simulate(_large_job(_FIRST_STEPS + 173 * _PERIODS // 4), FtHsdp(), fixed)
    yield _within("FT-HSDP, fixed arrivals, %", FT_HSDP, 80.0, _after_the_first_interval(tolerant), 0.5)
    long = replace(_large_job(5000), restart_fails=True)
    policies: dict[str, Callable[[], FailurePolicy]] = {
        "synchronous, Poisson arrivals, %": CheckpointRestart,
        "FT-HSDP, Poisson arrivals, %": FtHsdp,
        "FT-HSDP, Poisson, joins of 100 s, %": partial(FtHsdp, 180.0, 100.0),
    }
    for name, policy in policies.items():
        yield _told(name, FT_HSDP, pool.start(_Case(long, policy, poisson))().effective)


# Seconds from a death to the retried round, as `make demo` measured it (docs/benchmarks.md), with a margin.
MEASURED_STALL_S = 0.5


def our_figures(pool: _Pool, groups: Sequence[int] = SIZES) -> Iterator[Figure]:
    """Yield this project's policy on the same failures; every assumption is an argument in this function."""
    ours = partial(ConstantBatch, 32, MEASURED_STALL_S)
    fixed = simulate(_large_job(5000), ours(), Fixed(1080.0))
    share = _after_the_first_interval(fixed)
    yield Figure(
        "constant batch, 98,304 GPUs, fixed arrivals, %", AIM, 94.0, share, None, share > 94, "more than"
    )
    poisson = _Case(_large_job(5000, 0.02), ours, WeibullRenewal(1080.0 * 12, 1.0))
    yield _told("constant batch, 98,304 GPUs, Poisson, 2 % jitter, %", AIM, pool.start(poisson)().effective)
    spare = _Case(_large_job(5000, 0.02, spares=1), ours, WeibullRenewal(1080.0 * 12, 1.0))
    share = pool.start(spare)().effective
    yield Figure("the same with one spare replica, %", AIM, 94.0, share, None, share > 94, "more than")
    started = []
    for run in (run for run in SPARE_RUNS if run.groups in groups):
        joined = _Case(run.job(0), partial(ConstantBatch, 8, MEASURED_STALL_S), run.failures)
        planned = partial(PlannedRestarts, 8, MEASURED_STALL_S, restart_below=round(0.65 * run.groups))
        started.append((run, pool.start(joined), pool.start(_Case(run.job(0), planned, run.failures))))
    for run, joined_means, planned_means in started:
        name = f"N = {run.groups}: time to train"
        time = joined_means().time
        if run.groups == 200:
            yield Figure(f"constant batch, {name}", AIM, 1.7, time, None, time <= 1.7, "at most")
        else:
            yield _told(f"constant batch, {name}", AIM, time)
        yield _told(f"constant batch, planned restarts only, {name}", AIM, planned_means().time)


# --- TorchPass's benchmark ---------------------------------------------------------------------------


def torchpass_figures() -> Iterator[Figure]:
    """Three public results in minutes, with fitted assumptions (see `ASSUMPTIONS`): 3,000 steps of 7.9 s, a
    failure every 3,600 s. Migration waits 60 s per failure. Checkpoint and restart saves every 250 steps and
    restarts in 16 min. torchft's steps take 2.15 times as long, and each failure costs 3 min more."""
    fixed = Fixed(3600.0)

    def job(step_s: float, every: int = 0) -> SimulatedJob:
        return SimulatedJob(
            groups=8,
            steps=3000,
            compute_s=step_s,
            jitter=0.0,
            save_every=every,
            restart_s=960.0,
            restart_fails=False,
            repair=Repair(60.0),
        )

    migration = simulate(job(7.9), FtHsdp(60.0), fixed).total_s / 60
    yield _within("migration, min", TORCHPASS, 405, migration, 0.05 * 405)
    restarted = simulate(job(7.9, 250), CheckpointRestart(), fixed).total_s / 60
    yield _within("checkpoint and restart, min", TORCHPASS, 818, restarted, 0.05 * 818)
    replicas = simulate(job(7.9 * 2.15), FtHsdp(180.0), fixed).total_s / 60
    yield _within("torchft, min", TORCHPASS, 930, replicas, 0.05 * 930)


def reproduce(
    seeds: int = 8,
    workers: int = 1,
    groups: Sequence[int] = SIZES,
) -> list[Figure]:
    """Return every figure in order.

    ``seeds``: seeds per simulated figure. ``groups``: the published sizes of SPARe to simulate. Raises
    ValueError for fewer than one seed.
    """
    if seeds < 1:
        raise ValueError(f"the number of seeds must be 1 or more, not {seeds}")
    figures: list[Figure] = []
    with process_pool(workers) as executor:
        pool = _Pool(executor, seeds)
        for part in (
            closed_form_figures(),
            ft_hsdp_figures(pool),
            our_figures(pool, groups),
            spare_figures(pool, groups),
            low_redundancy_figure(pool),
            torchpass_figures(),
            published_pipelines.pipeline_figures(seeds),
        ):
            figures += part
    return figures
