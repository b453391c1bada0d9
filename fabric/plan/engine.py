"""One simulator for every policy: a job's steps in virtual time, with the failures of one random seed.

The engine keeps the clock; a `FailurePolicy` gives the cost of a step and the effect of a failure. In a step
every living group computes its slots; when the slowest has ended, one exchange follows. A failure is noticed
at the exchange, or at once under policies that interrupt the step.

Assumptions that all policies share:

- A failure during a save or a restart is noticed at the next exchange, or it begins the restart again.
- A global restart takes ``restart_s`` for every group and ends when the slowest group is ready. Where
  ``restart_fails`` is set, a group that fails during its restart begins it again. The failure clock of a
  survivor goes on through a restart. The clock of a failed group starts when its own restart has ended.
- A rollback repeats the steps since the last checkpoint; the cost of the discarded steps counts as rework.
"""

import heapq
import math

import numpy as np
from msgspec import Struct, field

from fabric.model import Value
from fabric.plan.failures import FailureModel, Repair, Units


class SimulatedJob(Value):
    """A job for the simulator. Times in seconds."""

    groups: int  # number of groups, the units of failure
    steps: int  # optimizer steps to commit
    compute_s: float  # seconds of one group's work on 1/N of the global batch, for N groups
    exchange_s: float = 0.0  # seconds of the all-reduce in a step
    jitter: float = 0.05  # relative standard deviation of a slot's compute time, per group
    save_s: float = 0.0  # a checkpoint blocks all groups for this time
    save_every: int = 0  # steps from one checkpoint to the next; 0: never
    restart_s: float = 600.0  # length of a global restart
    restart_fails: bool = True
    repair: Repair = field(default_factory=lambda: Repair(600.0))  # how long a single group is away
    spares: int = 0  # groups that wait to replace a failed one
    spare_join_s: float = 60.0  # the time in which a spare takes a place
    give_up_after: float = 100.0  # the simulation gives up after this multiple of the ideal time

    @property
    def step_s(self) -> float:
        """The ideal step: one slot and one exchange, with no slow group."""
        return self.compute_s + self.exchange_s

    @property
    def ideal_s(self) -> float:
        return self.steps * self.step_s


class MaskingCost(Value):
    """The cost of a failure that the policy masks; the groups then repeat the exchange."""

    slots: float  # additional slots that the busiest survivor computes
    workers: int  # survivors that compute additional slots
    stall_s: float  # seconds that all groups wait in addition


class FailurePolicy:
    """The cost of a step and the effect of a failure. The engine calls `begin` first, and after every global
    restart. By default each failure asks for a global restart."""

    @property
    def label(self) -> str:
        raise NotImplementedError

    @property
    def interrupts(self) -> bool:
        """Whether a failure ends the step at once; ``MaskingCost.stall_s`` then counts from the step's
        start."""
        return False

    @property
    def readmits(self) -> bool:
        """Whether a repaired group comes back without a global restart."""
        return False

    def begin(self, groups: int) -> None:
        del groups

    def slots(self) -> float:
        """Slots that the busiest living group computes in a step."""
        return 1.0

    def progress(self) -> float:
        """Return the share of the global batch that a step commits, 0 to 1."""
        return 1.0

    def fail(self, groups: list[int]) -> MaskingCost | None:
        """Mask the loss of ``groups`` and return the cost; None asks for a global restart."""
        del groups
        return None

    def rejoin(self, groups: list[int]) -> float:
        """Readmit ``groups`` at a step boundary; return the seconds for which all groups wait."""
        raise AssertionError(f"groups {groups} came back without a restart")

    def restart_due(self) -> bool:
        """Whether to save and restart at this step boundary, without losing a step."""
        return False


class TimeLedger(Struct):
    """How the time was spent, in seconds; the fields add up to ``total_s``."""

    training_s: float = 0.0  # at most one slot and one exchange per step, times the step's progress
    redundant_s: float = 0.0  # additional slots, and waits for the slowest group
    stall_s: float = 0.0  # failed exchanges, patches, waits after failures and for joins
    recovery_s: float = 0.0  # seconds of global restarts
    rework_s: float = 0.0  # seconds of steps that were rolled back
    checkpoint_s: float = 0.0  # seconds of saving checkpoints
    failures: int = 0
    restarts: int = 0
    finished: bool = True

    @property
    def total_s(self) -> float:
        return (
            self.training_s
            + self.redundant_s
            + self.stall_s
            + self.recovery_s
            + self.rework_s
            + self.checkpoint_s
        )

    @property
    def effective(self) -> float:
        """Effective training time: the share of the time that an ideal job would also have needed."""
        return self.training_s / self.total_s

    @property
    def available(self) -> float:
        """The share of the time outside global restarts."""
        return 1 - self.recovery_s / self.total_s


def simulate(
    job: SimulatedJob,
    policy: FailurePolicy,
    failures: FailureModel,
    seed: int = 0,
) -> TimeLedger:
    """Simulate ``job`` under ``policy`` to its last step; return the ledger of its time."""
    return _Run(job, policy, failures, np.random.default_rng(seed)).play()


class _Run:
    """One run: the clock, the living groups, and the costs since the last checkpoint."""

    def __init__(
        self,
        job: SimulatedJob,
        policy: FailurePolicy,
        failures: FailureModel,
        rng: np.random.Generator,
    ) -> None:
        self._job, self._policy, self._rng = job, policy, rng
        self._clocks = failures.clocks(job.groups, rng)
        self._alive = np.ones(job.groups, bool)
        self._back_s = np.full(job.groups, math.inf)  # the time when a group that is away may rejoin
        self._spares = [0.0] * job.spares  # a heap of the times at which the spares become free
        self._now = 0.0
        self._ledger = TimeLedger()
        self._since_save = TimeLedger()
        policy.begin(job.groups)

    def play(self) -> TimeLedger:
        job, committed, saved, at_save = self._job, 0.0, 0.0, 0
        step, limit = 0, job.give_up_after * job.ideal_s
        while committed < job.steps - 1e-9 and self._now < limit:
            self._readmit()
            if self._policy.restart_due():
                self._save()
                saved = committed
                self._restart()
            progress = self._step()
            if progress is None:
                self._ledger.rework_s += self._since_save.total_s
                self._since_save = TimeLedger()
                committed = saved
                self._restart()
                continue
            committed += progress
            step += 1 if progress else 0
            if job.save_every and step - at_save >= job.save_every and committed < job.steps - 1e-9:
                self._save()
                saved, at_save = committed, step
        self._keep()
        self._ledger.finished = committed >= job.steps - 1e-9
        return self._ledger

    # --- one step ------------------------------------------------------------------------------------

    def _step(self) -> float | None:
        """Simulate one step with its failures; return its progress (0 if interrupted), or None for a global
        restart."""
        job, policy, start = self._job, self._policy, self._now
        progress, slots = policy.progress(), policy.slots()
        work_s = self._compute(slots)
        if policy.interrupts:
            lost = self._failed_before(start + work_s + job.exchange_s)
            if len(lost):
                return self._interrupt(lost, start)
        self._now += work_s
        stall_s = 0.0
        while len(lost := self._failed_before(self._now + job.exchange_s)):
            recovery = self._fail(lost)
            half_s = job.exchange_s / 2
            if recovery is None:
                self._now += half_s
                self._since_save.stall_s += stall_s + half_s
                self._since_save.redundant_s += work_s
                return None
            cost_s = half_s + recovery.stall_s + self._compute(recovery.slots, recovery.workers)
            stall_s += cost_s
            self._now += cost_s
        self._now += job.exchange_s
        useful_s = progress * job.step_s
        self._since_save.training_s += useful_s
        self._since_save.redundant_s += work_s + job.exchange_s - useful_s
        self._since_save.stall_s += stall_s
        return progress

    def _interrupt(self, lost: Units, start: float) -> float | None:
        """A failure ends the step: all groups stall, counted from the step's start, and compute the step
        again."""
        struck = max(start, float(self._clocks.next_s[lost].min()))
        recovery = self._fail(lost)
        if recovery is None:
            self._since_save.stall_s += struck - start
            self._now = struck
            return None
        self._now = max(struck, start + recovery.stall_s)
        self._since_save.stall_s += self._now - start
        return 0.0

    def _compute(self, slots: float, workers: int | None = None) -> float:
        """Seconds until the slowest of ``workers`` (None: all living groups) has computed ``slots``."""
        if slots <= 0:
            return 0.0
        count = int(self._alive.sum()) if workers is None else max(1, workers)
        noise = self._job.jitter * math.sqrt(slots) * self._rng.standard_normal(count)
        return max(0.0, float((self._job.compute_s * (slots + noise)).max()))

    # --- failures and returns ------------------------------------------------------------------------

    def _failed_before(self, end_s: float) -> Units:
        return np.flatnonzero(self._alive & (self._clocks.next_s < end_s))

    def _fail(self, lost: Units) -> MaskingCost | None:
        self._alive[lost] = False
        self._ledger.failures += len(lost)
        if self._policy.readmits:
            struck = self._clocks.next_s[lost]
            repaired = struck + self._job.repair.draw(len(lost), self._rng)
            for unit, at, whole_again in zip(lost.tolist(), struck.tolist(), repaired.tolist(), strict=True):
                self._back_s[unit] = self._replaced(at, whole_again)
        return self._policy.fail(lost.tolist())

    def _replaced(self, struck_s: float, repaired_s: float) -> float:
        """The time at which a failed group's place is filled, by a spare or by the repaired group."""
        if self._spares:
            stands_in_s = max(struck_s, self._spares[0]) + self._job.spare_join_s
            if stands_in_s < repaired_s:
                heapq.heapreplace(self._spares, repaired_s)
                return stands_in_s
        return repaired_s

    def _readmit(self) -> None:
        back = np.flatnonzero(~self._alive & (self._back_s <= self._now))
        if not len(back):
            return
        self._clocks.renew(back, np.full(len(back), self._now))
        self._alive[back] = True
        self._back_s[back] = math.inf
        stall_s = self._policy.rejoin(back.tolist())
        self._now += stall_s
        self._since_save.stall_s += stall_s

    # --- saves and restarts --------------------------------------------------------------------------

    def _save(self) -> None:
        self._now += self._job.save_s
        self._since_save.checkpoint_s += self._job.save_s
        self._keep()

    def _keep(self) -> None:
        """Add the time since the last checkpoint to the ledger for good: no restart can roll it back now."""
        spent, ledger = self._since_save, self._ledger
        ledger.training_s += spent.training_s
        ledger.redundant_s += spent.redundant_s
        ledger.stall_s += spent.stall_s
        ledger.checkpoint_s += spent.checkpoint_s
        self._since_save = TimeLedger()

    def _restart(self) -> None:
        """A global restart: all groups are alive again when the slowest is ready."""
        job, clocks, begun = self._job, self._clocks, self._now
        failed = np.flatnonzero(~self._alive)
        ready = np.full(job.groups, begun + job.restart_s)
        if job.restart_fails:
            clocks.next_s[failed] = math.inf
            struck = np.flatnonzero(clocks.next_s < ready)
            while len(struck):
                self._ledger.failures += len(struck)
                at = np.maximum(clocks.next_s[struck], begun)
                ready[struck] = at + job.restart_s
                clocks.renew(struck, at)
                struck = struck[clocks.next_s[struck] < ready[struck]]
        if len(failed):
            clocks.renew(failed, np.full(len(failed), float(ready.max())))
        if not job.restart_fails:
            over = np.flatnonzero(clocks.next_s < begun + job.restart_s)
            if len(over):
                clocks.renew(over, ready[over])
        self._now = float(ready.max())
        self._ledger.recovery_s += self._now - begun
        self._ledger.restarts += 1
        self._alive[:] = True
        self._back_s[:] = math.inf
        self._policy.begin(job.groups)
