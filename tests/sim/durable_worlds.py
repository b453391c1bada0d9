"""Worlds with durable storage in which all processes die at once, twice, and no memory is left. The newest
complete checkpoint is intact, or one member cannot read it, or no member can, or all checkpoints are damaged.
Or the folder also has a checkpoint of another job, of a newer generation. Half of these worlds also have the
faults of plain worlds.

All members must begin a generation from the newest checkpoint that any member can load. If no checkpoint can
be loaded, the job must fail and no member may commit again.
"""

from typing import Any

from sim.checkers import demand
from sim.server import FLIPPED, Server
from sim.trainer import Trainer
from sim.world import World

from fabric.model import DURABLE, SnapshotRef

KINDS = ("whole", "one cannot read it", "damaged", "all damaged", "beside another job's")
REQUIRED = (
    *(f"durable: {kind}" for kind in KINDS),
    "durable: loaded",
    "durable: a whole job began from it",
    "durable: passed over for an older one",
    "durable: failed rather than begin from scratch",
)

OF_ANOTHER_JOB = SnapshotRef(1000, 1, "another job's")

# If two checkpoints do not exist by this time because of other faults, the world skips its strike.
LATEST_S = 14.0


class DurableWorld(World):
    """``storage`` holds the complete checkpoints, oldest first. ``unreadable``: replica -> the checkpoints
    that it cannot load.
    """

    may_be_alone = True  # whether half of the seeds have no other faults

    def __init__(self, seed: int, **options: Any) -> None:
        self.storage: list[SnapshotRef] = []
        self.unreadable: dict[SnapshotRef, set[str]] = {}
        self.kind = KINDS[seed // 2 % len(KINDS)]
        self.alone = self.may_be_alone and seed % 2 == 0  # whether this world has no other faults
        self.writing = True
        self.times_struck = 0
        self.expected: SnapshotRef | None = None  # the state from which the next generation must begin
        super().__init__(seed, **{"faultless": self.alone, **options})
        if self.alone and self.kind == KINDS[-1]:
            self.store.mishaps = 0.0  # a leader that is elected after the loss cannot tell jobs apart
        self.ends_early, self.until, self.blackout = False, 10**9, False
        self.faults.not_before, self.faults.over = LATEST_S + 2.0, False
        self.clockwork.at(1.0, self._strike_when_ready)

    # --- storage -----------------------------------------------------------------------------------

    def published(self, server: Server, ref: SnapshotRef) -> None:
        """Run one writer at a time; a writer that ends with its server leaves an incomplete checkpoint."""
        newest = max(((x.generation, x.step) for x in self.storage), default=(0, 0))
        if not self.writing or FLIPPED in ref.digest or (ref.generation, ref.step) <= newest:
            return

        def complete() -> None:
            if self.writing and server.alive and ref not in self.storage:
                self.storage.append(ref)
                self.storage.sort(key=lambda x: (x.generation, x.step))
                server.written = (ref,)

        server.after(self.clockwork.between(0.01, 0.2), complete)

    def listed(self) -> tuple[SnapshotRef, ...]:
        others = (OF_ANOTHER_JOB,) if self.alone and self.times_struck and self.kind == KINDS[-1] else ()
        return (*self.storage[-16:], *others)

    def can_load(self, host: str, ref: SnapshotRef) -> bool:
        return ref == OF_ANOTHER_JOB or (ref in self.storage and host not in self.unreadable.get(ref, ()))

    # --- the strikes ---------------------------------------------------------------------------------

    def _strike_when_ready(self) -> None:
        """Strike twice: the second time all must begin from the same checkpoint, because none was written
        since.
        """
        late = self.clockwork.now > LATEST_S
        if late or self.halted:
            self._resume_writing()
            return
        committed = self.checks.newest[0] > (self.expected.generation if self.expected else 0)
        ready = len(self.storage) >= 2 if not self.times_struck else committed and self._is_everybody_back()
        self.clockwork.at(0.05 if not ready or self.times_struck == 0 else 0.5, self._strike_when_ready)
        if ready and self.times_struck == 2:
            self._resume_writing()
        elif ready:
            self._strike()

    def _strike(self) -> None:
        self.times_struck += 1
        if self.times_struck == 1:
            self.writing = False
            self._damage()
        self.clockwork.counts[f"durable: {self.kind}"] += 1
        self.expected = next((x for x in reversed(self.storage) if self._loaders(x)), None)
        for name in self.hosts:
            self.kill_trainer(name)
            self.kill_server(name)

    def _damage(self) -> None:
        newest, hosts = self.storage[-1], set(self.hosts)
        if self.kind == "one cannot read it":
            self.unreadable[newest] = {self.clockwork.random.choice(sorted(hosts))}
        elif self.kind == "damaged":
            self.unreadable[newest] = hosts
        elif self.kind == "all damaged":
            self.unreadable = dict.fromkeys(self.storage, hosts)

    def _loaders(self, ref: SnapshotRef) -> set[str]:
        return set(self.hosts) - self.unreadable.get(ref, set())

    def _is_everybody_back(self) -> bool:
        return all(t is not None and t.alive for t in (h.trainer for h in self.hosts.values()))

    def _resume_writing(self) -> None:
        self.writing = True
        self.faults.not_before = min(self.faults.not_before, self.clockwork.now + 1.0)

    # --- what must hold --------------------------------------------------------------------------------

    def happened(self, what: str, host: str) -> None:
        super().happened(what, host)
        if what == "commit":
            trainer = self.hosts[host].trainer
            assert trainer is not None
            self._check_beginning(trainer)

    def _check_beginning(self, trainer: Trainer) -> None:
        """Check that the first step of a generation is committed on the base that the record names."""
        generation = trainer.core.memory.state.generation
        base = next(r.base for r in reversed(self.checks.records) if r.generation == generation)
        if trainer.main.step != base.step or not base.digest or FLIPPED in trainer.main.digest:
            return
        demand(
            trainer.main.digest == base.digest,
            f"{trainer.name} begins generation {generation} from {trainer.main.digest}, not {base.digest}",
        )
        if DURABLE in base.sources:
            self.clockwork.counts["durable: a whole job began from it"] += 1
        self._check_rung(SnapshotRef(base.generation, base.step, base.digest))

    def _check_rung(self, began: SnapshotRef) -> None:
        """Without other faults, check that the base is the newest checkpoint that any member can load."""
        if not self.times_struck or not self.alone:
            return
        demand(self.expected is not None, "nothing could be loaded, and the job began from scratch")
        demand(began == self.expected, f"the job began from {began}, and {self.expected} could be loaded")
        if self.storage[-1] != began and not self.writing:
            self.clockwork.counts["durable: passed over for an older one"] += 1

    def exited(self, trainer: Trainer, code: int, reason: str) -> None:
        if code == 1 and "no state is left that could be loaded" in reason:
            lost = self.times_struck and all(self._is_lost(x, reason) for x in self.storage)
            demand(bool(lost), f"{trainer.name} was told that {reason}")
            self.clockwork.counts["durable: failed rather than begin from scratch"] += 1
            self.halted = True
            return
        super().exited(trainer, code, reason)

    def _is_lost(self, ref: SnapshotRef, reason: str) -> bool:
        """Whether nobody can load the checkpoint, or the members outvoted the last one that held its state.

        Such a state may be wrong, so a person decides. Where nothing else happens, no member is outvoted.
        """
        outvoted = f"step {ref.step} of generation {ref.generation} is not trusted: " in reason
        return not self._loaders(ref) or (outvoted and not self.alone)


def seeds_of(kind: str) -> range:
    """The seeds of the worlds of ``kind`` without other faults."""
    return range(2 * KINDS.index(kind), 10**9, 2 * len(KINDS))
