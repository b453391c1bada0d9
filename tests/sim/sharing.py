"""Worlds of other ways to divide a batch: policy ``shrink``, data that only some replicas can read, and
poison.
"""

from msgspec.structs import replace
from sim.checkers import Violation
from sim.faults import Aims
from sim.trainer import Trainer
from sim.world import Settings, World

from fabric.model import Sharing


class SharingWorld(World):
    """A world with this ``sharing``, and as many data slots as replicas."""

    def __init__(
        self,
        seed: int,
        sharing: Sharing,
        faultless: bool = False,
        poisons: int = 0,
        aims: Aims = (),
    ) -> None:
        self.wanted = sharing
        self.poisons = poisons
        self.victims: dict[tuple[int, int], list[str]] = {}
        self.gave_up: dict[str, str] = {}
        self.stops_at_a_loss = False
        super().__init__(seed, faultless=faultless, aims=aims)
        if poisons:
            # no loss of all lighthouses: without a lighthouse no member goes on after a death
            self.blackout = False

    def choose(self) -> Settings:
        chosen = super().choose()
        random = self.clockwork.random
        poison = {
            (random.randrange(3, 12), random.randrange(chosen.micro_batches)) for _ in range(self.poisons)
        }
        sharing = replace(self.wanted, data_slots=chosen.replicas)
        return replace(chosen, sharing=sharing, poison=frozenset(poison))

    @property
    def stops(self) -> bool:
        return self.stops_at_a_loss or (bool(self.poisons) and self.wanted.on_poison == "stop")

    def run(self) -> None:
        if self.stops:
            self._demand("everybody is told that the job has failed", 60.0, self._is_finished)
        else:
            super().run()

    def killed_by(self, place: tuple[int, int], trainer: Trainer) -> None:
        self.victims.setdefault(place, []).append(trainer.name)

    def exited(self, trainer: Trainer, code: int, reason: str) -> None:
        if code == 1 and self.stops:
            self.gave_up[trainer.name] = reason
            self.hosts[trainer.host].finished = True
            self.kill_trainer(trainer.host)
            return
        super().exited(trainer, code, reason)

    def never_a_third(self) -> None:
        """Check that a micro-batch that killed two members was given to no third member."""
        for place, who in self.victims.items():
            if len(who) > 2:
                raise Violation(f"{place} was given to {who}")


class RackWorld(SharingWorld):
    """Three racks of two replicas each. One rack after the other dies within a step and comes back; without
    other faults. Two replicas can read each shard, and the job skips a shard without a reader.
    """

    def __init__(self, seed: int, redundancy: int = 2) -> None:
        super().__init__(seed, Sharing(readers=redundancy, on_loss="shrink"), faultless=True)
        for number, rack in enumerate(self.clockwork.random.sample("abc", 3)):
            self.clockwork.at(3.0 + 4.0 * number, lambda rack=rack: self._kill(rack))

    def choose(self) -> Settings:
        settings = super().choose()
        policy = replace(settings.leader.policy, min_replicas=1, start_replicas=6)
        return replace(
            settings,
            replicas=6,
            min_replicas=1,
            micro_batches=max(6, settings.micro_batches),
            sharing=replace(settings.sharing, data_slots=6),
            leader=replace(settings.leader, policy=policy),
            member=replace(settings.member, min_replicas=1),
            racks={f"r{n}": "aabbcc"[n] for n in range(6)},
        )

    def _kill(self, rack: str) -> None:
        names = [name for name in self.settings.racks if self.settings.racks[name] == rack]
        if sum(self.kill_trainer(name, 1.0 + n / 2) for n, name in enumerate(names)) == len(names):
            self.clockwork.counts["a rack died"] += 1

    def run(self) -> None:
        """Check that no part of a step is left out while two racks live."""
        self.clockwork.run(14.0, lambda: False)
        super().run()
        if self.checks.skipped:
            raise Violation(f"with a rack away {sorted(self.checks.skipped)[:3]} were skipped")


class NewReaderWorld(SharingWorld):
    """Three replicas, of which two can read each shard. A reader of a shard dies at its vote in the round
    before the epoch of a newcomer. So the newcomer is the only reader left. There are no other faults.
    """

    def __init__(self, seed: int, on_loss: str) -> None:
        self.struck = False
        super().__init__(seed, Sharing(readers=2, on_loss=on_loss), faultless=True)
        self.clockwork.at(1.5, lambda: self._kill("r2", 0.3))

    def choose(self) -> Settings:
        settings = super().choose()
        policy = replace(settings.leader.policy, min_replicas=1, start_replicas=3)
        return replace(
            settings,
            replicas=3,
            min_replicas=1,
            micro_batches=6,
            lighthouses=1,
            sharing=replace(settings.sharing, data_slots=3),
            leader=replace(settings.leader, policy=policy),
            member=replace(settings.member, min_replicas=1),
        )

    def happened(self, what: str, host: str) -> None:
        super().happened(what, host)
        record = self.store.record
        joins = record is not None and any(x.joining for x in record.roster)
        if joins and not self.struck and (what, host) == ("commit vote", "r1"):
            self.struck = True
            self.clockwork.at(0.0, lambda: self._kill("r1", 1.0))

    def _kill(self, host: str, back_in_s: float) -> None:
        self.kill_trainer(host, back_in_s)
