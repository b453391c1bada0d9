"""Worlds about the end of a job: no lighthouse runs when the loops end, the loops end at different steps, or
a newcomer's loop ends before it has caught up. Half of these worlds also have the faults of plain worlds
before the end. In worlds of their own a newcomer is in a blocking join when the loops end.

All replicas must end in time, with the same final state or with an error. No member may go on beyond the
first end, or wait for an ended loop. A lighthouse that comes back must mark the job complete.
"""

from itertools import pairwise

from msgspec.structs import replace
from sim.checkers import demand
from sim.trainer import Trainer
from sim.world import FINISH_LIMIT_S, HEAL_LIMIT_S, World

from fabric.protocol.member.ending import NO_LEADER_S
from fabric.protocol.member.state import Mode
from fabric.protocol.messages.leader_events import RecordEvent

KINDS = ("away", "unequal loops", "unequal loops, away", "a newcomer's own count")
REQUIRED = (
    *(f"end: {kind}" for kind in KINDS),
    "end: a loop that wants more",
    "end: a loop that ended too early",
    "end: a member's loop ended early",
    "end: marked by a checkpoint server",
    "end: marked by the next start",
    "path: ended without a lighthouse",
)
AUTONOMY_S = 12.0
# The longest time for which a newcomer's end may stop the other members, in seconds.
STANDSTILL_S = 2.5
# These words are in every error that advises a user to count steps in another way.
ADVICE = "session.committed_step"


class EndWorld(World):
    """``own_until``: host -> the step at which its loop ends, if it differs from the others. ``wrong``: hosts
    whose process ended with exit code 1, because its loop does not end where the job ends.
    """

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.alone = seed % 2 == 0  # whether this world has no other faults
        self.own_until: dict[str, int] = {}
        self.own_count: tuple[str, int] = ("", 0)  # the newcomer, and how many steps its loop makes
        self.first: dict[str, int] = {}  # process -> its first step
        self.wrong: set[str] = set()
        self.commits: list[float] = []  # the times of the other members' commits
        self.closed: list[float] = []  # the times at which loops ended
        self.lost = False  # whether the lighthouses are gone
        self.joined = False  # whether the newcomer has committed a round with them
        super().__init__(seed, tracing, faultless=self.alone)
        self.kind = KINDS[seed // 2 % len(KINDS)]
        self.ends_early, self.until, self.blackout = False, 10**9, False
        settings = self.settings
        settings.member = replace(settings.member, autonomy_s=AUTONOMY_S)
        settings.leader = replace(settings.leader, autonomy_s=AUTONOMY_S)
        for lighthouse in self.lighthouses.values():
            lighthouse.config = settings.leader

    def until_of(self, trainer: Trainer) -> int:
        newcomer, count = self.own_count
        if trainer.host == newcomer and trainer.core.memory.state.generation > 0:
            return self.first.setdefault(trainer.name, trainer.main.step) + count
        return self.own_until.get(trainer.host, self.until)

    def exited(self, trainer: Trainer, code: int, reason: str) -> None:
        self._say_goodbye(trainer)
        if code != 1 or ADVICE not in reason:
            super().exited(trainer, code, reason)
            return
        self.kill_trainer(trainer.host, 0.3)
        self.hosts[trainer.host].finished = True  # no launcher starts the replica again
        self.wrong.add(trainer.host)
        self.closed.append(self.clockwork.now)
        more = "more steps to do" in reason
        self.clockwork.counts[
            "end: a loop that wants more" if more else "end: a loop that ended too early"
        ] += 1

    def _say_goodbye(self, trainer: Trainer) -> None:
        """Close the links of an ending process; its earlier messages still arrive."""
        for connection in list(self.network.connections):
            for side, end in enumerate(connection.ends):
                if end.process is trainer:
                    connection.close(side, "goodbye")

    def happened(self, what: str, host: str) -> None:
        super().happened(what, host)
        if what == "commit" and host != self.own_count[0]:
            self.commits.append(self.clockwork.now)
        elif what == "commit":
            self.joined = True
        elif what == "closing":
            self.closed.append(self.clockwork.now)

    def run(self) -> None:
        """Run the faults, heal them, and then play the end."""
        self.clockwork.run(6.0, lambda: self.faults.over or self.halted)
        self.faults.heal()
        self._demand("every replica is back and steps are committed", HEAL_LIMIT_S, self._is_whole())
        if self.halted:
            return
        self.clockwork.counts[f"end: {self.kind}"] += 1
        self.until = max(t.main.step for t in self.living()) + self.clockwork.random.randrange(2, 7)
        if self.kind == "a newcomer's own count":
            self._play_newcomer()
            return
        if "unequal" in self.kind:
            self._make_unequal()
        if "away" in self.kind:
            self.clockwork.at(self.clockwork.between(0.0, 0.3), self._lose_lighthouses)
        if "away" in self.kind:
            # A member that lost a link in its last round, before its loop ended, needs a leader.
            self._demand("no loop's end waits for a lighthouse", FINISH_LIMIT_S, self._is_nobody_closing)
            waited_s = self.clockwork.now - max(self.closed, default=self.clockwork.now)
            in_time = waited_s <= NO_LEADER_S + 1.0 or not self.alone
            demand(in_time, f"the last one ended {waited_s:.1f} s after the last loop")
            self._judge_record()
        else:
            self._demand("everybody finishes", FINISH_LIMIT_S, self._is_finished)
        if "unequal" in self.kind and self.alone:
            self._judge_unequal()

    def _is_nobody_closing(self) -> bool:
        return self.lost and all(
            t.core.epochs.mode is Mode.ABORTED and not t.main.closing for t in self.living()
        )

    # --- no lighthouse -------------------------------------------------------------------------------

    def _lose_lighthouses(self) -> None:
        for name in self.lighthouses:
            self.kill_lighthouse(name)
        self.store.down = self.lost = True
        if self.clockwork.chance(0.3):
            # This replica is slow: the others finish long before it.
            slow = self.clockwork.random.choice(sorted(self.hosts))
            self.lingering.add(slow)
            self.clockwork.at(self.clockwork.between(NO_LEADER_S, NO_LEADER_S + 3.0), self.lingering.clear)

    def _judge_record(self) -> None:
        """Bring the lighthouses back: checkpoint servers, or new processes with the note on disk, must report
        the job's end.
        """
        before, starts = self.store.record, self.clockwork.chance(0.5) and not self.living()
        assert before is not None
        if before.complete:
            return  # the job ended before the lighthouses were lost
        for name in self.hosts:
            if starts:
                self.kill_server(name)
        self.store.down = False
        for name in list(self.lighthouses):
            self.start_lighthouse(name)
        for host in self.hosts.values() if starts else ():
            host.finished = False
            self.start_trainer(host.name)
        self._demand(
            "the job is marked complete", 10.0, lambda: bool(self.store.record and self.store.record.complete)
        )
        self._demand("whoever was started again is told so", 10.0, self._is_finished)
        record = self.store.record
        assert record is not None
        same = (record.generation, record.base.step) == self.checks.newest
        demand(same, f"complete at step {record.base.step}, and {self.checks.newest} was committed last")
        self.clockwork.counts[f"end: marked by {'the next start' if starts else 'a checkpoint server'}"] += 1

    # --- loops that do not end at the same step --------------------------------------------------------

    def _make_unequal(self) -> None:
        random = self.clockwork.random
        for name in random.sample(sorted(self.hosts), random.randrange(1, len(self.hosts))):
            self.own_until[name] = self.until + random.randrange(1, 40)

    def _judge_unequal(self) -> None:
        """Judge a job with unequal loops: the job must end where the first loop ended. All other members must
        get the news of the end, and none may go on.
        """
        told, wrong = sorted(self.wrong), sorted(self.own_until)
        demand(set(told) <= set(wrong), f"{told} were told, not {wrong}")
        demand(told == wrong or "away" in self.kind, f"{told} were told, not {wrong}")
        step = self.checks.newest[1]
        demand(step == self.until, f"step {step} was committed, and loops ended at step {self.until}")

    # --- a newcomer whose loop counts its own steps ------------------------------------------------------

    def _play_newcomer(self) -> None:
        random = self.clockwork.random
        name = random.choice(sorted(self.hosts))
        # The newcomer's loop may end before it has caught up, together with the others, or long after them.
        self.own_count = (name, random.choice((0, 1, 2, 4, 8, 400)))
        self.until += 60
        self.kill_trainer(name)
        began = self.clockwork.now
        self._demand("everybody finishes", 3 * FINISH_LIMIT_S, self._is_finished)
        times = [began, *(t for t in self.commits if t >= began)]
        longest = max((b - a for a, b in pairwise(times)), default=0.0)
        if not self.alone:
            return
        demand(longest <= STANDSTILL_S, f"the others stood still for {longest:.1f} s beside {name}")
        step, others = self.checks.newest[1], self.wrong - {name}
        if self.joined and step < self.until:
            # The newcomer had become an ordinary member, and its loop ended first.
            self.clockwork.counts["end: a member's loop ended early"] += 1
            demand(len(others) == len(self.hosts) - 1, f"only {sorted(others)} were told that they want more")
            return
        demand(
            step == self.until, f"the job ended at step {step}, and not at {self.until} as all others' loops"
        )
        demand(not others, f"{sorted(others)} were told that their loops are wrong, and not {name}")


# What a hunt over worlds with a late newcomer must have met.
REQUIRED_OF_LATE = (
    "member: blocking join",
    "end: in a blocking join",
    "end: in a blocking join, away",
    "path: ended without a lighthouse",
)
# All others wait at most this long for a newcomer's state, unless its join is of no use any more.
PATIENT_S = 20.0


class LateNewcomerWorld(EndWorld):
    """A newcomer that cannot replay gets a blocking join, and the other loops end at about that step.

    In every second world the lighthouses are lost at the end. No member may wait for the newcomer then.
    """

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.newcomer = ""
        self.away = seed % 2 == 1
        super().__init__(2 * seed, tracing)  # even seeds: worlds without other faults
        settings = self.settings
        settings.member = replace(settings.member, replay=False, digest_every=0, exchange_s=PATIENT_S)

    def run(self) -> None:
        self._demand("every replica is back and steps are committed", HEAL_LIMIT_S, self._is_whole())
        self.newcomer = self.clockwork.random.choice(sorted(self.hosts))
        self.kill_trainer(self.newcomer, 0.3)
        self._demand("the others' loops end", 2 * FINISH_LIMIT_S, self._have_others_ended)
        if self._is_awaited():
            if self.away:
                self._demand("the others hear of their epoch", STANDSTILL_S, self._are_others_in)
                self._lose_lighthouses()
                self.lingering.clear()
            self.clockwork.counts[f"end: in a blocking join{', away' if self.away else ''}"] += 1
        limit_s = NO_LEADER_S + 1.0 if self.lost else STANDSTILL_S
        self._demand("no member waits for the newcomer", limit_s, self._have_others_left)

    def told(self, effect: RecordEvent) -> None:
        super().told(effect)
        if effect.kind == "needs state" and effect.about == self.newcomer:  # the blocking join follows
            self.until = max(t.main.step for t in self._others()) + self.clockwork.random.randrange(1, 4)

    def _others(self) -> list[Trainer]:
        return [t for t in self.living() if t.host != self.newcomer]

    def _is_awaited(self) -> bool:
        """Whether the newcomer is in a blocking join, and has not entered the round yet."""
        record, trainer = self.store.record, self.hosts[self.newcomer].trainer
        member = record.member(self.newcomer) if record is not None else None
        is_in = trainer is not None and trainer.core.epochs.mode is Mode.RUN
        return member is not None and member.blocking_join and not is_in

    def _have_others_ended(self) -> bool:
        return all(t.main.closing for t in self._others())

    def _are_others_in(self) -> bool:
        return all(t.core.epochs.mode is Mode.RUN for t in self._others())

    def _have_others_left(self) -> bool:
        """Whether all others have left, but those that wait for a leader after a lost link."""
        return all(t.core.epochs.mode is Mode.ABORTED and self.lost for t in self._others())
