"""Injects the faults of a world, at random times and at chosen events."""

from typing import TYPE_CHECKING

from sim.clockwork import Process
from sim.server import FLIPPED

from fabric.protocol.messages import leader_events
from fabric.protocol.messages import network as m
from fabric.protocol.messages.member_events import FromLeader

if TYPE_CHECKING:
    from sim.world import World

KINDS = (
    *("kill trainer",) * 5,
    *("kill host",) * 2,
    "kill server",
    *("pause trainer",) * 2,
    "pause host",
    "partition",
    "one-way partition",
    "isolate",
    "reset link",
    "reset link",
    "reset session",
    "lighthouse crash",
    "lighthouse pause",
    "lighthouse crash",
    "kill everybody",
    "kill two",
    "crash in a write",
    "store down",
    "store restart",
    *("drain",) * 3,
    "evict",
    "slow network",
    "move host",
    "cut control",
    "old words",
    "flip on the wire",
    "flip in a result",
    "flip in a state",
)
# A fault may wait for one of these events, which the simulator sees in notes, messages and effects.
TRIGGERS = (
    "commit",
    "commit beside a newcomer",
    *("commit vote", "resume", "decided", "admitted", "draining", "closing") * 2,
    *("abort", "fetch", "install", "outside", "cold start"),
)
# Trigger -> the faults that do the most damage at it.
LIKELY = {
    "decided": "lighthouse crash",
    "resume": "kill host",
    "commit": "kill trainer",
    "commit beside a newcomer": "kill trainer",
    "admitted": "lighthouse crash",
    "draining": "lighthouse crash",
    "closing": "lighthouse crash",
    "cold start": "lighthouse crash",
}

# Pairs of a trigger to wait for, and the fault that follows it.
Aims = tuple[tuple[str, str], ...]


class Faults:
    """Injects ``count`` faults (None: as the seed chooses), which all end within some seconds. ``aims`` adds
    pairs of a trigger and a fault, for worlds that aim at one rare moment.
    """

    def __init__(self, world: "World", count: int | None, aims: Aims = ()) -> None:
        self.world = world
        self.over = False
        self.not_before = 0.0  # the earliest time at which the faults may end
        self.waiting: list[tuple[str, str, float]] = []  # trigger, kind and delay of each waiting fault
        clockwork = world.clockwork
        number = clockwork.random.choice((1, 1, 2, 2, 3, 4, 5)) if count is None else count
        time = clockwork.between(0.2, 2.5)
        for _ in range(number):
            kind = clockwork.random.choice(KINDS)
            clockwork.at(time, lambda kind=kind: self.strike(kind))
            if clockwork.chance(0.4):
                trigger, other = clockwork.random.choice(TRIGGERS), clockwork.random.choice(KINDS)
                if clockwork.chance(0.5):
                    other = LIKELY.get(trigger, other)
                wait = 0.0 if clockwork.chance(0.3) else clockwork.between(0.0, 0.05)
                clockwork.at(time, lambda t=trigger, k=other, w=wait: self.waiting.append((t, k, w)))
            time += clockwork.random.choice((0.0, 0.02, 0.3, 1.0)) * clockwork.between(0.5, 1.5)
        for trigger, kind in aims:
            delay = clockwork.between(0.0, 0.004) if clockwork.chance(0.5) else 0.0
            aimed = clockwork.between(0.6, 1.5)
            self.not_before = 3.0
            clockwork.at(aimed, lambda t=trigger, k=kind, d=delay: self.waiting.append((t, k, d)))
        clockwork.at(time + clockwork.between(0.3, 3.0), self._end)

    def _end(self) -> None:
        left = self.not_before - self.world.clockwork.now
        if left > 0:
            self.world.clockwork.at(left + 0.01, self._end)
        else:
            self.over = True

    def happened(self, what: str, host: str) -> None:
        """Inject the faults that waited for this trigger."""
        if self.over or not self.waiting:
            return
        for item in [w for w in self.waiting if w[0] == what]:
            self.waiting.remove(item)
            trigger, kind, delay = item
            self.world.clockwork.counts[f"during {trigger}"] += 1
            self.world.clockwork.at(delay, lambda kind=kind: self.strike(kind, host))

    def strike(self, kind: str, host: str = "") -> None:
        """Inject a fault, at ``host`` if the fault concerns a host."""
        if self.over:
            return
        world, clockwork = self.world, self.world.clockwork
        names = list(world.hosts)
        name = host if host and clockwork.chance(0.6) else clockwork.random.choice(names)
        other = clockwork.random.choice([n for n in names if n != name])
        clockwork.trace("FAULT", f"{kind} {name} {other}")
        world.struck(kind)
        getattr(self, "_" + kind.replace(" ", "_").replace("-", "_"))(name, other)

    # --- the kinds ---------------------------------------------------------------------------------

    def _kill_trainer(self, name: str, _: str) -> None:
        self.world.kill_trainer(name)

    def _kill_host(self, name: str, _: str) -> None:
        self.world.kill_server(name)
        self.world.kill_trainer(name)

    def _kill_server(self, name: str, _: str) -> None:
        self.world.kill_server(name)

    def _move_host(self, name: str, _: str) -> None:
        """Start the replica on another host with another time of day, which cannot prove the end of the old
        process.
        """
        self.world.kill_server(name)
        self.world.kill_trainer(name)
        host = self.world.hosts[name]
        host.above = 0
        host.before, host.time_of_day = (), self.world.clockwork.between(-4.0, 1.0)

    def _kill_two(self, name: str, other: str) -> None:
        self.world.kill_trainer(name)
        self.world.clockwork.at(
            self.world.clockwork.between(0.0, 0.03), lambda: self.world.kill_trainer(other) and None
        )

    def _kill_everybody(self, name: str, _: str) -> None:
        servers_too = self.world.clockwork.chance(0.3)
        for each in list(self.world.hosts):
            if servers_too and self.world.clockwork.chance(0.6):
                self.world.kill_server(each)
            self.world.kill_trainer(each)

    def _pause(self, process: Process | None, seconds: float) -> None:
        if process is not None and process.alive:
            process.pause()
            self.world.clockwork.at(seconds, process.resume)

    def _pause_trainer(self, name: str, _: str) -> None:
        self._pause(self.world.hosts[name].trainer, self._long_or_short())
        server = self.world.hosts[name].server
        server.after(0.01, server.status)

    def _pause_host(self, name: str, _: str) -> None:
        seconds = self._long_or_short()
        self._pause(self.world.hosts[name].trainer, seconds)
        self._pause(self.world.hosts[name].server, seconds)

    def _long_or_short(self) -> float:
        clockwork = self.world.clockwork
        return clockwork.between(0.02, 0.3) if clockwork.chance(0.5) else clockwork.between(0.3, 4.0)

    def _partition(self, name: str, other: str) -> None:
        self.world.network.block(name, other)
        self.world.network.block(other, name)
        self._heal_later()

    def _one_way_partition(self, name: str, other: str) -> None:
        if self.world.clockwork.chance(0.5):
            other = self.world.clockwork.random.choice(list(self.world.lighthouses))
        pair = (name, other) if self.world.clockwork.chance(0.5) else (other, name)
        self.world.network.block(*pair)
        self._heal_later()

    def _isolate(self, name: str, _: str) -> None:
        self._block_all(name)
        self._heal_later()

    def _block_all(self, name: str) -> None:
        for other in [*self.world.hosts, *self.world.lighthouses]:
            if other != name:
                self.world.network.block(name, other)
                self.world.network.block(other, name)

    def _cut_control(self, name: str, _: str) -> None:
        """Cut all replicas but one, which starts again, from the lighthouse; the others go on."""
        for other in self.world.hosts:
            for lighthouse in self.world.lighthouses if other != name else ():
                self.world.network.block(other, lighthouse)
                self.world.network.block(lighthouse, other)
        self.world.kill_trainer(name)
        seconds = self.world.clockwork.between(0.5, 8.0)
        self.not_before = self.world.clockwork.now + seconds
        self.world.clockwork.at(seconds, self.world.network.heal)

    def _heal_later(self) -> None:
        self.world.clockwork.at(self._long_or_short() * 1.5, self.world.network.heal)

    def _reset_link(self, name: str, other: str) -> None:
        self.world.network.reset_between(name, other)

    def _reset_session(self, name: str, _: str) -> None:
        for lighthouse in self.world.lighthouses:
            self.world.network.reset_between(name, lighthouse)

    def _leader_name(self) -> str:
        lighthouses = self.world.lighthouses
        return next((n for n, x in lighthouses.items() if x.leads), next(iter(lighthouses)))

    def _lighthouse_crash(self, _: str, __: str) -> None:
        self._crash(self._leader_name())

    def _crash(self, name: str) -> None:
        self.world.kill_lighthouse(name)
        delay = self.world.clockwork.between(0.05, 2.0)
        self.world.clockwork.at(delay, lambda: self.world.start_lighthouse(name))

    def _lighthouse_pause(self, _: str, __: str) -> None:
        self._pause(self.world.lighthouses[self._leader_name()], self._long_or_short())

    def _store_down(self, _: str, __: str) -> None:
        self.world.store.down = True
        self.world.clockwork.at(self._long_or_short(), self._store_up)

    def _store_up(self) -> None:
        self.world.store.down = False

    def _crash_in_a_write(self, _: str, __: str) -> None:
        """Kill the next lighthouse that writes. Its write may reach the store while another lighthouse
        leads.
        """

        def crash(revision: int) -> None:
            writers = [n for n, x in self.world.lighthouses.items() if x.alive and x.revision == revision]
            for writer in writers:
                self._crash(writer)

        self.world.store.before_write = crash

    def _store_restart(self, _: str, __: str) -> None:
        self.world.store.crash()
        self.world.clockwork.at(self._long_or_short(), self.world.store.restart)

    def _old_words(self, name: str, _: str) -> None:
        """Send an old epoch and an old decision to a replica again."""
        trainer, checks = self.world.hosts[name].trainer, self.world.checks
        if trainer is None or not trainer.alive or len(checks.records) < 2:
            return
        record = self.world.clockwork.random.choice(checks.records[:-1])
        words: list[m.LeaderMessage] = [m.Epoch(record)]
        words += [checks.decisions[e] for e in sorted(checks.decisions) if e < checks.records[-1].epoch][-2:]
        for word in words:
            trainer.feed(FromLeader(word))

    def _missed_word(self, name: str, _: str) -> None:
        """Lose the message of the next epoch to this host, though its session lasts."""
        self.world.network.unheard[name] = True

    def _long_absence(self, name: str, _: str) -> None:
        """Cut off and stop a host for longer than its autonomy, and kill all others, so that a new generation
        begins without it.
        """
        world, seconds = self.world, self.world.clockwork.between(8.0, 10.0)
        for lighthouse in world.lighthouses:
            world.network.block(name, lighthouse)
            world.network.block(lighthouse, name)
        self._pause(world.hosts[name].trainer, seconds)
        self._pause(world.hosts[name].server, seconds)
        for other in [x for x in world.hosts if x != name]:
            world.kill_trainer(other)
        self.not_before = world.clockwork.now + seconds
        world.clockwork.at(seconds, world.network.heal)

    def _flip_on_the_wire(self, name: str, _: str) -> None:
        """Damage the next chunk that this host sends."""
        self.world.network.flips[name] = True

    def _flip_in_a_result(self, name: str, _: str) -> None:
        """Flip a bit of the next result in this host's memory, before its digest is taken."""
        trainer = self.world.hosts[name].trainer
        if trainer is not None and trainer.alive:
            trainer.ring.flip = True

    def _slow_digest(self, name: str, _: str) -> None:
        """Make the digest of the next result slow, as for a large gradient."""
        trainer = self.world.hosts[name].trainer
        if trainer is not None and trainer.alive:
            trainer.ring.digest_s = 0.3

    def _flip_in_a_state(self, name: str, _: str) -> None:
        """Flip a bit of a state; with only two replicas no majority could name the wrong one."""
        trainer, record = self.world.hosts[name].trainer, self.world.store.record
        if trainer is not None and trainer.alive and record is not None and len(record.roster) > 2:
            self.world.flipped = True
            trainer.main.digest += FLIPPED

    def _slow_network(self, _: str, __: str) -> None:
        self.world.network.slow = 0.5
        self.world.clockwork.at(self._long_or_short(), self._fast_network)

    def _fast_network(self) -> None:
        self.world.network.slow = 0.03

    def _drain(self, name: str, _: str) -> None:
        if (
            len([h for h in self.world.hosts.values() if not h.drained])
            > self.world.settings.min_replicas + 1
        ):
            self._operate("drain", name)

    def _evict(self, name: str, _: str) -> None:
        self._operate("evict", name)

    def _operate(self, action: str, name: str, least: int | None = None, most: int | None = None) -> None:
        leader = self.world.lighthouses[self._leader_name()]
        if leader.core is not None:
            self.world.ordered(action, name)
            event = leader_events.Operator(action, name, "operator", "a test", least, most)
            leader.run(lambda: leader.feed(event) if leader.core is not None else None)

    # --- what only worlds with an operator have: see ``order_worlds`` -------------------------------

    def _pause_joins(self, _: str, __: str) -> None:
        self._operate("pause", "")

    def _resume_joins(self, _: str, __: str) -> None:
        self._operate("resume", "")

    def _admit(self, name: str, _: str) -> None:
        self._operate("admit", name)

    def _scale(self, _: str, __: str) -> None:
        least, most = sorted(self.world.clockwork.random.choices(range(1, len(self.world.hosts) + 1), k=2))
        self._operate("scale", "", least, most)

    # --- what only worlds with slow replicas have: see ``adapt_worlds`` -----------------------------

    def _slow_replica(self, name: str, _: str) -> None:
        """Make the replica's process slow, until it ends or recovers."""
        self.world.slow_down(name)

    def _well_again(self, name: str, _: str) -> None:
        self.world.slow.clear()

    def _veto(self, name: str, _: str) -> None:
        self._operate("veto", name)

    def _allow(self, name: str, _: str) -> None:
        self._operate("allow", name)

    def _adapt_mode(self, _: str, __: str) -> None:
        self.world.say_mode(self.world.clockwork.random.choice(("off", "advise", "act", "act")))

    # --- what only worlds with ordered layouts have: see ``relayout_worlds`` ------------------------

    def _lose_launcher(self, name: str, _: str) -> None:
        """The launcher dies with its ranks; the next launcher knows no order."""
        self.world.lose_launcher(name)

    def _cut_off(self, name: str, _: str) -> None:
        """Isolate the host for so long that the job goes on without it; its process lives."""
        seconds = self.world.clockwork.between(2.5, 3.5)
        self._block_all(name)
        self.not_before = max(self.not_before, self.world.clockwork.now + seconds)
        self.world.clockwork.at(seconds, self.world.network.heal)

    def _lose_device(self, name: str, _: str) -> None:
        """The replica can no longer be started in its usual layout, until the device is mended."""
        self.world.launchers[name].lacks_a_device = True

    # --- what only mixed worlds have: see ``mixed_worlds`` -------------------------------------------

    def _stuck_lighthouse(self, _: str, __: str) -> None:
        """Hang the leader for longer than any lease; then it reads the members' waiting messages."""
        seconds = self.world.clockwork.between(4.0, 10.0)
        self.not_before = max(self.not_before, self.world.clockwork.now + seconds)
        self._pause(self.world.lighthouses[self._leader_name()], seconds)

    def _store_cut(self, _: str, __: str) -> None:
        """Cut the leader off from the store; all other connections work."""
        name = self._leader_name()
        self.world.store.cut.add(name)
        self.world.clockwork.at(self._long_or_short(), lambda: self.world.store.cut.discard(name))

    def _store_full(self, _: str, __: str) -> None:
        """The store answers every write with a definite error."""
        self.world.store.refusing = True
        self.world.clockwork.at(self._long_or_short(), self._store_takes)

    def _store_takes(self) -> None:
        self.world.store.refusing = False

    # --- the end -----------------------------------------------------------------------------------

    def heal(self) -> None:
        """Heal all faults, and start dead processes again."""
        world = self.world
        self.over = True
        self.waiting.clear()
        world.network.heal()
        world.network.flips.clear()
        world.network.unheard.clear()
        for trainer in world.living():
            trainer.ring.flip = False
        world.store.restart()
        world.store.before_write = None
        world.store.refusing = False
        world.store.cut.clear()
        world.store.mishaps = 0.0
        world.network.slow = 0.01
        for process in [*world.lighthouses.values(), *world.servers.values(), *world.living()]:
            process.resume()
        for name in list(world.lighthouses):
            world.start_lighthouse(name)
        world.clockwork.trace("FAULT", "all healed")
