"""Worlds about the cold start: unseen processes go on committing while others take their place. The leader
must wait for processes that may commit, and must not lose states held in memory.

Each world has one scripted fault and no other, so that no other fault hides it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from sim.checkers import demand
from sim.clockwork import Process
from sim.server import FLIPPED
from sim.trainer import Trainer
from sim.world import Settings, World

from fabric.model import Member as Entry
from fabric.protocol.leader import admission
from fabric.protocol.leader.base_choice import BaseChoice
from fabric.protocol.leader.liveness import Liveness, as_member
from fabric.protocol.leader.state import JobState
from fabric.protocol.member.membership import Membership
from fabric.protocol.messages import leader_events as lio
from fabric.protocol.messages import network as m
from fabric.protocol.rules import decide as deciding

# The rare events that must occur in a run over many of these worlds.
REQUIRED = (
    "cold: hosts cut off, replicas started elsewhere",
    "cold: started on a host that ran it before",
    "cold: suspended",
    "cold: all members stopped",
    "cold: a second process refused",
    "cold: a tie of digests",
    "cold: the newest state's server comes last",
    "cold: a server outside the roster comes last",
    "cold: rounds of a generation before",
    "cold: generation begun again",
    "path: stopped by itself without a lighthouse",
)


class Cut:
    """The world as a process without a reachable lighthouse sees it."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def find_leader(self, host: str) -> None:
        return None


class ColdWorld(World):
    """A world with one scripted fault at time ``strikes``, which lasts ``lasts`` seconds."""

    strikes, lasts = 2.0, 14.0

    def __init__(self, seed: int) -> None:
        super().__init__(seed, faultless=True)
        self.faults.not_before, self.faults.over = self.lasts, False
        self.clockwork.at(self.strikes, self.strike)

    def strike(self) -> None:
        raise NotImplementedError

    def cut_off(self, host: str) -> None:
        """Cut the host off from all lighthouses, in both directions."""
        for name in self.lighthouses:
            self.network.block(host, name)
            self.network.block(name, host)


def of(settings: Settings, replicas: int, least: int = 1) -> Settings:
    """Return the same settings with this number of replicas."""
    policy = replace(settings.leader.policy, min_replicas=least, start_replicas=replicas)
    return replace(
        settings,
        replicas=replicas,
        min_replicas=least,
        lighthouses=1,
        micro_batches=max(replicas, 2),
        leader=replace(settings.leader, policy=policy),
        member=replace(settings.member, min_replicas=least),
    )


class Ghosts(ColdWorld):
    """All hosts are cut off from the lighthouses and go on without them. The scheduler starts every replica
    elsewhere, at times on hosts that have run an older process of it.
    """

    def __init__(self, seed: int) -> None:
        self.ghosts: set[Trainer] = set()
        # The fault comes when the lighthouse has led for longer, or for less, than a cold start waits.
        self.strikes = 6.0 if seed % 2 else 2.0
        self.remembered = (7,) if seed // 2 % 2 else ()
        super().__init__(seed)

    def strike(self) -> None:
        self.clockwork.counts["cold: hosts cut off, replicas started elsewhere"] += 1
        for host in self.hosts.values():
            trainer, server = host.trainer, host.server
            assert trainer is not None
            self.ghosts.add(trainer)
            trainer.reach(Cut(self))
            server.reach(Cut(self))
            host.trainer = None
        self.clockwork.at(0.5, self.start_elsewhere)

    def start_elsewhere(self) -> None:
        for host in self.hosts.values():
            host.servers += 1
            host.server = self._start_server(host.name, host.servers)
            host.before = self.remembered
            self.clockwork.counts["cold: started on a host that ran it before"] += bool(self.remembered)
            self.start_trainer(host.name)

    def exited(self, trainer: Trainer, code: int, reason: str) -> None:
        if trainer not in self.ghosts:
            super().exited(trainer, code, reason)
            return
        self.clockwork.counts["path: stopped by itself without a lighthouse"] += code == 75
        trainer.kill()
        del self.by_key[trainer.host, trainer.incarnation]
        self.network.death(trainer)


class Suspended(ColdWorld):
    """The only member's host is cut off and suspended for longer than its autonomy. The answer to the
    suspended member's last heartbeat lies unread in its socket. Meanwhile the other replica comes back and
    begins alone.
    """

    def choose(self) -> Settings:
        return of(super().choose(), 2)

    def __init__(self, seed: int) -> None:
        self.armed = False
        super().__init__(seed)
        self.clockwork.at(1.0, lambda: self.kill_trainer("r1", 60.0) and None)

    def strike(self) -> None:
        self.armed = True
        trainer = self.hosts["r0"].trainer
        assert trainer is not None
        hear = trainer._from_leader

        def hear_or_suspend(data: object) -> None:
            if self.armed and trainer.is_answer(data):
                self.armed = False
                self.suspend()
            trainer.run(lambda: hear(data))

        trainer._session.ends[0].on_message = hear_or_suspend  # type: ignore[union-attr]

    def suspend(self) -> None:
        self.clockwork.counts["cold: suspended"] += 1
        self.cut_off("r0")
        host = self.hosts["r0"]
        for process in (host.trainer, host.server):
            assert process is not None
            process.pause()
            self.clockwork.at(9.0, process.resume)
        self.clockwork.at(0.5, lambda: self.start_trainer("r1"))
        self.clockwork.at(9.2, self.network.heal)


class Stopped(ColdWorld):
    """All members are stopped for less than their autonomy, as their servers report, while a newcomer
    arrives.
    """

    def choose(self) -> Settings:
        return of(super().choose(), 3)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.clockwork.at(1.0, lambda: self.kill_trainer("r2", 1.2) and None)

    def strike(self) -> None:
        self.clockwork.counts["cold: all members stopped"] += 1
        for name in ("r0", "r1"):
            trainer = self.hosts[name].trainer
            assert trainer is not None
            trainer.pause()
            self.clockwork.at(3.5, trainer.resume)


class Twins(ColdWorld):
    """A second process of a living replica is started on another host, at times just when the first one's
    session has ended. The leader must refuse the second process, and the first process must go on.
    """

    lasts = 6.0

    def __init__(self, seed: int) -> None:
        self.second: Trainer | None = None
        self.at_a_reset = seed % 2 == 1
        super().__init__(seed)

    def strike(self) -> None:
        if self.at_a_reset:
            for lighthouse in self.lighthouses:
                self.network.reset_between("r0", lighthouse)
        server = self._start_server("r0", 100)
        incarnation = self.hosts["r0"].incarnation + 1000
        self.second = self.trainer_class(self.clockwork, self, "r0", incarnation, server)
        self.by_key["r0", incarnation] = self.second

    def exited(self, trainer: Trainer, code: int, reason: str) -> None:
        if trainer is self.second:
            taken = "taken by a living process" in reason
            demand(taken, f"the second process ends with {code}: {reason}")
            self.clockwork.counts["cold: a second process refused"] += 1
            trainer.kill()
            trainer.server.kill()
            del self.by_key[trainer.host, trainer.incarnation]
            self.network.death(trainer)
            self.network.death(trainer.server)
            return
        demand("newer process" not in reason, f"{trainer.name} is ended by a second process: {reason}")
        super().exited(trainer, code, reason)

    def told(self, effect: lio.RecordEvent) -> None:
        super().told(effect)
        demand(effect.kind != "evicting", f"{effect.about} is evicted for a second process: {effect.why}")


class EarlyTwins(Twins):
    """After a fail-over the second process speaks to the next leader before the first process does."""

    def strike(self) -> None:
        first = self.hosts["r0"].trainer
        assert first is not None
        first.reach(Cut(self))
        for name in self.lighthouses:
            self.kill_lighthouse(name)
            self.start_lighthouse(name)
        super().strike()
        self.clockwork.at(self.clockwork.between(0.3, 2.0), lambda: first.reach(self))

    def told(self, effect: lio.RecordEvent) -> None:
        super().told(effect)
        waits = effect.kind == "session refused" and "has not spoken to this lighthouse" in effect.why
        self.clockwork.counts["cold: a twin spoke first after a fail-over"] += waits


class Tie(ColdWorld):
    """Two of four replicas came later, and a bit of the state that these two have is wrong. Neither half is a
    majority, so the leader evicts the members with the shorter tenure.
    """

    strikes, lasts = 5.0, 9.0

    def choose(self) -> Settings:
        return of(super().choose(), 4)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        for name in ("r2", "r3"):
            self.clockwork.at(1.0, lambda name=name: self.kill_trainer(name, 0.2) and None)
        self.wrong: set[tuple[str, int]] = set()

    def strike(self) -> None:
        """Strike when all members are at the same step between two rounds; otherwise try again soon."""
        found = [self.hosts[name].trainer for name in ("r2", "r3")]
        record = self.store.record
        there = record is not None and len(record.roster) == 4 and not any(x.joining for x in record.roster)
        states = {t.main.digest for t in found if t is not None}
        if not there or len(states) != 1:
            self.clockwork.at(0.003, self.strike)
            return
        self.flipped = True
        self.clockwork.counts["cold: a tie of digests"] += 1
        for trainer in found:
            assert trainer is not None
            trainer.main.digest += FLIPPED
            self.wrong.add((trainer.host, trainer.incarnation))

    def told(self, effect: lio.RecordEvent) -> None:
        super().told(effect)
        if self.wrong and effect.kind == "evicting" and "disagree" in effect.why:
            late = effect.about in ("r2", "r3")
            demand(late, f"{effect.about} has been here for longest and goes: {effect.why}")


class Outsider(ColdWorld):
    """A process that entered rounds of the last generation begins the next generation at an earlier step. In
    the new generation the process waits for another member before it enters a round.
    """

    lasts = 12.0

    def choose(self) -> Settings:
        return of(super().choose(), 3, least=2)

    def __init__(self, seed: int) -> None:
        self.stage = 0
        super().__init__(seed)

    def strike(self) -> None:
        self.stage = 1
        self.faults._operate("evict", "r0")

    def happened(self, what: str, host: str) -> None:
        super().happened(what, host)
        if (self.stage, what, host) == (1, "outside", "r0"):
            self.stage = 2
            self.clockwork.at(0.0, self.lose_the_others)
        elif self.stage == 2 and what == "cold start":
            self.stage = 3
            self.clockwork.counts["cold: rounds of a generation before"] += 1
            self.clockwork.at(0.0, lambda: self.kill_trainer("r1", 1.0) and None)

    def lose_the_others(self) -> None:
        for name, back_s in (("r1", 0.3), ("r2", 9.0)):
            self.kill_server(name)
            self.kill_trainer(name, back_s)


class LateServer(ColdWorld):
    """All members and the leader die. The server that holds the newest state reaches the next leader last,
    within its grace period. The restarted processes were not running when the newest state was made.

    In half of the worlds this server belongs to a replica outside the roster, whose process does not return.
    In half of those the leader lives, and has lost the connection of this server.
    """

    lasts = 9.0

    def choose(self) -> Settings:
        return of(super().choose(), 3)

    def __init__(self, seed: int) -> None:
        # The server comes back at once, or late in the grace period.
        self.late_s = 0.8 if seed % 2 else 2.4
        self.is_outside = seed // 2 % 2 == 1
        self.leader_lives = self.is_outside and seed // 4 % 2 == 1
        self.struck: tuple[int, int] = (0, -1)
        super().__init__(seed)
        if self.is_outside:
            policy = replace(self.settings.leader.policy, start_replicas=2)
            self.settings.leader = replace(self.settings.leader, policy=policy)
            self.lighthouses["lh0"].config = self.settings.leader
            self.clockwork.at(self.lasts - 0.5, lambda: self.faults._operate("resume", ""))

    def strike(self) -> None:
        """Strike: r0 goes on alone, or catches up outside, and holds the newest snapshot."""
        if self.is_outside:
            self.faults._operate("pause", "")
            self.kill_trainer("r0", 0.2)
            self.clockwork.at(0.3, self.lose_the_last)
            return
        for name in ("r1", "r2"):
            self.kill_trainer(name, 2.5)
        self.clockwork.at(2.0, self.lose_the_last)

    def lose_the_last(self) -> None:
        server, (lighthouse,) = self.hosts["r0"].server, self.lighthouses
        held = [(ref.generation, ref.step) for ref in server.memory.snapshots]
        others = [
            (ref.generation, ref.step)
            for name in ("r1", "r2")
            for ref in self.hosts[name].server.memory.snapshots
        ]
        if max(held) <= max(others):
            if self.is_outside and not self.faults.over:
                self.clockwork.at(0.001, self.lose_the_last)
            return  # the snapshot of a later step is not done yet
        server_of = "a server outside the roster" if self.is_outside else "the newest state's server"
        self.clockwork.counts[f"cold: {server_of} comes last"] += 1
        self.struck = max(held)
        server.reach(Cut(self))
        for name in ("r1", "r2") if self.is_outside else ():
            self.kill_trainer(name, 0.3)
        self.kill_trainer("r0", 6.0 if self.is_outside else 0.3)
        if not self.leader_lives:
            self.kill_lighthouse(lighthouse)
            self.clockwork.at(0.2, lambda: self.start_lighthouse(lighthouse))
        self.clockwork.at(0.2 + self.late_s, lambda: server.reach(self))

    def happened(self, what: str, host: str) -> None:
        super().happened(what, host)
        base = self.store.record.base if self.store.record is not None else None
        if what == "cold start" and self.struck[1] >= 0 and base is not None:
            began = (base.generation, base.step)
            demand(began >= self.struck, f"a generation begins from {began}, and a server held {self.struck}")


KINDS: tuple[Callable[[int], World], ...] = (Ghosts, Suspended, Stopped, Twins, Tie, Outsider, LateServer)


def cold_world(seed: int) -> World:
    """Return a world: seeds go through the kinds in turn, and through the variants of each kind."""
    return KINDS[seed % len(KINDS)](seed // len(KINDS))


# --- deliberate bugs -----------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def forget_who_was_replaced(patch: Patch) -> None:
    """Bug: the leader counts contact by the replica's name, not by the process."""
    opened, hear = Liveness.opened, Liveness.hear

    def heard(live: Liveness, status: m.TrainerStatus, member: Entry | None, now: float) -> Any:
        known = hear(live, status, member, now)
        live.servers.elsewhere.clear()
        return known

    patch.setattr(Liveness, "opened", lambda live, session, now, is_named: opened(live, session, now, False))
    patch.setattr(Liveness, "hear", heard)


def believe_whoever_vouches(patch: Patch) -> None:
    """Bug: a host that ran any process of the replica counts as proof of the end of all its processes."""

    def vouches(session: m.OpenSession, member: Entry) -> bool:
        return bool(session.predecessors)

    patch.setattr("fabric.protocol.leader.liveness.vouches", vouches)
    patch.setattr(admission, "vouches", vouches)


def start_again_without_waiting(patch: Patch) -> None:
    patch.setattr(Liveness, "out_of_contact", lambda *_: True)


def start_cold_after_half_the_autonomy(patch: Patch) -> None:
    limit = JobState.out_of_sight_s.fget
    assert limit is not None
    patch.setattr(JobState, "out_of_sight_s", property(lambda state: limit(state) / 2))


def date_contact_from_the_answer(patch: Patch) -> None:
    def on_beat_reply(member: Membership, message: m.HeartbeatAck) -> None:
        if member._session.contact.sent.pop(message.number, None) is not None:
            member._session.contact.last = member._context.now

    patch.setattr(Membership, "on_beat_reply", on_beat_reply)


def let_the_clock_stand_still_while_suspended(patch: Patch) -> None:
    """Bug: the member's clock stands still while its host is suspended, like CLOCK_MONOTONIC."""
    lost: dict[Process, float] = {}
    since: dict[Process, float] = {}
    clock, pause, resume = Process.clock, Process.pause, Process.resume

    def standing(process: Process) -> float:
        return clock(process) - lost.get(process, 0.0) * process._rate

    def paused(process: Process) -> None:
        if process.alive and not process.paused:
            since[process] = process.clockwork.now
        pause(process)

    def resumed(process: Process) -> None:
        if process.paused:
            lost[process] = lost.get(process, 0.0) + process.clockwork.now - since.pop(process)
        resume(process)

    patch.setattr(Process, "clock", standing)
    patch.setattr(Process, "pause", paused)
    patch.setattr(Process, "resume", resumed)


def take_the_stopped_for_dead(patch: Patch) -> None:
    confirmed = Liveness.proven_dead

    def ended(live: Liveness, member: Entry) -> str:
        status = live.servers.of_process(member)
        stopped = status is not None and status.trainer == "stopped"
        return confirmed(live, member) or ("it is stopped" if stopped else "")

    patch.setattr(Liveness, "proven_dead", ended)


def believe_a_second_process(patch: Patch) -> None:
    patch.setattr(admission, "taken", lambda session, liveness, record, now: "")


def count_rounds_of_older_generations(patch: Patch) -> None:
    patch.setattr(deciding, "_counts", lambda report, record: bool(report.round_epoch))


def begin_before_all_servers_are_heard(patch: Patch) -> None:
    """Bug: the leader begins before it has heard all servers, and ignores the states that sessions name."""
    patch.setattr(Liveness, "servers_to_hear", lambda live, roster, now: {})
    held = BaseChoice.held_states

    def by_statuses_alone(bases: BaseChoice, peers: list[Any]) -> Any:
        return bases.state.liveness.servers.whole(1 + len(peers[0].session.ranks)) or held(bases, peers)

    patch.setattr(BaseChoice, "held_states", by_statuses_alone)


def await_only_servers_of_the_roster(patch: Patch) -> None:
    """Bug: the leader does not wait for the servers that neither the roster nor a session names."""
    servers_to_hear = Liveness.servers_to_hear

    def named(live: Liveness, roster: Sequence[Entry], now: float) -> dict[str, float]:
        members = [*roster, *(as_member(p.session) for p in live.peers.values() if p.connected)]
        urls = {address.ckpt for x in members for address in x.addresses}
        return {url: until for url, until in servers_to_hear(live, roster, now).items() if url in urls}

    patch.setattr(Liveness, "servers_to_hear", named)


MUTATIONS: dict[str, Callable[[Patch], None]] = {
    f.__name__: f
    for f in (
        forget_who_was_replaced,
        believe_whoever_vouches,
        start_again_without_waiting,
        start_cold_after_half_the_autonomy,
        date_contact_from_the_answer,
        let_the_clock_stand_still_while_suspended,
        take_the_stopped_for_dead,
        believe_a_second_process,
        begin_before_all_servers_are_heard,
        await_only_servers_of_the_roster,
        count_rounds_of_older_generations,
    )
}
