"""Scripted worlds: a scenario has commands, and a readable account of every core's events and effects.

A scenario is a text file of blocks. A block is one or more commands, a line ``----``, and the account of what
follows from them. ``#`` begins a comment. The first block sets the world up. The simulator plays the world
with the real cores, codec and ring schedule in virtual time, with a fixed seed. So an account repeats
exactly, and a change of the protocol shows as a difference of text.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from sim.world import Settings, World

from fabric.model import Policy, Record
from fabric.protocol.leader.core import LeaderConfig
from fabric.protocol.member.state import MemberConfig
from fabric.protocol.messages import leader_events, member_events
from fabric.protocol.messages import network as m

SEED = 1
LIMIT_S = 60.0
_COMPUTE_S = 0.2
# A scenario leaves out these fields, because they hold only digests, addresses and counts.
_HIDDEN = frozenset(
    (
        *("fence", "digest", "gradient_digest", "state_digest", "committed_digest", "roster_digest", "nonce"),
        *("layout", "link", "ckpt", "tensors", "plane", "secret", "times", "metrics", "entries", "data"),
        *("snapshots", "state", "sources", "before", "after", "unix_s", "store_id", "changes", "roster"),
        *("micro_batches", "plan", "began", "exchange_s", "autonomy_s", "user_code_s", "weight"),
    )
)
# A scenario leaves out these events and effects: answers to a core's own effects, and repetitions of every
# step.
_UNTOLD = (
    member_events.FromPeer,
    member_events.FromLeader,
    member_events.Exchanged,
    member_events.Computed,
    member_events.Digested,
    member_events.Streaming,
    member_events.Snapshotted,
    member_events.Ready,
    member_events.LeaderConnected,
    member_events.WriteJournal,
    member_events.TellDigest,
    member_events.Publish,
    member_events.Carry,
    member_events.Probe,
    member_events.Probed,
    leader_events.FromMember,
    leader_events.RecordWritten,
    leader_events.SessionOpened,
)


class ScriptedWorld(World):
    """A world of ``replicas`` equal members without faults other than the script's."""

    def __init__(self, replicas: int, lighthouses: int, least: int) -> None:
        self._size = replicas, lighthouses, least
        super().__init__(SEED, faultless=True)
        self.store.mishaps = 0.0  # the store loses no write

    def choose(self) -> Settings:
        replicas, lighthouses, least = self._size
        policy = Policy(min_replicas=least, start_replicas=replicas, start_wait_s=2.0)
        return Settings(
            replicas=replicas,
            lighthouses=lighthouses,
            micro_batches=2 * replicas,
            compute_s=_COMPUTE_S,
            min_replicas=least,
            leader=LeaderConfig(policy=policy, autonomy_s=4.0, autonomy_margin_s=0.5, failures=0),
            member=MemberConfig(min_replicas=least, autonomy_s=4.0, exchange_s=2.0),
            different_starts=False,
            streaming=False,
        )


class Scenario:
    """One world that obeys commands and returns the account of what follows."""

    def __init__(self) -> None:
        self.world: ScriptedWorld | None = None
        self._lines: list[tuple[float, str, str]] = []
        self._cut: set[str] = set()
        self._away: set[str] = set()  # hosts whose trainer is dead, stopped or cut off, or was drained
        self._commands: dict[str, Callable[..., None]] = {
            "world": self._make,
            "skip": self._skip,
            "run": lambda seconds: self._run_for(float(seconds)),
            "until": self._run_until,
            "kill": self._kill,
            "start": self._start,
            "stop": self._stop,
            "continue": self._continue,
            "block": self._block,
            "heal": self._heal,
            "operator": self._operate,
            "corrupt": self._corrupt,
            "finish": self._finish,
        }

    def play(self, commands: list[str]) -> str:
        """Obey the commands in order; return the account of what followed."""
        self._lines.clear()
        for command in commands:
            verb, *words = command.split()
            self._commands[verb](*words)
        return (
            "".join(f"{at:7.3f}  {who:<6} {what}\n" for at, who, what in _folded(self._lines)) or "nothing\n"
        )

    @property
    def _world(self) -> ScriptedWorld:
        assert self.world is not None, "a scenario begins with the command world"
        return self.world

    # --- commands ----------------------------------------------------------------------------------

    def _make(self, replicas: str, lighthouses: str = "1", least: str = "1") -> None:
        self.world = ScriptedWorld(int(replicas), int(lighthouses), int(least))
        self.world.clockwork.observe = self._observe
        self.world.faults.not_before = 10**6

    def _run_for(self, seconds: float) -> None:
        self._world.clockwork.run(self._world.clockwork.now + seconds, lambda: False)

    def _skip(self, to: str, *words: str) -> None:
        """``skip to CONDITION``: run until the condition holds, and show only where every party is then."""
        assert to == "to"
        self._run_until(*words)
        trainers = [h.trainer for h in self._world.hosts.values() if h.name not in self._away]
        there = [f"{t.host} at step {t.core.memory.state.step}" for t in trainers if t is not None]
        record = self._world.store.record
        self._lines = [(self._world.clockwork.now, "world", f"{', '.join(there)}; {told(record)}")]

    def _run_until(self, *words: str) -> None:
        """``step N`` (all living are there), ``epoch N`` (it is in force everywhere), ``finished``,
        or ``said WHO WORDS`` (the account of this block has a line of WHO with these words)."""
        world, what, rest = self._world, words[0], words[1:]
        conditions: dict[str, Callable[[], bool]] = {
            "step": lambda: self._all(lambda core: core.memory.state.step >= int(rest[0])),
            "epoch": lambda: self._all(lambda core: core.epochs.epoch() >= int(rest[0])),
            "finished": lambda: world._is_finished(),
            "said": lambda: any(
                who == rest[0] and " ".join(rest[1:]) in line for _, who, line in self._lines
            ),
        }
        if not world.clockwork.run(world.clockwork.now + LIMIT_S, conditions[what]):
            raise AssertionError(f"not within {LIMIT_S:g} s: {' '.join(words)}; {world._describe_leader()}")

    def _all(self, holds: Callable[[Any], bool]) -> bool:
        """Return whether the condition holds for all living trainers that reach a lighthouse."""
        wanted = [h.trainer for h in self._world.hosts.values() if h.name not in self._away]
        return all(t is not None and holds(t.core) for t in wanted)

    def _kill(self, what: str, name: str) -> None:
        world = self._world
        if what == "lighthouse":
            world.kill_lighthouse(name)
        elif what == "server":
            world.kill_server(name)
        else:
            world.kill_trainer(name, 10**6)  # the command start brings it back
            self._away.add(name)

    def _start(self, what: str, name: str) -> None:
        if what == "lighthouse":
            self._world.start_lighthouse(name)
        else:
            self._away.discard(name)
            self._world.start_trainer(name)
            self._observe(self._world.clockwork.now, name, "", "starts")

    def _block(self, name: str, other: str) -> None:
        """Cut the connection in both directions; ``lighthouses`` stands for all lighthouses."""
        world = self._world
        self._away.add(name)
        self._cut.add(name)
        for end in list(world.lighthouses) if other == "lighthouses" else [other]:
            world.network.block(name, end)
            world.network.block(end, name)

    def _heal(self) -> None:
        self._world.network.heal()
        self._away -= self._cut
        self._cut.clear()

    def _corrupt(self, what: str, name: str) -> None:
        trainer = self._world.hosts[name].trainer
        assert trainer is not None and what == "gradient"
        trainer.ring.flip = True

    def _finish(self, at: str, step: str) -> None:
        assert at == "at"
        self._world.until = int(step)

    def _stop(self, name: str) -> None:
        trainer = self._world.hosts[name].trainer
        assert trainer is not None
        trainer.pause()
        self._away.add(name)

    def _continue(self, name: str) -> None:
        trainer = self._world.hosts[name].trainer
        assert trainer is not None
        trainer.resume()
        self._away.discard(name)

    def _operate(self, action: str, name: str) -> None:
        self._away.add(name)
        self._world.faults._operate(action, name)

    # --- the account -------------------------------------------------------------------------------

    def _observe(self, now: float, who: str, sign: str, value: object) -> None:
        if isinstance(value, _UNTOLD) or type(value).__name__ in ("Tick", "LeaderTick"):
            return
        process = who.partition(".")[0]
        if isinstance(value, member_events.SendPeer | leader_events.SendMember):
            text = f"to {value.replica}: {told(value.message)}"
        elif isinstance(value, member_events.SendLeader):
            text = f"to the lighthouse: {told(value.message)}"
        elif isinstance(value, leader_events.RecordEvent):
            text = f"event {value.kind} {value.about}".rstrip() + (f": {value.why}" if value.why else "")
        elif isinstance(value, Record):
            text = f"takes {told(value)}"
        else:
            text = f"{'hears' if sign == '<' else 'orders' if sign else 'process'} {told(value)}"
        self._lines.append((now, process, text))


def told(value: object) -> str:
    """Describe a value shortly: its type and the fields that differ from their defaults."""
    if isinstance(value, Record):
        members = " ".join(
            x.replica + ("+" if x.joining else "") + ("-" if x.leaving else "") for x in value.roster
        )
        kind = "complete" if value.complete else "forced" if value.is_forced else "planned"
        return f"epoch {value.epoch} ({kind}: {members}; {value.reason})"
    if isinstance(value, m.Resume):
        table = ", ".join(f"{a.replica} {told(a.micro_batches)}" for a in value.table)
        work = "divided by the members" if value.undivided else f"[{table}]"
        return f"Resume at step {value.step} {work} ({value.reason})"
    if isinstance(value, member_events.LinkUp | member_events.Switch):
        return f"{type(value).__name__} epoch={value.record.epoch}"
    if isinstance(value, m.RosterDelta):
        joined = [x.replica for x in value.joined]
        return f"RosterDelta epoch={value.record.epoch} left={told(value.left)} joined={told(joined)}"
    if isinstance(value, m.Contribution):
        return f"Contribution step={value.step} {told(value.micro_batches)}"
    if isinstance(value, member_events.Compute):
        return f"Compute step={value.step} {told(value.micro_batches)}"
    if isinstance(value, member_events.Apply):
        return f"Apply step={value.step}" + ("" if value.contributed else " (without a part of its own)")
    if isinstance(value, tuple | list | frozenset | set):
        return "[" + " ".join(told(x) for x in value) + "]"
    if not isinstance(value, msgspec.Struct):
        return str(value)
    words = [type(value).__name__]
    for field in msgspec.structs.fields(value):
        item = getattr(value, field.name)
        unset = item in (field.default, "", (), None, False) or (item == 0 and field.name != "step")
        in_force = field.name == "ready" and item == value.fence.epoch  # no switch is due
        if field.name in _HIDDEN or unset or in_force:
            continue
        words.append(f"{field.name}={told(item)}")
    return " ".join(words)


def _folded(lines: list[tuple[float, str, str]]) -> Iterator[tuple[float, str, str]]:
    """Join the lines of a message that goes to several receivers at once."""
    at, who, what, receivers = -1.0, "", "", list[str]()
    for line in [*lines, (-2.0, "", "")]:
        to = re.fullmatch(r"to (\S+): (.*)", line[2])
        if to is not None and receivers and (at, who, what) == (line[0], line[1], to[2]):
            receivers.append(to[1])
            continue
        if at >= 0:
            yield at, who, f"to {', '.join(receivers)}: {what}" if receivers else what
        at, who = line[0], line[1]
        what, receivers = (to[2], [to[1]]) if to is not None else (line[2], [])


def blocks(text: str) -> Iterator[tuple[list[str], list[str], str]]:
    """Return the comment lines, the commands and the stored account of every block."""
    comments, commands, account, reading = list[str](), list[str](), list[str](), False
    for line in [*text.splitlines(), ""]:
        if reading and line:
            account.append(line)
        elif reading:
            yield comments, commands, "\n".join(account) + "\n"
            comments, commands, account, reading = [], [], [], False
        elif line == "----":
            reading = True
        elif line.startswith("#") or (not line and not commands):
            comments.append(line)
        elif line:
            commands.append(line)
    assert not commands, f"the last block has no account: {commands}"


def replay(text: str) -> str:
    """Play the scenario, and return its text with the present account."""
    scenario, played = Scenario(), list[str]()
    for comments, commands, _ in blocks(text):
        account = scenario.play(commands)
        played.append("\n".join([*comments, *commands, "----", account]))
    return "\n".join(played).rstrip("\n") + "\n"
