"""Worlds in which a living member delays the others: by a hung data plane, slow user code, a stuck control
thread, or a newcomer's state that does not arrive. Without other faults the other members must go on during
the delay.
"""

from msgspec.structs import replace
from sim.checkers import demand
from sim.coverage import STALL_REASONS
from sim.world import World

from fabric.protocol.messages import leader_events
from fabric.protocol.messages import member_events as io

KINDS = ("hung", "slow user code", "mute", "starving")
REQUIRED = (
    *STALL_REASONS.values(),
    "stall: round given up",
    *(f"stall: {kind}" for kind in KINDS),
    "stall: the others went on",
)

EXCHANGE_S, USER_CODE_S = 0.5, 1.5
# The leader must evict the member that causes a stall within this many seconds.
FREE_S = 4.0
# A member that came back and hangs again: its first round has time for the exchange and for its updates.
RETURNED_FREE_S = FREE_S + EXCHANGE_S + USER_CODE_S


class StallWorld(World):
    """A world with one kind of delay in one replica for some seconds; half of the worlds have no other
    faults.
    """

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.alone = seed % 2 == 0  # whether this world has no other faults
        self.culprit = ""
        super().__init__(seed, tracing, faultless=self.alone)
        clockwork, settings = self.clockwork, self.settings
        settings.member = replace(settings.member, exchange_s=EXCHANGE_S, user_code_s=USER_CODE_S)
        self.kind = KINDS[seed // 2 % len(KINDS)]
        if self.kind == "starving":
            settings.member = replace(settings.member, replay=False, digest_every=0)
        self.blackout = False
        self.returned = 0.0  # when the culprit last came back
        self.faults.not_before = 11.0
        self.faults.over = False
        self.culprit = clockwork.random.choice(sorted(self.hosts))
        began, ended = clockwork.between(1.0, 2.0), clockwork.between(9.0, 10.0)
        clockwork.at(began, self._begin)
        clockwork.at(began + FREE_S, lambda: self._end_later(ended - clockwork.now))

    def _affected(self) -> set[str]:
        return (self.hung, self.lingering, self.mute, self.starving)[KINDS.index(self.kind)]

    def _begin(self) -> None:
        self._affected().add(self.culprit)
        self.clockwork.counts[f"stall: {self.kind}"] += 1
        if self.kind == "starving":
            self.kill_trainer(self.culprit)

    def _end_later(self, seconds: float) -> None:
        free = self._others()
        self.clockwork.at(seconds, lambda: self._end(free))

    def _end(self, free: list[int], waited: bool = False) -> None:
        if self.alone and self.settings.replicas > max(self.settings.min_replicas, 1):
            others, who = self._others(), f"{self.culprit} is {self.kind}"
            left_s = self.returned + RETURNED_FREE_S - self.clockwork.now
            if left_s > 0 and not waited and min(others) <= max(free):
                self.clockwork.at(left_s, lambda: self._end(free, waited=True))
                return
            demand(min(others) > max(free), f"the others stand at {others} while {who}")
            self.clockwork.counts["stall: the others went on"] += 1
        self._affected().clear()
        for trainer in self.living():
            trainer.feed(io.Tick())

    def _others(self) -> list[int]:
        return [t.main.step for t in self.living() if t.host != self.culprit]

    def told(self, effect: leader_events.RecordEvent) -> None:
        super().told(effect)
        if effect.kind == "epoch" and f"{self.culprit} joins" in effect.why:
            self.returned = self.clockwork.now
        if self.alone and effect.kind == "evicting":
            fair = effect.about == self.culprit
            demand(
                fair, f"{effect.about} is blamed ({effect.why}), and only {self.culprit} is ever {self.kind}"
            )


def seeds_of(kind: str) -> range:
    """The seeds of the worlds with ``kind`` as the only fault."""
    return range(2 * KINDS.index(kind), 10**9, 2 * len(KINDS))
