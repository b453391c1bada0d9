"""Worlds in which the leader orders layouts: a slow member leaves, and its launcher starts it again in the
ordered layout, and later in its usual one.

A launcher may lose an order, lack a device, or have a script that cannot build the layout. Members die
before, while and after one of them leaves; lighthouses fail over in the middle of a plan; an operator vetoes,
changes the mode and drains; a spare takes the place of a slow member. In some worlds the store is wiped.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from sim.adapt_worlds import AdaptWorld
from sim.faults import Aims
from sim.relayout_checks import LayoutChecks
from sim.store_worlds import wipe_store
from sim.unequal_worlds import LAYOUTS, PieceChecks, UnequalFollower, UnequalHead, UnequalWorld
from sim.world import Host, Settings

from fabric.model import LaunchedLayouts, Record, ReplicaProcess
from fabric.protocol.messages import leader_events as leader_io
from fabric.protocol.messages import member_events as io
from fabric.protocol.rules.lanes import ReplicaLayout

if TYPE_CHECKING:
    from sim.trainer import Trainer

NAMED = dict(
    zip(
        ("ranks=1", "ranks=2", "ranks=3", "ranks=2,tp=2", "ranks=2,layers=2+2", "ranks=2,layers=3+1"),
        LAYOUTS,
        strict=True,
    )
)
STRIKES = (
    *("slow replica",) * 9,
    *("lose launcher", "lose device", "veto", "allow", "allow", "adapt mode", "kill trainer"),
)
# The ordered member, another one or the leader dies with an order, while the member leaves, or later.
AIMS: tuple[Aims, ...] = (
    (("commit", "slow replica"), ("layout", "lighthouse crash"), ("layout", "kill trainer")),
    (("commit", "slow replica"), ("layout", "crash in a write"), ("left for a layout", "lighthouse crash")),
    (("commit", "slow replica"), ("layout", "kill trainer"), ("relaunched", "kill trainer")),
    (("commit", "slow replica"), ("layout", "cut off"), ("relaunched", "lose launcher")),
    (("commit", "slow replica"), ("layout", "cut off"), ("layout taken back", "cut off")),
    (("commit", "slow replica"), ("draining", "kill host"), ("layout", "reset link")),
    (("commit", "slow replica"), ("left for a layout", "kill two"), ("layout taken back", "kill trainer")),
    (("commit", "slow replica"), ("relaunched", "veto"), ("layout taken back", "cut off")),
    (("commit", "slow replica"), ("layout", "cut control"), ("relaunched", "kill everybody")),
    (("commit", "slow replica"), ("layout", "drain"), ("relaunched", "adapt mode")),
)
# Words of the leader's events, and the path that they show.
WORDS = {
    "an operator's veto keeps the layout": "layouts: kept by a veto",
    "the budget of": "layouts: kept by the budget",
    "no spare": "layouts: no spare stands by",
    "members that it needs": "layouts: kept, because too few would stay",
    "cannot build the layout": "layouts: refused by the script",
    "came back in the layout": "layouts: came back in another layout",
    "before it heard the order": "layouts: an order was not heard",
    "is back in its usual layout": "layouts: back in the usual layout",
    "again after": "layouts: taken back after the trial time",
    "an operator's veto forbids": "layouts: taken back by a veto",
    "the mode is": "layouts: taken back by the mode",
    "is drained: ": "layouts: replaced by a spare",
}
REQUIRED = (
    *sorted(set(WORDS.values())),
    *sorted({f"fault: {kind}" for kind in STRIKES}),
    "layouts: ordered",
    "layouts: left for a layout",
    "layouts: came back as ordered",
    "layouts: an order was lost with its launcher",
    "layouts: known to the next leader",
    "layouts: kept over a cold start",
    "layouts: known when the store was wiped",
    "shares: lowered",
    "during layout",
    "during layout taken back",
    "during left for a layout",
    "during relaunched",
    "finish",
)


@dataclass(slots=True)
class SimulatedLauncher:
    """The knowledge of one launcher; see ``fabric launch``. The next launcher knows none of it."""

    usual: str
    unbuildable: frozenset[str]  # what the script cannot build
    ordered: str = ""  # the layout of the newest order
    refused: list[str] = field(default_factory=list)
    lacks_a_device: bool = False  # whether the usual layout has too few devices, if it needs several
    running: str = ""

    def start(self) -> str:
        """The layout of the next process."""
        wanted = self.ordered or self.usual
        if wanted in self.unbuildable:
            self.refused += [] if wanted in self.refused else [wanted]
            self.ordered, wanted = "", self.usual
        if wanted == self.usual != "ranks=1" and self.lacks_a_device:
            wanted = "ranks=1"
        self.running = wanted
        return wanted


class RelayoutChecks(PieceChecks):
    """The checks of unequal replicas, and of the orders in every record."""

    layouts: LayoutChecks

    def written(self, before: Record | None, after: Record, revision: int) -> None:
        super().written(before, after, revision)
        self.layouts.written(before, after)


class RelayoutHead(UnequalHead):
    """Rank 0, which hands an order to its launcher when it ends."""

    def stop(self, order: io.Stop) -> None:
        """End, in some cases after a while in which the session stays open."""
        stop = super().stop

        def end() -> None:
            if order.layout:
                self.world.ordered_to(self, order.layout)
            stop(order)

        self.after(self.clockwork.random.choice((0.0, 0.0, 0.3, 1.0)), end)


class RelayoutWorld(AdaptWorld, UnequalWorld):
    """A world of launched replicas; a detector advises shares, layouts and spares."""

    trainer_class = RelayoutHead
    follower_class = UnequalFollower
    checks_class = RelayoutChecks
    strikes = STRIKES
    most_strikes = 16
    lasts_s = 9.0

    def __init__(self, seed: int, aims: Aims = ()) -> None:
        self.launchers: dict[str, SimulatedLauncher] = {}
        self.leaves: dict[str, str] = {}  # replica -> the order with which its process ends now
        self.is_wiped = seed % 8 == 6 and not aims
        if self.is_wiped:
            # Some process must know the epochs of the wiped store, or another epoch gets the same number.
            self.strikes = tuple(x for x in STRIKES if x not in ("lose launcher", "kill trainer"))
        aims = aims or (AIMS[seed % len(AIMS)] if seed % 4 and not self.is_wiped else ())
        super().__init__(seed, aims, faultless=self.is_wiped)
        assert isinstance(self.checks, RelayoutChecks)
        self.checks.layouts = LayoutChecks(self)
        self.blackout = False  # members die by orders, and without a lighthouse none goes on then
        if self.is_wiped:
            self.clockwork.at(self.clockwork.between(3.0, 8.0), self._wipe)

    def choose(self) -> Settings:
        settings, random = super().choose(), self.clockwork.random
        replicas = random.choice((2, 3, 3, 4))
        spare = f"r{replicas - 1}" if replicas > 2 and random.random() < 0.4 else ""
        policy = replace(settings.leader.policy, start_replicas=replicas - bool(spare))
        leader = replace(
            settings.leader,
            policy=policy,
            actions_per_hour=random.choice((1, 4, 8, 8)),
            trial_s=random.choice((2.0, 4.0, 8.0)),
        )
        return replace(
            settings,
            replicas=replicas,
            spare=spare,
            micro_batches=random.randrange(replicas, 7),
            shares=(),
            leader=leader,
        )

    # --- launchers -----------------------------------------------------------------------------------

    def next_layout(self, host: str) -> ReplicaLayout:
        """The layout in which the launcher of this host starts a process now."""
        if host not in self.launchers or not self.hosts[host].before:
            self.launchers[host] = self._another_launcher(self.launchers.get(host))
        launcher = self.launchers[host]
        before, name = launcher.running, launcher.start()
        self.clockwork.counts["path: a layout changed"] += before not in ("", name)
        self.clockwork.counts["layouts: came back as ordered"] += name == launcher.ordered
        self.clockwork.at(0.0, lambda: before not in ("", name) and self.happened("relaunched", host))
        return NAMED[name]

    def _another_launcher(self, old: SimulatedLauncher | None) -> SimulatedLauncher:
        """A launcher that knows no order. The script and the usual layout of a replica stay."""
        random = self.clockwork.random
        if old is not None:
            self.clockwork.counts["layouts: an order was lost with its launcher"] += bool(old.ordered)
            return SimulatedLauncher(old.usual, old.unbuildable)
        usual = random.choice(("ranks=2", "ranks=3", "ranks=2,tp=2", "ranks=2,layers=2+2"))
        others = sorted(NAMED.keys() - {usual, "ranks=1"})
        return SimulatedLauncher(usual, frozenset(random.sample(others, 2)))

    def lose_launcher(self, host: str) -> None:
        """A launcher's death ends its ranks."""
        if host in self.launchers:
            self.launchers[host] = self._another_launcher(self.launchers[host])
            self.kill_trainer(host)

    def launched(self, host: str) -> LaunchedLayouts:
        launcher = self.launchers[host]
        allowed = tuple(x for x in (launcher.usual, *NAMED) if x not in launcher.refused)
        return LaunchedLayouts(launcher.running, tuple(dict.fromkeys(allowed)), tuple(launcher.refused))

    def ordered_to(self, trainer: "Trainer", order: str) -> None:
        """Rank 0 gives the launcher this order, and ends."""
        assert isinstance(self.checks, RelayoutChecks)
        self.checks.layouts.obeyed(ReplicaProcess(trainer.host, trainer.incarnation), order)
        self.leaves[trainer.host] = order

    def exited(self, trainer: "Trainer", code: int, reason: str) -> None:
        order = self.leaves.pop(trainer.host, "")
        if not order:
            if reason.startswith("drained: "):
                assert isinstance(self.checks, RelayoutChecks)
                self.checks.layouts.drained(ReplicaProcess(trainer.host, trainer.incarnation))
            super().exited(trainer, code, reason)
            return
        self.launchers[trainer.host].ordered = order.partition(" ")[0]
        self.clockwork.counts["layouts: left for a layout"] += 1
        self.kill_trainer(trainer.host, self.clockwork.between(0.1, 1.0))
        self.happened("left for a layout", trainer.host)

    # --- the detector --------------------------------------------------------------------------------

    def _plan(self, record: Record) -> None:
        """Advise shares, or another layout of a slow member."""
        if self.clockwork.chance(0.2):
            super()._plan(record)
            return
        changed = {x.replica for x in record.adaptation.layouts}
        slow = [x for x in record.roster if x.process in self.slow and x.replica not in changed]
        if not slow:
            return
        process = self.clockwork.random.choice(slow).process
        order = self._order_for(process.replica)
        delay = self.clockwork.between(0.0, 0.6) if self.clockwork.chance(0.3) else 0.0
        self.clockwork.at(delay, lambda: self._advise_layout(record.epoch, process, order))

    def _order_for(self, replica: str) -> str:
        """A layout other than the present one, or empty: a spare shall take the replica's place."""
        random, launcher = self.clockwork.random, self.launchers[replica]
        if self.clockwork.chance(0.4 if self.settings.spare else 0.1):
            return ""
        layout = random.choice([x for x in NAMED if x not in (launcher.running, *launcher.refused)])
        return layout + random.choice(("", "", " without 1"))

    def _advise_layout(self, epoch: int, process: ReplicaProcess, order: str) -> None:
        assert isinstance(self.checks, RelayoutChecks)
        self.checks.layouts.advised.add((epoch, process, order))
        self._tell(leader_io.LayoutAdvised(epoch, process, order, 0.2, 3.0, "a rank is slow"))

    def told(self, effect: leader_io.RecordEvent) -> None:
        super().told(effect)
        if effect.kind in ("layout", "layout kept", "layout refused", "drained"):
            for words, name in WORDS.items():
                self.clockwork.counts[name] += words in effect.why
        if effect.kind == "layout" and "comes back in" in effect.why:
            is_back = f"layout {self.launchers[effect.about].usual}: " in effect.why
            self.happened("layout taken back" if is_back else "layout", effect.about)

    def _wipe(self) -> None:
        """Wipe the store. The next leader knows neither orders nor actions."""
        record = self.store.record
        orders = record is not None and bool(record.adaptation.layouts)
        self.clockwork.counts["layouts: known when the store was wiped"] += orders
        assert isinstance(self.checks, RelayoutChecks)
        self.checks.layouts.forget()
        wipe_store(self)

    # --- the end -------------------------------------------------------------------------------------

    def awaited(self) -> list[Host]:
        """All that nobody drained; the spare only where members are missing."""
        there = super().awaited()
        others = [x for x in there if x.name != self.settings.spare]
        return there if len(others) < self.settings.leader.policy.start_replicas else others

    def _is_whole(self) -> "object":
        """Return whether also every order has ended: each replica runs what the record says."""
        whole: Any = super()._is_whole()
        for launcher in self.launchers.values():
            launcher.lacks_a_device = False

        def done() -> bool:
            assert isinstance(self.checks, RelayoutChecks)
            record = self.store.record
            # After a wipe, members may still go on in the generation of the store before. A spare that stands
            # by gets no state, so it may know an older generation.
            needed = {x.name for x in self.awaited()}
            members = [x for x in self.living() if x.host in needed]
            if record is None or any(x.core.memory.state.generation != record.generation for x in members):
                return False
            return self.checks.layouts.has_ended(record) and bool(whole())

        return done

    def run(self) -> None:
        """Run the world; count also what the checker of layouts has met."""
        try:
            super().run()
        finally:
            assert isinstance(self.checks, RelayoutChecks)
            self.clockwork.counts.update(self.checks.layouts.met)
