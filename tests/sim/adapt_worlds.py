"""Worlds with slow replicas: a detector advises shares while replicas die, join and leave.

Lighthouses fail over in the middle of a plan, and an operator changes the mode and vetoes. The advice may
come late, twice, for an epoch that is over, for a process that is dead, or to two leaders.
"""

from msgspec.structs import replace
from sim.faults import Aims
from sim.share_checks import ShareChecks
from sim.world import Settings, World

from fabric.model import MemberSpeed, Record
from fabric.protocol.messages import leader_events as io

STRIKES = ("slow replica", "slow replica", "slow replica", "well again", "veto", "allow", "adapt mode")
# The leader dies with a plan, or in its write; the slow replica or another one dies with new shares.
AIMS: tuple[Aims, ...] = (
    (("commit", "slow replica"), ("shares", "lighthouse crash")),
    (("commit", "slow replica"), ("shares", "crash in a write"), ("decided", "slow replica")),
    (("commit", "slow replica"), ("shares", "kill trainer"), ("admitted", "slow replica")),
    (("commit", "slow replica"), ("shares", "kill host"), ("commit vote", "slow replica")),
)
# Words of the leader, and the path that they show.
WORDS = {
    "the budget of": "shares: kept by the budget",
    "an operator's veto keeps": "shares: kept by a veto",
}
# The rare events that must occur in a run over many of these worlds.
REQUIRED = (
    *(f"fault: {kind}" for kind in dict.fromkeys(STRIKES)),
    *WORDS.values(),
    "shares: lowered",
    "shares: given back",
    "shares: taken back by an order",
    "shares: a slow process left",
    "shares: a newcomer beside slow members",
    "shares: known to the next leader",
    "shares: late advice",
    "during shares",
)


class AdaptWorld(World):
    """A world whose processes are healthy or slow; a detector reads the record and advises, sometimes too
    late.
    """

    strikes = STRIKES
    most_strikes = 9
    lasts_s = 4.5  # the faults end not before this time

    def __init__(self, seed: int, aims: Aims = (), faultless: bool = False) -> None:
        self.slow: dict[tuple[str, int], int] = {}  # process -> its speed in thousandths
        self._heard = 0  # the newest election that knew of slow members
        self._wish: str | None = None  # the mode that the operator wants in the end
        aims = aims or (AIMS[seed // 2 % len(AIMS)] if seed % 2 and not faultless else ())
        super().__init__(seed, faultless=faultless, aims=aims)
        random, leader = self.clockwork.random, self.settings.leader
        self.checks.shares = ShareChecks(self.shares_of, self.settings.micro_batches, leader.actions_per_hour)
        self.faults.not_before = self.lasts_s
        for _ in range(random.choice((self.most_strikes - 5, self.most_strikes - 3, self.most_strikes))):
            kind, time = random.choice(self.strikes), self.clockwork.between(0.5, self.lasts_s)
            self.clockwork.at(time, lambda kind=kind: self.faults.strike(kind))
        self.clockwork.at(0.5, self._detect)

    def choose(self) -> Settings:
        settings, random = super().choose(), self.clockwork.random
        replicas = random.choice((2, 3, 3, 4, 5))
        policy = replace(settings.leader.policy, start_replicas=replicas)
        unequal = random.random() < 0.3
        return replace(
            settings,
            replicas=replicas,
            lighthouses=2,
            micro_batches=random.randrange(replicas, 13),
            leader=replace(settings.leader, policy=policy, actions_per_hour=random.choice((1, 1, 2, 4))),
            member=replace(settings.member, adapt="act"),
            shares=tuple(random.choice((1, 1, 2)) for _ in range(replicas)) if unequal else (),
        )

    # --- the detector --------------------------------------------------------------------------------

    def slow_down(self, name: str) -> None:
        """Make the present process of this replica slow."""
        host = self.hosts[name]
        if host.trainer is not None and host.trainer.alive:
            self.slow[name, host.incarnation] = self.clockwork.random.choice((20, 100, 333, 500, 750))

    def _detect(self) -> None:
        self.clockwork.at(self.clockwork.between(0.05, 0.3), self._detect)
        record = self.store.record
        if record is not None and not record.complete:
            self._plan(record)

    def _plan(self, record: Record) -> None:
        """Advise the shares that follow the speeds of the members."""
        speeds = tuple(
            MemberSpeed(x.replica, x.incarnation, self.slow[x.process])
            for x in record.roster
            if x.process in self.slow
        )
        if not speeds and not record.adaptation.speeds:
            return
        late = self.clockwork.chance(0.3)
        self.clockwork.counts["shares: late advice"] += late
        delay = self.clockwork.between(0.0, 0.6) if late else 0.0
        self.clockwork.at(delay, lambda: self._advise(record, speeds))

    def _advise(self, record: Record, speeds: tuple[MemberSpeed, ...]) -> None:
        assert self.checks.shares is not None
        self.checks.shares.advise(record.epoch, speeds)
        self._tell(io.SharesAdvised(record.epoch, speeds, 0.25, 0.0, "a test"))

    def _tell(self, event: io.SharesAdvised | io.Operator) -> None:
        for lighthouse in self.lighthouses.values():
            if lighthouse.leads:
                lighthouse.run(lambda x=lighthouse: x.feed(event) if x.core is not None else None)

    def say_mode(self, mode: str) -> None:
        """The operator sets the mode."""
        self._tell(io.Operator("adapt", "", "operator", "a test", mode=mode))

    def told(self, effect: io.RecordEvent) -> None:
        super().told(effect)
        for words, name in WORDS.items():
            self.clockwork.counts[name] += effect.kind == "shares kept" and words in effect.why

    # --- the end -------------------------------------------------------------------------------------

    def _is_whole(self) -> "object":
        """Return whether all replicas are back and healthy, with no share lowered.

        In every second world the operator switches the adaptation off instead, while replicas are slow.
        """
        whole = super()._is_whole()
        if self.clockwork.seed % 2:
            self.slow.clear()
        last = [0.0]

        def done() -> bool:
            record = self.store.record
            if self.clockwork.now - last[0] > 0.5:
                last[0] = self.clockwork.now
                self.say_mode("act" if self.clockwork.seed % 2 else "off")
            is_whole = bool(whole())  # type: ignore[operator]  # here another feature takes back its orders
            return is_whole and record is not None and not record.adaptation.speeds

        return done

    def run(self) -> None:
        """Run the world; count also what the checker of shares has met."""
        try:
            super().run()
        finally:
            assert self.checks.shares is not None
            self.clockwork.counts.update(self.checks.shares.met)
