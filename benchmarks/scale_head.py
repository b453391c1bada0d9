"""The head of one replica: rank 0's control of its other ranks, measured in a process of its own.

Real: the listener with its handshake, the links, the codec, the adapter ``Ranks``, the member core with its
driver, and the summing of each host's voice. Mock: the other ranks (``scale_followers.py``, one process with
a real socket for each voice), rank 0's main thread and data plane, the leader, and the other members, which
answer at once. A step computes nothing and exchanges nothing, so all of its time is control. ``per_host``
ranks have one voice; with 1 each rank speaks for itself.

``benchmarks/scale.py`` runs it with one line of JSON on stdin; it prints one line of JSON.
"""

import asyncio
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import uvloop
from msgspec.structs import replace

from fabric.client.control.rank_engines import RankLinks
from fabric.model import Base, Member, RankAddress, Record
from fabric.protocol.member.core import MemberCore
from fabric.protocol.member.state import MemberConfig
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages.rank_messages import FromHost, RankCommand, RankLost
from fabric.protocol.ranks import Ranks, ToOthers, ToSelf
from fabric.runtime.driver import Driver
from fabric.runtime.system_calls import seconds_since_boot
from fabric.transport.tcp import Listener, ListenerIdentity

HERE = Path(__file__).resolve().parent
DIGEST = "0123456789abcdef" * 2
STORE, TOKEN = "store-0123456789", b"scale"
WARM_UP = 2
LIMIT_S = 120.0


def addresses(replica: int, ranks: int) -> tuple[RankAddress, ...]:
    """Return the addresses of a replica's ranks, eight to a host."""
    found = []
    for rank in range(ranks):
        place = f"10.{replica}.{rank >> 11}.{rank >> 3 & 255}"
        ckpt = f"http://{place}:8700" + (f"#{rank}" if rank else "")
        found.append(RankAddress(f"{place}:{32768 + rank * 7919 % 28000}", ckpt))
    return tuple(found)


def record_of(replicas: int, ranks: int) -> Record:
    """Return the record of the first epoch of a job of such replicas."""
    roster = []
    for i in range(replicas):
        first, *others = addresses(i, ranks)
        entry = Member(f"r{i:02d}", 1_763_717_000_000 + i, first.link, first.ckpt, layout=DIGEST)
        roster.append(replace(entry, data_slot=i, ranks=tuple(others)))
    return Record(STORE, 1, 1, 1, 1, "nonce", tuple(roster), Base(1, 0, DIGEST))


class MockHead:
    """The shell around the head's core."""

    def __init__(self, replicas: int, ranks: int, steps: int) -> None:
        self.record, self.steps = record_of(replicas, ranks), steps
        self.links = RankLinks(0, self.record.roster[0].incarnation)
        self.ranks: Ranks | None = None
        self.driver: Driver[Any, Any] | None = None
        self.marks: list[tuple[float, float, int]] = []  # at each step: time, processor time, commands sent
        self.sent = 0
        self.lost_at = 0.0
        self.done = asyncio.Event()
        self.stopped = asyncio.Event()
        self.error: BaseException | None = None

    def begin(self) -> None:
        me, ranks = self.record.roster[0], len(self.record.roster[0].addresses)
        identity = m.OpenSession(
            me.replica,
            me.incarnation,
            generation=0,
            step=0,
            digest=DIGEST,
            epoch=0,
            link=me.link,
            ckpt=me.ckpt,
            micro_batches=len(self.record.roster),
            layout=DIGEST,
            ranks=me.ranks,
        )
        member = MemberCore(identity, MemberConfig(), seconds_since_boot())
        self.ranks = Ranks(member, tuple(range(ranks)))
        self.driver = Driver(self.ranks, self.perform, tick=io.Tick(), on_crash=self.crash)
        self.links.hear(self.heard)
        self.feed(io.LeaderConnected())
        self.answer(io.Ready(0, DIGEST))
        self.feed(io.FromLeader(m.Epoch(self.record)))

    def feed(self, event: object) -> None:
        assert self.driver is not None
        self.driver.feed(event)

    def answer(self, event: Any, number: int = 0) -> None:
        """Answer for rank 0."""
        self.feed(FromHost((0,), (event,), number))

    def heard(self, said: FromHost) -> None:
        if isinstance(said.events[0], RankLost):
            self.lost_at = time.monotonic()
        self.feed(said)

    def crash(self, error: BaseException) -> None:
        self.error = error
        self.done.set()

    # --- effects --------------------------------------------------------------------------------------

    def perform(self, effect: Any) -> None:
        if isinstance(effect, ToOthers):
            self.sent += len(effect.commands)
            self.links.tell(effect)
        elif isinstance(effect, ToSelf):
            self.obey(effect.command)
        elif isinstance(effect, io.SendPeer):
            self.peer_answers(effect)
        elif isinstance(effect, io.SendLeader) and isinstance(effect.message, m.Report):
            table = tuple(m.Assignment(x.replica, (i,)) for i, x in enumerate(self.record.roster))
            self.feed(io.FromLeader(m.Resume(self.record.fence, 0, table[:1])))

    def obey(self, command: RankCommand) -> None:
        """Perform rank 0's own part of a command, which takes no time."""
        effect = command.effect
        if isinstance(effect, io.LinkUp):
            self.answer(io.Linked(effect.record.epoch))
        elif isinstance(effect, io.Compute):
            self.marks.append((time.monotonic(), time.process_time(), self.sent))
            if effect.step >= self.steps + WARM_UP:
                self.done.set()
            else:
                self.answer(io.Computed(effect.step, effect.micro_batches, 1.0))
        elif isinstance(effect, io.StartExchange):
            self.answer(io.Exchanged(effect.fence.epoch, effect.step, DIGEST))
        elif isinstance(effect, io.Apply):
            self.answer(io.Ready(effect.step + 1, DIGEST))
        elif isinstance(effect, io.Install):
            self.answer(io.Installed(effect.step, effect.digest))
        elif isinstance(effect, io.TellDigest):
            self.answer(io.Digested(effect.step, DIGEST))
        elif isinstance(effect, io.Stop):
            self.stopped.set()

    def peer_answers(self, effect: io.SendPeer) -> None:
        """Let this member say what rank 0 has said to it, about its own part."""
        number = self.record.names.index(effect.replica)
        said = effect.message
        if isinstance(said, m.Contribution):
            said = m.Contribution(said.fence, said.step, 1.0, (number,), layout=DIGEST)
        self.feed(io.FromPeer(effect.replica, effect.incarnation, said))


class Followers:
    """The process with the mock ranks, asked by lines."""

    def __init__(self, on: list[int]) -> None:
        command = [sys.executable, str(HERE / "scale_followers.py")]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=HERE.parent)
        os.sched_setaffinity(self.process.pid, on)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    async def ask(self, line: str) -> dict[str, Any]:
        """Send one line; return the answer."""
        assert self.process.stdout is not None
        self.say(line)
        answer = await asyncio.get_running_loop().run_in_executor(None, self.process.stdout.readline)
        found: dict[str, Any] = json.loads(answer)
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


async def main(
    followers: Followers, replicas: int, ranks: int, per_host: int, steps: int
) -> dict[str, float]:
    head = MockHead(replicas, ranks, steps)
    incarnation = head.record.roster[0].incarnation
    listener = Listener(ListenerIdentity("scale", "r00"), TOKEN, head.links.accept)
    await listener.start("127.0.0.1")
    hosts = [tuple(range(first, first + per_host)) for first in range(0, ranks, per_host)]
    voices = (*((rank,) for rank in hosts[0][1:]), *hosts[1:])
    about = {
        "port": listener.address[1],
        "voices": voices,
        "incarnation": incarnation,
        "token": TOKEN.decode(),
    }
    try:
        began, cpu = time.monotonic(), time.process_time()
        followers.say(json.dumps(about | {"token": TOKEN.decode()}))
        head.links.voices = voices
        await head.links.wait()
        linked, linked_cpu = time.monotonic(), time.process_time()
        head.begin()
        async with asyncio.timeout(LIMIT_S):
            await head.done.wait()
        if head.error is not None:
            raise head.error
        seen, killed = await followers.ask("first"), await followers.ask("kill")
        async with asyncio.timeout(LIMIT_S):
            await head.stopped.wait()
        told = await followers.ask("told")
        walls = [b[0] - a[0] for a, b in zip(head.marks, head.marks[1:], strict=False)][WARM_UP:]
        costs = [b[1] - a[1] for a, b in zip(head.marks, head.marks[1:], strict=False)][WARM_UP:]
        orders = head.marks[-1][2] - head.marks[-2][2]
        return {
            "ranks": ranks,
            "linked_s": linked - began,
            "linked_cpu_s": linked_cpu - cpu,
            "start_s": seen["at"] - began,
            "agreed_s": head.marks[0][0] - linked,
            "agreed_cpu_s": head.marks[0][1] - linked_cpu,
            "step_wall_s": statistics.median(walls),
            "step_cpu_s": statistics.median(costs),
            "commands_per_step": orders,
            "voice_step_cpu_s": seen["cpu_s"] / len(voices) / (steps + WARM_UP + 1),
            "death_told_s": told["at"] - killed["at"],
            "death_noticed_s": head.lost_at - killed["at"],
            "death_told": told["count"],
            "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
    finally:
        await listener.close()


def run(follower_cores: list[int], **about: int) -> dict[str, float]:
    """Measure one head; return its figures."""
    followers = Followers(follower_cores)
    try:
        return uvloop.run(main(followers, **about))
    finally:
        followers.end()


if __name__ == "__main__":
    gc.disable()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps(run(**json.loads(sys.stdin.readline()))), flush=True)
