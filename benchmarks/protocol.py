"""The protocol under attack, and the cores of a job of 10,000 replicas, both in virtual time.

First one leader core with 10,000 replicas that answer at once, as members do, and one member core among as
many: processor time per virtual second and per change, messages, and bytes by the codec; the network is not
part of it. Then 10,000 seeded worlds of the simulator on all cores, half of them plain and the others of
every further kind: how many broke an invariant, and whether every kind of fault and rare path was met.
``--seeds N`` plays fewer worlds, 0 none; ``--replicas N`` is for another number of replicas, of which the
leader core alone is measured.
"""

import argparse
import gc
import math
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

if str(TESTS := Path(__file__).resolve().parent.parent / "tests") not in sys.path:
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from benchmarks.common import begin, finish, say, table, verdict
from fabric.lighthouse.service import THRESHOLDS
from fabric.model import DataPlan, Policy, Record
from fabric.protocol.leader.core import LeaderConfig, LeaderCore
from fabric.protocol.member.core import MemberCore
from fabric.protocol.member.state import MemberConfig
from fabric.protocol.messages import leader_events, member_events, wire
from fabric.protocol.messages import network as m
from fabric.store.base import MAX_VALUE_BYTES

SEEDS = 10_000
REPLICAS = 10_000
BEATS_S = 5.0
PIECE = 50


# --- the hunt ---------------------------------------------------------------------------------------------


def play(piece: tuple[str, int]) -> tuple[str, Counter[str], list[str]]:
    from sim.run import hunt

    kind, first = piece
    return kind, *hunt(first, first + PIECE, kind, limit=PIECE)


def pieces(seeds: int) -> list[tuple[str, int]]:
    """Half of the seeds are plain worlds; all other kinds share the other half."""
    from sim.run import KINDS

    others = [kind for kind in KINDS if kind != "plain"]
    each = {"plain": seeds / 2, **dict.fromkeys(others, seeds / 2 / len(others))}
    return [(kind, first) for kind, count in each.items() for first in range(0, math.ceil(count), PIECE)]


def hunt(seeds: int) -> dict[str, float]:
    """Play the worlds; returns plain numbers."""
    from sim import coverage

    started, counts, failures = time.perf_counter(), Counter[str](), []
    played, broken = Counter[str](), Counter[str]()
    cores = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        for kind, met, violations in pool.imap_unordered(play, pieces(seeds)):
            if kind == "plain":
                counts.update(met)
            played[kind] += PIECE
            broken[kind] += len(violations)
            failures += violations
    seconds = time.perf_counter() - started
    for line in failures[:20]:
        say(line)
    never = coverage.missing(counts)
    say("never met: " + (", ".join(never) or "nothing"))
    kinds = [(name, counts[name]) for name in coverage.REQUIRED]
    table("how often each fault and rare path was met", ("what", "times"), sorted(kinds, key=lambda x: x[1]))
    worlds = [(kind, played[kind], broken[kind]) for kind in played]
    table("worlds", ("kind", "played", "that broke an invariant"), worlds)
    return {
        "seeds": played.total(),
        "violations": len(failures),
        "never_met": len(never),
        "hunt_seconds": round(seconds, 1),
        "seeds_per_second": round(played.total() / seconds, 2),
    }


# --- ten thousand replicas ----------------------------------------------------------------------------------


class SimulatedCrowd:
    """One leader core, and replicas that answer what members answer, in virtual time."""

    def __init__(self, count: int) -> None:
        self.names = [f"replica-{i:05d}" for i in range(count)]
        policy = Policy(max_replicas=2 * count, start_replicas=count)
        self.now = 0.0
        self.leader = LeaderCore("job", LeaderConfig(policy=policy), random.Random(1), self.now)
        self.incarnations = {name: 1_763_717_000_000 + i * 7919 % 10**9 for i, name in enumerate(self.names)}
        self.steps = 0
        self.beats = 0
        self.messages: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()
        self.said_bytes: Counter[str] = Counter()
        self.record_bytes = 0
        self._sizes: dict[int, tuple[object, int]] = {}
        self.feed(leader_events.Elected("store-0123456789", None))

    @property
    def record(self) -> Record:
        assert self.leader.state.record is not None
        return self.leader.state.record

    def feed(self, event: leader_events.Event) -> None:
        """One event, as the shell feeds it; the store answers at once."""
        for effect in self.leader.handle(event, self.now):
            if isinstance(effect, leader_events.WriteRecord):
                self.record_bytes = len(wire.encode_record(effect.record))
                self.feed(leader_events.RecordWritten(effect.record.nonce))
            elif isinstance(effect, leader_events.SendMember):
                kind = type(effect.message).__name__
                self.messages[kind] += 1
                self.sent_bytes[kind] += self._size(effect.message)
        self.leader.next_deadline()

    def _size(self, message: m.LeaderMessage) -> int:
        if isinstance(message, m.HeartbeatAck):
            return 60
        key = id(message.record) if isinstance(message, m.Epoch | m.RosterDelta) else id(message)
        if key not in self._sizes:
            self._sizes[key] = (message, len(wire.encode(message)))
        return self._sizes[key][1]

    def say(self, name: str, message: m.MemberMessage) -> None:
        self.feed(leader_events.FromMember(name, self.incarnations[name], message))

    def wait(self, seconds: float) -> None:
        """Let virtual time pass, with the ticks that the leader asks for."""
        until = self.now + seconds
        while True:
            deadline = self.leader.next_deadline()
            if deadline is None or deadline > until:
                self.now = until
                return
            self.now = deadline
            self.feed(leader_events.LeaderTick())

    def open(self, name: str, number: int) -> None:
        record = self.leader.state.record
        self.feed(
            leader_events.SessionOpened(
                m.OpenSession(
                    replica=name,
                    incarnation=self.incarnations[name],
                    generation=0,
                    step=0,
                    digest="0123456789abcdef" * 2,
                    epoch=0,
                    link=f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:41234",
                    ckpt=f"http://10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:51234",
                    micro_batches=len(self.names),
                    layout="0123456789abcdef" * 2,
                    roster=record.roster_digest if record is not None else "",
                )
            )
        )

    def report_all(self) -> None:
        """Every member answers the forced epoch: it holds nothing, and has its share computed."""
        record, step = self.record, self.steps
        entered = (record.epoch - 1, step) if record.epoch > 1 else (0, 0)
        for number, member in enumerate(record.roster):
            report = m.Report(
                fence=record.fence,
                state_generation=record.generation if record.epoch > 1 else 0,
                step=step,
                digest="0123456789abcdef" * 2,
                round_epoch=entered[0],
                round_step=entered[1],
                round_lacked=(),
                prepared=False,
                gradient_digest="",
                have=(number,) if record.epoch > 1 else (),
                plan=DataPlan(len(self.names)),
            )
            if number == 0:
                self.said_bytes["Report"] = len(wire.encode(report))
            self.say(member.replica, report)

    def run_all(self) -> None:
        for member in self.record.roster:
            self.say(member.replica, m.Running(self.record.fence, self.steps))

    def beat_all(self, seconds: float) -> None:
        """A beat and a status of everybody every second, spread evenly over it."""
        names = [x.replica for x in self.record.roster]
        for _ in range(int(seconds)):
            for name in names:
                self.wait(1.0 / len(names))
                self.beats += 1
                record, incarnation = self.record, self.incarnations[name]
                self.say(name, m.Heartbeat(self.beats, record.epoch, record.generation, self.steps))
                self.feed(
                    leader_events.TrainerStatusSeen(m.TrainerStatus(name, incarnation, "running", self.beats))
                )
            self.steps += 1

    def settle(self) -> None:
        """The forced epoch in force is reported, decided and run in."""
        self.report_all()
        self.wait(0.2)
        assert self.leader.state.epoch.decision is not None, "not decided"
        self.run_all()
        self.wait(0.2)


def lead(count: int) -> dict[str, float]:
    """Start, beats, a death, a join, a change of the leader; processor seconds of the leader core."""
    crowd, result, rows = SimulatedCrowd(count), {}, []

    def phase(name: str, action: "object") -> None:
        crowd.messages.clear()
        crowd.sent_bytes.clear()
        began, virtual = time.process_time(), crowd.now
        action()  # type: ignore[operator]
        seconds = time.process_time() - began
        sent, bytes_ = sum(crowd.messages.values()), sum(crowd.sent_bytes.values())
        result[f"leader_{name}_cpu_s"] = round(seconds, 3)
        result[f"leader_{name}_messages"] = sent
        rows.append((name, f"{seconds:.2f}", f"{crowd.now - virtual:.2f}", sent, f"{bytes_ / 2**20:.0f}"))

    def start() -> None:
        for number, name in enumerate(crowd.names):
            crowd.open(name, number)
        crowd.wait(1.0)
        assert crowd.record.epoch == 1 and len(crowd.record.roster) == count
        crowd.settle()

    def death() -> None:
        name = crowd.record.roster[count // 2].replica
        crowd.feed(
            leader_events.TrainerStatusSeen(m.TrainerStatus(name, crowd.incarnations[name], "gone", 1))
        )
        crowd.wait(0.2)
        assert crowd.record.epoch == 2 and len(crowd.record.roster) == count - 1
        crowd.settle()

    def fail_over() -> None:
        record, now = crowd.record, crowd.now
        crowd.leader = LeaderCore("job", crowd.leader.state.config, random.Random(2), now)
        crowd.feed(leader_events.Elected("store-0123456789", record))
        for number, member in enumerate(record.roster):
            crowd.open(member.replica, number)
        crowd.settle()

    phase("start", start)
    phase("beats", lambda: crowd.beat_all(BEATS_S))
    phase("death", death)
    phase("fail_over", fail_over)
    table(
        f"the leader core with {count} replicas",
        ("phase", "processor s", "virtual s", "messages", "MiB sent"),
        rows,
    )
    result["leader_cpu_s_per_virtual_s"] = round(result["leader_beats_cpu_s"] / BEATS_S, 4)
    result["record_bytes"] = crowd.record_bytes
    result["report_bytes"] = crowd.said_bytes["Report"]
    result["epoch_bytes"] = len(wire.encode(m.Epoch(crowd.record)))
    return result


def take_part(count: int, record: Record) -> dict[str, float]:
    """One member core through one round among ``count``: their contributions, then their bars."""
    me, digest = record.roster[0], "0123456789abcdef" * 2
    identity = m.OpenSession(
        me.replica,
        me.incarnation,
        generation=0,
        step=0,
        digest=record.base.digest or digest,
        epoch=0,
        link=me.link,
        ckpt=me.ckpt,
        micro_batches=count,
        layout=me.layout,
    )
    member = MemberCore(identity, MemberConfig(), 0.0)
    sent: Counter[str] = Counter()

    def feed(event: member_events.Event) -> None:
        for effect in member.handle(event, 0.0):
            sent[type(effect).__name__] += 1

    began = time.process_time()
    feed(member_events.Ready(0, digest))
    feed(member_events.LeaderConnected())
    feed(member_events.FromLeader(m.Epoch(record)))
    table_ = tuple(m.Assignment(x.replica, (i,)) for i, x in enumerate(record.roster))
    feed(member_events.Linked(record.epoch))
    feed(member_events.FromLeader(m.Resume(record.fence, 0, table_)))
    entered = time.process_time()
    feed(member_events.Computed(0, (0,), 1.0))
    for number, x in enumerate(record.roster[1:], 1):
        said = m.Contribution(record.fence, 0, 1.0, (number,), layout=me.layout)
        feed(member_events.FromPeer(x.replica, x.incarnation, said))
    feed(member_events.Exchanged(record.epoch, 0, "reduced"))
    for x in record.roster[1:]:
        vote = m.CommitVote(record.fence, 0, record.epoch, "reduced", digest)
        feed(member_events.FromPeer(x.replica, x.incarnation, vote))
    done = time.process_time()
    assert member.memory.state.step == 1, "the step was not committed"
    say(f"one member among {count}: {entered - began:.2f} s to enter, {done - entered:.2f} s for the step")
    return {
        "member_enter_cpu_s": round(entered - began, 3),
        "member_step_cpu_s": round(done - entered, 3),
        "member_messages_per_step": sent["SendPeer"],
    }


def large(count: int) -> dict[str, float]:
    result = lead(count)
    crowd = SimulatedCrowd(count)
    for number, name in enumerate(crowd.names):
        crowd.open(name, number)
    crowd.wait(1.0)
    result.update(take_part(count, crowd.record))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    arguments = parser.parse_args()
    begin()
    count = arguments.replicas
    gc.set_threshold(*THRESHOLDS)  # the same thresholds as in the lighthouse
    result: dict[str, float] = {"replicas": count, **(large(count) if count == REPLICAS else lead(count))}
    if arguments.seeds:
        result.update(hunt(arguments.seeds))
        verdict("worlds that broke an invariant", result["violations"], at_most=0)
        verdict("faults and paths never met", result["never_met"], at_most=0)
    verdict(f"record of {count} replicas, bytes", result["record_bytes"], at_most=MAX_VALUE_BYTES)
    verdict("leader, processor s per virtual s", result["leader_cpu_s_per_virtual_s"], at_most=1.0)
    finish(result)


if __name__ == "__main__":
    main()
