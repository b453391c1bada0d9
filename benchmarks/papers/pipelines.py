"""Times a step of several pipelines, and moves micro-batches between replicas.

All replicas of a step have the same stages here. So a stage of any living replica can compute another
replica's micro-batch. A worker is one stage of one replica. The backward pass is split: the gradient of the
input (B) leaves at once, the gradient of the weights (W) follows.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Grid = NDArray[np.float64]  # an array of shape (replicas, stages)


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step, and the time of each operation."""

    times: Grid  # seconds of one operation (F, B or W) of a micro-batch; inf: the stage is dead
    counts: tuple[int, ...]  # replica -> micro-batches that it reads
    transfer_s: float = 0.0  # seconds of a transfer between neighbouring stages
    extra_in_flight: int = 0  # forward passes that fit into the memory of a stage beyond those of 1F1B
    defers_weights: bool = False  # whether W waits for idle time, as in ReCycle; else W follows B at once

    def __post_init__(self) -> None:
        if self.times.ndim != 2 or len(self.counts) != len(self.times) or not sum(self.counts):
            raise ValueError("a step needs times by replica and stage, and at least 1 micro-batch")
        if np.isnan(self.times).any() or (self.times <= 0).any() or min(self.counts) < 0:
            raise ValueError("a stage of the step has a time of zero or less: leave it out or give its time")

    @property
    def replicas(self) -> int:
        return len(self.times)

    @property
    def stages(self) -> int:
        return int(self.times.shape[1])


# Stage -> replica that reads -> the replicas that compute its micro-batches, in order.
Owners = tuple[tuple[tuple[int, ...], ...], ...]


def at_home(work: StepWork) -> Owners:
    """Every replica computes the micro-batches that it reads."""
    return tuple(
        tuple((replica,) * count for replica, count in enumerate(work.counts)) for _ in range(work.stages)
    )


def rerouted(work: StepWork) -> Owners | None:
    """ReCycle: the living peers of a dead stage take its micro-batches in turn. None where no peer lives."""
    stages: list[tuple[tuple[int, ...], ...]] = []
    for stage in range(work.stages):
        living = [replica for replica in range(work.replicas) if math.isfinite(work.times[replica, stage])]
        if not living:
            return None
        taken, owners = 0, []
        for replica, count in enumerate(work.counts):
            if replica in living:
                owners.append((replica,) * count)
            else:
                owners.append(tuple(living[(taken + i) % len(living)] for i in range(count)))
                taken += count
        stages.append(tuple(owners))
    return tuple(stages)


def migrated(work: StepWork, delta: float = 0.5, room: float = 2.0) -> Owners | None:
    """ResiHP's Algorithm 1: stage by stage, micro-batches move from the slowest replica to the fastest.

    A micro-batch moves while the slowest replica ends more than ``delta`` micro-batches later than the
    fastest would with that micro-batch. ``room``: how many times the usual number of micro-batches fits into
    a stage's memory. A dead stage gives all its micro-batches away. None where no replica may take the rest.
    The paper leaves open which micro-batch moves next: here the moved ones are spread evenly over the step.
    """
    stages: list[tuple[tuple[int, ...], ...]] = []
    most = math.ceil(room * max(work.counts))
    for times in work.times.T:
        moves = _moves(times, work.counts, delta, most)
        if moves is None:
            return None
        owners = []
        for replica, count in enumerate(work.counts):
            takers = moves[replica]
            owners.append(_spread(replica, count, takers))
        stages.append(tuple(owners))
    return tuple(stages)


def _moves(
    times: NDArray[np.float64], counts: Sequence[int], delta: float, most: int
) -> list[list[int]] | None:
    """Replica -> the takers of its micro-batches, one entry for each micro-batch that moves."""
    left, total = list(counts), list(counts)
    moves: list[list[int]] = [[] for _ in counts]
    able = [replica for replica, time in enumerate(times) if math.isfinite(time)]

    def end(replica: int, extra: int = 0) -> float:
        return float((total[replica] + extra) * times[replica]) if total[replica] + extra else 0.0

    while True:
        givers = [replica for replica in range(len(counts)) if left[replica]]
        takers = [replica for replica in able if total[replica] < most]
        behind = max(givers, key=lambda replica: (end(replica), -replica))
        ahead = min(takers, key=lambda replica: (end(replica, 1), replica), default=None)
        dead = not math.isfinite(times[behind])
        if ahead is None or ahead == behind:
            return None if dead else moves
        if not dead and end(behind) - end(ahead, 1) <= delta * float(times[ahead]):
            return moves
        left[behind] -= 1
        total[behind] -= 1
        total[ahead] += 1
        moves[behind].append(ahead)


def _spread(replica: int, count: int, takers: Sequence[int]) -> tuple[int, ...]:
    """The owners of one replica's micro-batches; those that moved are at even distances."""
    owners = [replica] * count
    for i, taker in enumerate(takers):
        owners[(2 * i + 1) * count // (2 * len(takers))] = taker
    return tuple(owners)


# --- timing -----------------------------------------------------------------------------------------------

_F, _B, _W = range(3)


@dataclass(slots=True)
class _StageWorker:
    time_s: float
    depth: int  # the most forward passes whose backward pass has not begun
    free_at: float = 0.0
    in_flight: int = 0
    turn: int = _F
    forwards: list[tuple[int, int]] = field(default_factory=list)  # heaps of ready (number, replica)
    backwards: list[tuple[int, int]] = field(default_factory=list)
    weights: list[tuple[int, int]] = field(default_factory=list)

    def next(self, defers_weights: bool) -> tuple[int, tuple[int, int]] | None:
        """The kind and micro-batch of the next operation."""
        if self.weights and not defers_weights:
            return _W, heapq.heappop(self.weights)
        forward = bool(self.forwards) and self.in_flight < self.depth
        # Alternate one forward and one backward pass; a kind without a ready pass yields its turn.
        if forward and (self.turn == _F or not self.backwards):
            self.in_flight += 1
            self.turn = _B if self.in_flight == self.depth else _F
            return _F, heapq.heappop(self.forwards)
        if self.backwards:
            self.in_flight -= 1
            self.turn = _F
            return _B, heapq.heappop(self.backwards)
        return (_W, heapq.heappop(self.weights)) if self.weights else None


class _StepClock:
    """Runs one step. A free worker begins the first operation that is ready and waits for no other turn. So
    the step cannot block: the last stage always ends what it began."""

    def __init__(self, work: StepWork, owners: Owners) -> None:
        self._work, self._owners = work, owners
        self._workers = [
            [
                _StageWorker(float(work.times[d, s]), work.stages - s + work.extra_in_flight)
                for s in range(work.stages)
            ]
            for d in range(work.replicas)
        ]
        # (time, kind, micro-batch number, replica that reads it, stage); the kind W only wakes a worker.
        self._arrivals: list[tuple[float, int, int, int, int]] = []
        self.end_s = 0.0

    def run(self) -> float:
        work = self._work
        for replica, count in enumerate(work.counts):
            for number in range(count):
                heapq.heappush(self._arrivals, (0.0, _F, number, replica, 0))
        while self._arrivals:
            now = self._arrivals[0][0]
            woken: set[tuple[int, int]] = set()
            while self._arrivals and self._arrivals[0][0] == now:
                _, kind, number, replica, stage = heapq.heappop(self._arrivals)
                owner = self._owners[stage][replica][number]
                worker = self._workers[owner][stage]
                if kind == _F:
                    heapq.heappush(worker.forwards, (number, replica))
                elif kind == _B:
                    heapq.heappush(worker.backwards, (number, replica))
                woken.add((owner, stage))
            for owner, stage in sorted(woken):
                self._begin(owner, stage, now)
        return self.end_s

    def _begin(self, owner: int, stage: int, now: float) -> None:
        worker = self._workers[owner][stage]
        if worker.free_at > now:
            return
        chosen = worker.next(self._work.defers_weights)
        if chosen is None:
            return
        kind, (number, replica) = chosen
        end = now + worker.time_s
        worker.free_at = end
        self.end_s = max(self.end_s, end)
        if kind == _B:
            heapq.heappush(worker.weights, (number, replica))
        # An event of kind W only wakes the worker at the end of an operation, and adds nothing to its queues.
        heapq.heappush(self._arrivals, (end, _W, number, replica, stage))
        sent = end + self._work.transfer_s
        last = stage == self._work.stages - 1
        if kind == _F:
            arrival = (end, _B, number, replica, stage) if last else (sent, _F, number, replica, stage + 1)
            heapq.heappush(self._arrivals, arrival)
        elif kind == _B and stage > 0:
            heapq.heappush(self._arrivals, (sent, _B, number, replica, stage - 1))


def step_time(work: StepWork, owners: Owners) -> float:
    """The seconds of a step; inf where a dead stage has work."""
    for stage, by_reader in enumerate(owners):
        if any(not math.isfinite(work.times[owner, stage]) for row in by_reader for owner in row):
            return math.inf
    return _StepClock(work, owners).run()
