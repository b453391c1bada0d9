"""How long an iteration of a pipeline takes: the critical path through the operations of its schedule.

An operation is the forward pass (F), the gradient of the input (B) or the gradient of the weights (W) of one
micro-batch at one stage. An operation starts when its data have come and the operation before it in its
worker's order has ended. Data go from F to F of the next stage and from B to B of the stage before; a
transfer between workers costs time. A replica without a pipeline has one stage.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The kind of an operation."""

    FORWARD = "F"
    BACKWARD = "B"  # the gradient of the input; where the schedule does not split, also that of the weights
    WEIGHT = "W"  # computes the gradient of the weights


class PipelineSchedule(StrEnum):
    """The order in which each stage works; its value is the name that users write."""

    GPIPE = "gpipe"  # all forward passes, then all backward passes
    ONE_F_ONE_B = "1f1b"  # a backward pass as soon as there is one; it sends its gradient at its end
    SPLIT_1F1B = "split-1f1b"  # as 1f1b, but the gradient leaves after B, and W follows at once
    ZB_H1 = "zb-h1"  # zero bubble with the memory of 1f1b: stage s delays W by s micro-batches

    @property
    def splits(self) -> bool:
        """Whether B and W are operations of their own."""
        return self in (PipelineSchedule.SPLIT_1F1B, PipelineSchedule.ZB_H1)


@dataclass(frozen=True, slots=True)
class Operation:
    """One node of the schedule's graph. Micro-batches of several replicas need different numbers."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}({self.micro_batch},{self.stage})"


Order = Sequence[Operation]
OperationCost = Callable[[int, Operation], float]  # worker, operation -> seconds
TransferCost = Callable[[int, int], float]  # from worker, to another worker -> seconds


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """Seconds of each operation, by stage and then by micro-batch."""

    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]  # seconds for the gradient of the input
    weight: tuple[tuple[float, ...], ...]  # seconds for the gradient of the weights

    def __post_init__(self) -> None:
        shapes = {tuple(len(row) for row in table) for table in (self.forward, self.backward, self.weight)}
        if len(shapes) != 1 or not self.forward or not self.forward[0] or len(set(shapes.pop())) != 1:
            raise ValueError(
                "the costs of a pipeline have unequal shapes: give one time per stage and micro-batch"
            )
        for table in (self.forward, self.backward, self.weight):
            for time in (time for row in table for time in row):
                if not (time >= 0 and math.isfinite(time)):
                    raise ValueError(f"an operation of the pipeline takes {time:g} s: give zero or more")

    @classmethod
    def of_micro_batches(
        cls, times: Sequence[float], stages: int = 1, *, factors: Mapping[int, float] | None = None
    ) -> "PipelineCosts":
        """Costs of micro-batches whose F, B and W take equally long; ``factors`` multiply the stages'
        times."""
        slow = factors or {}
        table = tuple(tuple(time * slow.get(stage, 1.0) for time in times) for stage in range(stages))
        return cls(table, table, table)

    @property
    def stages(self) -> int:
        return len(self.forward)

    @property
    def micro_batches(self) -> int:
        return len(self.forward[0])

    def of(self, operation: Operation, *, splits: bool) -> float:
        """The seconds of one operation; without a split B includes W."""
        stage, micro_batch = operation.stage, operation.micro_batch
        if operation.kind is Kind.FORWARD:
            return self.forward[stage][micro_batch]
        if operation.kind is Kind.WEIGHT:
            return self.weight[stage][micro_batch]
        backward = self.backward[stage][micro_batch]
        return backward if splits else backward + self.weight[stage][micro_batch]


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each operation runs."""

    starts: Mapping[Operation, float]
    ends: Mapping[Operation, float]
    busy: tuple[float, ...]  # seconds of work, per worker
    critical: tuple[Operation, ...]  # a longest path, from the first operation to the last

    @property
    def makespan(self) -> float:
        return max(self.ends.values(), default=0.0)


def stage_order(schedule: PipelineSchedule, stages: int, micro_batches: int, stage: int) -> list[Operation]:
    """The order of one stage's operations."""
    if not 0 <= stage < stages or micro_batches < 1:
        raise ValueError(f"stage {stage} of {stages} with {micro_batches} micro-batches does not exist")
    forwards = [Operation(Kind.FORWARD, stage, micro_batch) for micro_batch in range(micro_batches)]
    backwards = [Operation(Kind.BACKWARD, stage, micro_batch) for micro_batch in range(micro_batches)]
    if schedule is PipelineSchedule.GPIPE:
        return forwards + backwards
    weights = [Operation(Kind.WEIGHT, stage, micro_batch) for micro_batch in range(micro_batches)]
    delay = stage if schedule is PipelineSchedule.ZB_H1 else 0
    ahead = min(stages - 1 - stage, micro_batches)
    order = forwards[:ahead]
    for done in range(micro_batches):
        order += forwards[ahead + done : ahead + done + 1]
        order.append(backwards[done])
        if schedule.splits and done >= delay:
            order.append(weights[done - delay])
    return order + (weights[max(0, micro_batches - delay) :] if schedule.splits else [])


def pipeline_orders(schedule: PipelineSchedule, stages: int, micro_batches: int) -> list[list[Operation]]:
    """The orders of all stages; worker s has stage s."""
    return [stage_order(schedule, stages, micro_batches, stage) for stage in range(stages)]


def _data_edges(operation: Operation) -> tuple[Operation, ...]:
    """The operations whose data this one needs, where they exist."""
    stage, micro_batch = operation.stage, operation.micro_batch
    if operation.kind is Kind.FORWARD:
        return (Operation(Kind.FORWARD, stage - 1, micro_batch),)
    if operation.kind is Kind.WEIGHT:
        return (Operation(Kind.BACKWARD, stage, micro_batch),)
    return (
        Operation(Kind.BACKWARD, stage + 1, micro_batch),
        Operation(Kind.FORWARD, stage, micro_batch),
    )


def run_orders(orders: Sequence[Order], cost: OperationCost, transfer: TransferCost) -> Timeline:
    """Time the operations of all workers. A worker may hold any operations, also those of another replica's
    stage.

    An operation that no worker holds counts as done at the beginning. Raises ValueError where an operation
    stands in two orders, or where the orders wait for each other.
    """
    worker_of = {operation: worker for worker, order in enumerate(orders) for operation in order}
    if len(worker_of) != sum(len(order) for order in orders):
        raise ValueError("an operation of the pipeline stands in two places: give each to one worker once")
    needs, followers = _graph(orders, worker_of)
    waits = {operation: len(sources) for operation, sources in needs.items()}
    ready = deque(operation for operation, count in waits.items() if count == 0)
    starts: dict[Operation, float] = {}
    ends: dict[Operation, float] = {}
    decisive: dict[Operation, Operation] = {}
    while ready:
        operation = ready.popleft()
        worker, start = worker_of[operation], 0.0
        for source in needs[operation]:
            sender = worker_of[source]
            arrival = ends[source] + (transfer(sender, worker) if sender != worker else 0.0)
            if operation not in decisive or arrival > start:
                start, decisive[operation] = arrival, source
        starts[operation], ends[operation] = start, start + cost(worker, operation)
        for follower in followers.get(operation, ()):
            waits[follower] -= 1
            if waits[follower] == 0:
                ready.append(follower)
    if len(ends) != len(worker_of):
        stuck = min(str(operation) for operation in waits if operation not in ends)
        raise ValueError(f"the orders of the pipeline wait for each other, among others for {stuck}")
    busy = tuple(sum(ends[operation] - starts[operation] for operation in order) for order in orders)
    return Timeline(starts, ends, busy, _critical(ends, decisive))


def _graph(
    orders: Sequence[Order], worker_of: Mapping[Operation, int]
) -> tuple[dict[Operation, list[Operation]], dict[Operation, list[Operation]]]:
    """For each operation the operations that it waits for, and those that wait for it."""
    needs: dict[Operation, list[Operation]] = {}
    followers: dict[Operation, list[Operation]] = {}
    for order in orders:
        for place, operation in enumerate(order):
            sources = [source for source in _data_edges(operation) if source in worker_of]
            if place and order[place - 1] not in sources:
                sources.append(order[place - 1])
            needs[operation] = sources
            for source in sources:
                followers.setdefault(source, []).append(operation)
    return needs, followers


def _critical(
    ends: Mapping[Operation, float], decisive: Mapping[Operation, Operation]
) -> tuple[Operation, ...]:
    """The chain of operations that decides the end, first to last."""
    path: list[Operation] = []
    last = max(ends, key=lambda operation: ends[operation], default=None)
    while last is not None:
        path.append(last)
        last = decisive.get(last)
    return tuple(reversed(path))


def pipeline_timeline(schedule: PipelineSchedule, costs: PipelineCosts, transfer_s: float = 0.0) -> Timeline:
    """Time one iteration; ``transfer_s`` is the P2P time between neighbouring stages."""
    if not (transfer_s >= 0 and math.isfinite(transfer_s)):
        raise ValueError(f"a transfer between stages takes {transfer_s:g} s: give zero or more")
    return run_orders(
        pipeline_orders(schedule, costs.stages, costs.micro_batches),
        lambda _worker, operation: costs.of(operation, splits=schedule.splits),
        lambda _sender, _receiver: transfer_s,
    )


def makespan(schedule: PipelineSchedule, costs: PipelineCosts, transfer_s: float = 0.0) -> float:
    """The seconds of one iteration."""
    return pipeline_timeline(schedule, costs, transfer_s).makespan
