"""The policies that the simulator compares: what a step costs under each, and what a failure does."""

from dataclasses import dataclass, field

from fabric.model import Member, apportion
from fabric.plan.engine import FailurePolicy, MaskingCost
from fabric.protocol.rules.assignment import spread
from fabric.protocol.rules.spare import StackedShards, block_layout, ring_layout

# Seconds to remove failed groups from the communicator, from SPARe's published runs.
SHRINK_S = 0.1
# For so many members the trainers' own function spreads the micro-batches.
_FEW = 32


@dataclass(slots=True)
class CheckpointRestart(FailurePolicy):
    """Synchronous training: every failure restarts all groups from the last checkpoint.

    ``interrupts``: whether a failure ends the step at once; otherwise it is noticed at the exchange.
    """

    interrupts: bool = True
    label: str = "checkpoint and restart"


@dataclass(slots=True)
class Replication(FailurePolicy):
    """Traditional replication: the r groups of a block all compute its r types, in every step."""

    redundancy: int
    _left: list[int] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"replication, r = {self.redundancy}"

    def begin(self, groups: int) -> None:
        block_layout(groups, self.redundancy)  # raises ValueError for an impossible layout
        blocks = -(-groups // self.redundancy)
        self._left = [min(self.redundancy, groups - block * self.redundancy) for block in range(blocks)]

    def slots(self) -> float:
        return float(self.redundancy)

    def fail(self, groups: list[int]) -> MaskingCost | None:
        for group in groups:
            self._left[group // self.redundancy] -= 1
        return None if 0 in self._left else MaskingCost(0.0, 0, SHRINK_S)


@dataclass(slots=True)
class SPARePolicy(FailurePolicy):
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


@dataclass(slots=True)
class FtHsdp(FailurePolicy):
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


@dataclass(slots=True)
class ConstantBatch(FailurePolicy):
    """This project's policy: the global batch stays equal; survivors compute the dead groups' micro-batches.

    Every group can read every shard. After a failed round the survivors keep their gradients and compute the
    micro-batches of the dead. A repaired group catches up while the others step, and joins at a step
    boundary.

    ``micro_batches``: per group and step (G). ``readmits``: False models groups that return only by a global
    restart, as in SPARe. That restart is planned (below ``restart_below`` living groups, after a save), so no
    step is lost. ``stall_s``: from a death to the retried round. ``join_stall_s``: the wait of all groups for
    a join.
    """

    micro_batches: int = 8
    stall_s: float = 0.5
    join_stall_s: float = 0.0
    readmits: bool = True
    restart_below: int = 1
    _groups: int = 0
    _alive: set[int] = field(default_factory=set)
    _sizes: dict[int, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"constant batch, {self.micro_batches} micro-batches" + (
            "" if self.readmits else ", planned restarts"
        )

    def begin(self, groups: int) -> None:
        if self.micro_batches < 1:
            raise ValueError(f"a group computes at least 1 micro-batch, not {self.micro_batches}")
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
        return self.join_stall_s

    def restart_due(self) -> bool:
        return not self.readmits and len(self._alive) < self.restart_below


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
