"""Worlds in which hosts give notice before they are killed, with their memory, some seconds later.

If every host gives notice, the newest committed state must be in storage before the last process is killed.
The next generation begins from it. If one host gives no notice, the job goes on there, in the same
generation. In half of the worlds one process is killed just before: notice meets a forced epoch or a join.
"""

from itertools import pairwise

from sim.checkers import demand
from sim.main_thread import MainThread
from sim.server import FLIPPED
from sim.trainer import Trainer
from sim.world import World

from fabric.model import SnapshotRef
from fabric.protocol.messages import member_events as io

KINDS = ("all at once", "one by one", "all but one", "no lighthouse", "the saver dies", "slow storage")
# What happens when the first member begins to save: nothing, or the leader loses sight of it.
DISTURBANCES = ("", "session", "leader")
REQUIRED = (
    *(f"notice: {kind}" for kind in KINDS),
    "notice: saved",
    "notice: a job of one writer",
    "notice: drained",
    "notice: the saver was killed",
    "notice: the saver lost its session",
    "notice: another leader came while one saved",
    "notice: began from the saved state",
)
NOTICE_S = 8.0  # from the notice of a host to its end
# The same where the saver and the lighthouse die at once. The next leader counts no absent member as dead
# before the lease, the grace period and a full queue of connections are over; then the next member saves.
LONG_NOTICE_S = 16.0
SLOW_S = 60.0  # how long slow storage takes for a state
LATEST_S = 6.0  # a job that is not whole by this time gets no notice


class NoticeMain(MainThread):
    """Writes the state to storage when the core says so."""

    def take(self, order: io.TakeSnapshot) -> None:
        super().take(order)
        if order.durable:
            demand(order.step == self.step, f"told to save {order.step} with the state at {self.step}")
            world, trainer = self.trainer.world, self.trainer
            assert isinstance(world, NoticeWorld)
            world.begin_saving(
                trainer, SnapshotRef(trainer.core.memory.state.generation, self.step, self.digest)
            )


class NoticeTrainer(Trainer):
    main_class = NoticeMain


class NoticeWorld(World):
    """``storage``: the complete checkpoints, oldest first. ``leaving``: the hosts that gave notice."""

    trainer_class = NoticeTrainer

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.storage: list[SnapshotRef] = []
        self.kind = KINDS[seed % len(KINDS)]
        self.disturbance = DISTURBANCES[seed // len(KINDS) % len(DISTURBANCES)]
        two_faults = self.kind == "the saver dies" and self.disturbance == "leader"
        self.notice_s = LONG_NOTICE_S if two_faults else NOTICE_S
        self.leaving: set[str] = set()
        self.savers: list[str] = []
        self.generation = 0  # of the job when the notice came
        self.checked = False
        super().__init__(seed, tracing, faultless=True)
        self.ends_early, self.until = False, 10**9
        self.faults.not_before = 10.0**9  # this world ends its faults itself
        self.clockwork.at(1.0 + self.clockwork.between(0.0, 2.0), self._strike_when_ready)

    # --- storage -----------------------------------------------------------------------------------

    def begin_saving(self, trainer: Trainer, ref: SnapshotRef) -> None:
        """Let the checkpoint server write this state; the trainer hears of the end if it still lives."""
        self.savers.append(trainer.name)
        record = self.store.record
        roster = record.roster if record is not None else ()
        stay = [x.replica for x in roster if x.replica not in self.leaving and not x.joining]
        demand(not stay, f"{trainer.name} saves the state, and {stay} hold it without notice")
        others = [x for x in roster if x.replica != trainer.host and not x.leaving]
        self._disturb(trainer)
        if self.kind == "the saver dies" and len(self.savers) == 1 and others:
            self.clockwork.counts["notice: the saver was killed"] += 1
            self.clockwork.at(self.clockwork.between(0.0, 0.3), lambda: self._kill(trainer.host))
        seconds = SLOW_S if self.kind == "slow storage" else self.clockwork.between(0.3, 3.0)

        def written() -> None:
            if ref not in self.storage:
                self.storage.append(ref)
            self.clockwork.counts["notice: saved"] += 1
            trainer.feed(io.Saved(ref.step))

        trainer.server.after(seconds, written)

    def _disturb(self, trainer: Trainer) -> None:
        """End the session of the first saver for a moment, or let its lighthouse die; who saves stays so."""
        leader = next((x.name for x in self.lighthouses.values() if x.leads), "")
        if self.disturbance == "session" and leader:
            self.clockwork.counts["notice: the saver lost its session"] += 1
            self.network.reset_between(trainer.host, leader)
        elif self.disturbance == "leader" and leader:
            self.clockwork.counts["notice: another leader came while one saved"] += 1
            self.kill_lighthouse(leader)
            self.clockwork.at(0.1, lambda: self.start_lighthouse(leader))
        self.disturbance = ""

    def listed(self) -> tuple[SnapshotRef, ...]:
        return tuple(self.storage[-16:])

    def can_load(self, host: str, ref: SnapshotRef) -> bool:
        return ref in self.storage

    # --- the notice ----------------------------------------------------------------------------------

    def _strike_when_ready(self) -> None:
        living = self.living()
        if self.checks.newest[1] < 3 or len(living) < len(self.hosts):
            self.faults.over = self.clockwork.now > LATEST_S
            if not self.faults.over:
                self.clockwork.at(0.2, self._strike_when_ready)
            return
        self.clockwork.counts[f"notice: {self.kind}"] += 1
        self.generation = self.checks.newest[0]
        names = self.clockwork.random.sample(sorted(self.hosts), len(self.hosts))
        if self.kind != "no lighthouse" and self.clockwork.chance(0.5):
            self.kill_trainer(self.clockwork.random.choice(names))
        if self.kind == "all but one":
            names = names[:-1]
        if self.kind == "no lighthouse":
            for name in self.lighthouses:
                self.kill_lighthouse(name)
        spread_s = 4.0 if self.kind in ("one by one", "all but one") else 0.5
        times = {name: self.clockwork.between(0.0, spread_s) for name in names}
        for name, begin in times.items():
            self.clockwork.at(begin, lambda name=name: self._notice(name))
            self.clockwork.at(begin + self.notice_s, lambda name=name: self._kill(name))
        self.clockwork.at(max(times.values()) + self.notice_s + 0.1, lambda: self._judge(names))

    def _notice(self, name: str) -> None:
        self.leaving.add(name)
        trainer = self.hosts[name].trainer
        if trainer is not None and trainer.alive:
            trainer.feed(io.Noticed())

    def _kill(self, name: str) -> None:
        trainer = self.hosts[name].trainer
        demand(
            self.kind != "all but one" or trainer is None or not trainer.alive,
            f"{name} was not drained in the time that it had",
        )
        self.kill_trainer(name)
        self.kill_server(name)

    def start_trainer(self, name: str) -> None:
        if name not in self.leaving:
            super().start_trainer(name)

    def exited(self, trainer: Trainer, code: int, reason: str) -> None:
        if trainer.host in self.leaving:
            demand(code == 75, f"{trainer.name} had notice, and ends with {code}: {reason}")
            if reason.startswith("drained"):
                self.clockwork.counts["notice: drained"] += 1
        super().exited(trainer, code, reason)

    def _judge(self, names: list[str]) -> None:
        """Judge when the hosts are gone, then start the job again on other hosts."""
        newest = max(((x.generation, x.step) for x in self.storage), default=(0, 0))
        if self.kind == "all but one":
            self._began_again_without_loss(names)
        elif self.kind != "slow storage":
            demand(newest >= self.checks.newest, f"{self.checks.newest} was committed, {newest} is saved")
            self._count_savers()
        self.checked = True
        for name in self.lighthouses:
            self.start_lighthouse(name)
        self.leaving.clear()
        for name in names:
            self.clockwork.at(self.clockwork.between(0.0, 1.0), lambda name=name: self.start_trainer(name))
        self.faults.over = True

    def _began_again_without_loss(self, names: list[str]) -> None:
        """A job may begin again only if all members had notice, and only from its newest committed state.

        This world may kill the one process without notice when the notices come. The replica's next process
        holds no state, so the others save theirs and end, and it begins from there.
        """
        records = self.checks.records
        for before, after in pairwise(records):
            if after.generation <= max(before.generation, self.generation):
                continue
            living = {(x.host, x.incarnation) for x in self.living()}
            there = [x for x in before.roster if x.replica not in names and not x.joining]
            beside = [x.replica for x in there if (x.replica, x.incarnation) in living]
            demand(not beside, f"the job began again beside the living member {beside}")
            newest = 1 + max(step for number, step in self.checks.gradients if number < after.generation)
            base = after.base.step
            demand(base == newest, f"step {newest} was committed, and the job began again from {base}")
            self.clockwork.counts["notice: began again after the only stayer had died"] += 1

    def _count_savers(self) -> None:
        if len({name.partition(".")[0] for name in self.savers}) == 1:
            self.clockwork.counts["notice: a job of one writer"] += 1
        elif self.kind in ("all at once", "one by one", "no lighthouse"):
            demand(False, f"{self.savers} have saved the state: one writer is enough")

    # --- what must hold --------------------------------------------------------------------------------

    def happened(self, what: str, host: str) -> None:
        super().happened(what, host)
        if what != "commit" or not self.checked or self.kind in ("all but one", "slow storage"):
            return
        trainer = self.hosts[host].trainer
        assert trainer is not None
        base = next(
            r.base
            for r in reversed(self.checks.records)
            if r.generation == trainer.core.memory.state.generation
        )
        if FLIPPED not in base.digest and trainer.main.step == base.step:
            demand(base.step == self.storage[-1].step, f"the job began from {base}, not {self.storage[-1]}")
            self.clockwork.counts["notice: began from the saved state"] += 1


def seeds_of(kind: str) -> range:
    """The seeds of the worlds of ``kind``."""
    return range(KINDS.index(kind), 10**9, len(KINDS))
