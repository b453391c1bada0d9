"""The lighthouse at 10,000 sessions, and what a fail-over costs a training job.

First 10,000 real sessions over loopback (``lighthouse_crowd.py``: as many processes as there are cores
beside the lighthouses'), each beating once a second, with one real lighthouse on a core of its own, a
second one that stands by there, and a real etcd beside the crowd: five minutes, in which three members die.
Then the leader is stopped, and all sessions come to the second one at once; and back to the first one when
that is killed. Then three training processes with steps of 50 ms beside two lighthouses: the leader is
stopped, killed, and all of etcd is killed, five times each.

``SESSIONS`` and ``WINDOW_S`` in the environment make it smaller for a quick look; the bounds stay the same.
A figure that could not be measured is null, and missed.
Lateness is from when a member sent a beat to when it had the answer, so it holds the crowd's own share too;
how late the crowd was with sending, and how much of its core it took, is said beside it.
"""

import functools
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import begin, finish, no_options, quantile, say, table, verdict
from lighthouse_fleet import BenchmarkLighthouse, Etcd, Trainers, cores, pinned, wait_for

HERE = Path(__file__).resolve().parent

SESSIONS = int(os.environ.get("SESSIONS", "10000"))
WINDOW_S = float(os.environ.get("WINDOW_S", "300"))
DEATHS = 3
REPEATS = 5
BACK_S = 60.0  # all members must be back within this time
CREDIT_S = 8.0  # after this time a new leader evicts members that it has not heard
STEADY_S = 3.0  # the pause between the start's burst and the measured window
TOLD_WITHIN_S = 30.0
LOOK_S = 0.25  # pause between two questions to the crowd, because each answer examines every session
UNDISTURBED = 200  # steps
JOB = "crowd"
START_S = 120.0
KEYS = (
    "sessions",
    "push_epoch_p99_s",
    "core_share",
    "beat_lateness_p99_s",
    "false_deaths",
    "store_writes_per_s",
    "rss_kb_per_session",
    "window_s",
    "start_s",
    "push_epoch_max_s",
    "beats_per_s",
    "beat_lateness_median_s",
    "beat_lateness_max_s",
    "crowd_core_share",
    "crowd_lateness_p99_s",
    "all_back_s",
    "all_back_missing",
    "all_back_false_deaths",
    "failover_s",
    "training_stall_during_failover_s",
    "training_stall_s",
    "step_undisturbed_p99_s",
)
# These figures have two values: after a leader's clean end, and after its kill.
BY_HOW = ("all_back_s", "all_back_missing", "all_back_false_deaths", "failover_s")


# --- ten thousand sessions ----------------------------------------------------------------------------------


class CrowdProcesses:
    """The processes that hold the sessions, asked by lines."""

    def __init__(self, urls: list[str], token: str, stack: ExitStack) -> None:
        self.names = [f"replica-{i:05d}" for i in range(SESSIONS)]
        self.killed = 0
        _, others = cores()
        self.processes: list[subprocess.Popen[str]] = []
        for number in range(len(others)):
            mine = self.names[number :: len(others)]
            about = {"urls": urls, "token": token, "job": JOB, "names": mine, "total": SESSIONS}
            process = subprocess.Popen(
                [sys.executable, str(HERE / "lighthouse_crowd.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=HERE.parent,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            os.sched_setaffinity(process.pid, others)
            self.processes.append(process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(about) + "\n")
            process.stdin.flush()
        for process in self.processes:
            self._answer(process)

    def ask(self, word: str) -> list[dict[str, Any]]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(word + "\n")
            process.stdin.flush()
        return [self._answer(process) for process in self.processes]

    def kill(self, number: int) -> float:
        """Cut this session as the kernel does for a dead process; return the time."""
        self.killed += 1
        process = self.processes[number % len(self.processes)]
        assert process.stdin is not None
        process.stdin.write(f"kill {self.names[number]}\n")
        process.stdin.flush()
        return float(self._answer(process)["at"])

    def run(self, sessions: int, after: int = 0, since: float = 0.0) -> bool:
        """Return whether this number of sessions runs in an epoch after the given one, opened since the given
        time.
        """
        states = self.ask("state")
        lowest, oldest = min(s["lowest"] for s in states), min(s["oldest"] for s in states)
        return sum(s["running"] for s in states) == sessions and lowest > after and oldest > since

    @staticmethod
    def _answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("a process of the crowd ended: its words are above")
        found: dict[str, Any] = json.loads(line)
        return found


def crowd_figures(stack: ExitStack, folder: Path, result: dict[str, Any]) -> None:
    """Write into ``result`` the figures of the start, of the window with its deaths, and of the
    fail-overs.
    """
    core, others = cores()
    etcd = stack.enter_context(Etcd(folder))
    pinned(etcd, others)
    lighthouse, second = (
        stack.enter_context(BenchmarkLighthouse(folder, etcd.url, x)) for x in ("first", "second")
    )
    for each in (lighthouse, second):
        pinned(each, [core])
    empty_kb, began = lighthouse.rss_kb(), time.monotonic()
    crowd = CrowdProcesses([lighthouse.url, second.url], lighthouse.token, stack)
    wait_for(lambda: crowd.run(SESSIONS), "every session to run in the first epoch", START_S, LOOK_S)
    result |= {"sessions": SESSIONS, "start_s": round(time.monotonic() - began, 2)}
    say(f"{SESSIONS} sessions run {result['start_s']} s after the first was opened")
    time.sleep(STEADY_S)
    result["rss_kb_per_session"] = round((lighthouse.rss_kb() - empty_kb) / SESSIONS, 2)
    measured("the window", lambda: result.update(window_figures(crowd, lighthouse, etcd)))
    measured("the return", lambda: returns(crowd, (lighthouse, second), core, result))
    where = f"the lighthouses on core {core}, crowd and etcd on {', '.join(map(str, others))}"
    table(f"{SESSIONS} sessions; {where}", ("what", "figure"), [*result.items()])


def window_figures(crowd: CrowdProcesses, lighthouse: BenchmarkLighthouse, etcd: Etcd) -> dict[str, float]:
    """The window with its deaths."""
    crowd_cpu_s = sum(found["cpu_s"] for found in crowd.ask("mark"))
    cpu_s, revision, began = lighthouse.cpu_s(), etcd.revision(), time.monotonic()
    seen = deaths(crowd, began)
    pushes, late, crowd_cpu_s = seen.pushes, seen.late, seen.cpu_s - crowd_cpu_s
    seconds = time.monotonic() - began
    cpu_s, writes = lighthouse.cpu_s() - cpu_s, etcd.revision() - revision
    left = crowd.ask("state")
    open_ = sum(state["open"] for state in left)
    for state in left:
        for sentence in (*state["lost"], *state["refused"]):
            say(f"lost: {sentence}")
    members = len(lighthouse.job(JOB)["roster"])
    return {
        "push_epoch_p99_s": round(quantile(pushes, 0.99), 4),
        "core_share": round(cpu_s / seconds, 4),
        "beat_lateness_p99_s": share_of(late, 0.99),
        "false_deaths": (SESSIONS - DEATHS) - min(open_, members),
        "store_writes_per_s": round(writes / seconds, 3),
        "window_s": round(seconds, 1),
        "push_epoch_max_s": round(max(pushes), 4),
        "beats_per_s": round(late.total() / seconds, 1),
        "beat_lateness_median_s": share_of(late, 0.5),
        "beat_lateness_max_s": share_of(late, 1.0),
        "crowd_core_share": round(crowd_cpu_s / seconds, 4),
        "crowd_lateness_p99_s": share_of(seen.own, 0.99),
    }


def measured(what: str, part: Callable[[], object]) -> None:
    """Run this part; if it fails, print the reason and leave its figures empty."""
    try:
        part()
    except Exception as error:  # noqa: BLE001  (whatever it is: the other figures are still worth having)
        say(f"MISSED  {what} could not be measured: {type(error).__name__}: {error}")


def all_come_back(
    crowd: CrowdProcesses, leader: BenchmarkLighthouse, other: BenchmarkLighthouse, by: signal.Signals
) -> dict[str, float]:
    """End the leader by this signal, so that all sessions look for the other lighthouse at once. Return the
    seconds until all members run there, the number of missing members, and the number taken for dead.
    """
    wait_for(other.follows, "the other to stand in line")
    left, began = SESSIONS - crowd.killed, time.monotonic()
    leader.signal(by)
    while not crowd.run(left, since=began) and time.monotonic() < began + BACK_S:
        time.sleep(LOOK_S)
    seconds = time.monotonic() - began
    missing = left - sum(state["running"] for state in crowd.ask("state"))
    time.sleep(CREDIT_S)
    members = len(other.job(JOB)["roster"]) if other.serves() else 0
    return {
        "all_back_s": round(seconds, 2),
        "all_back_missing": missing,
        "all_back_false_deaths": left - members,
    }


def returns(
    crowd: CrowdProcesses,
    pair: tuple[BenchmarkLighthouse, BenchmarkLighthouse],
    core: int,
    result: dict[str, Any],
) -> None:
    """Once to the second lighthouse after a clean end of the first, and back when that is killed."""
    first, second = pair
    for name, leader, other, by in (
        ("clean", first, second, signal.SIGTERM),
        ("kill", second, first, signal.SIGKILL),
    ):
        for key, value in all_come_back(crowd, leader, other, by).items():
            result[key][name] = value
        if leader is first:
            leader.wait()
            leader.launch()
            wait_for(leader.follows, "the first to stand in line again")
            pinned(leader, [core])


def share_of(late: Counter[int], share: float) -> float:
    """Return the lateness in seconds that this share of the heartbeats does not exceed."""
    seen, all_ = 0, late.total()
    for tenths in sorted(late):
        seen += late[tenths]
        if seen >= share * all_:
            return tenths / 10_000
    return 0.0


@dataclass(slots=True)
class CrowdReport:
    """What the crowd saw in the window: seconds from each death to when each member was told of the epoch
    without the dead one, the lateness of every beat and of the crowd with it in tenths of a millisecond, and
    the processor seconds that the crowd has taken since it began."""

    pushes: list[float] = field(default_factory=list)
    late: Counter[int] = field(default_factory=Counter)
    own: Counter[int] = field(default_factory=Counter)
    cpu_s: float = 0.0

    def collect(self, crowd: CrowdProcesses, at: float | None = None) -> int:
        """What was seen since the last time, ``at`` which a member died; how many were told of an epoch."""
        self.cpu_s, told = 0.0, 0
        for found in crowd.ask("mark"):
            self.cpu_s += found["cpu_s"]
            for counts, new in ((self.late, found["late"]), (self.own, found["own"])):
                counts.update({int(tenths): count for tenths, count in new.items()})
            for times in found["told"].values():
                told += len(times)
                if at is not None:
                    self.pushes.extend(when - at for when in times)
        return told


def deaths(crowd: CrowdProcesses, began: float) -> CrowdReport:
    """The window: its deaths evenly in it."""
    seen = CrowdReport()
    for number in range(DEATHS):
        pause = began + WINDOW_S * (number + 1) / (DEATHS + 1) - time.monotonic()
        time.sleep(max(0.0, pause))
        seen.collect(crowd)
        epoch = min(state["lowest"] for state in crowd.ask("state"))
        at = crowd.kill(SESSIONS // 2 + number)
        left = SESSIONS - 1 - number
        gone_on = functools.partial(crowd.run, left, after=epoch)
        try:
            wait_for(gone_on, "the members to go on", TOLD_WITHIN_S, LOOK_S)
        except TimeoutError as error:
            say(f"MISSED  death {number + 1}: {error}")
        before = len(seen.pushes)
        told = seen.collect(crowd, at)
        when = seen.pushes[before:] or [math.inf]
        say(f"  death {number + 1}: members were told {min(when):.2f} to {max(when):.2f} s after it")
        if told != left:
            say(f"death {number + 1}: {told} epochs were told to {left} members")
    time.sleep(max(0.0, began + WINDOW_S - time.monotonic()))
    seen.collect(crowd)
    return seen


# --- a training job -----------------------------------------------------------------------------------------


def training_figures(stack: ExitStack, folder: Path, result: dict[str, Any]) -> None:
    """Measure three trainers, and the time without a leader, into ``result``."""
    etcd = stack.enter_context(Etcd(folder))
    pair = [stack.enter_context(BenchmarkLighthouse(folder, etcd.url, name)) for name in ("first", "second")]
    trainers = stack.enter_context(Trainers(folder, [x.url for x in pair], pair[0].token))
    trainers.wait_steps(UNDISTURBED + 20)
    undisturbed = trainers.durations()[20:]
    p99 = quantile(undisturbed, 0.99)
    clean, killed, stalls = [], [], {"kill": [], "etcd": []}  # type: ignore[var-annotated]
    for _ in range(REPEATS):
        clean.append(hand_over(pair, signal.SIGTERM, trainers)[0])
        seconds, longest = hand_over(pair, signal.SIGKILL, trainers)
        killed.append(seconds)
        stalls["kill"].append(longest - p99)
        began = time.monotonic()
        etcd.kill()
        trainers.wait_steps(100)
        etcd.launch()
        wait_for(lambda: any(x.serves() for x in pair), "somebody to lead again")
        stalls["etcd"].append(max(trainers.durations(since=began)) - p99)
    table(
        "three trainers, steps of 50 ms",
        ("what", "median", "worst"),
        [
            ("undisturbed step", f"{statistics.median(undisturbed):.4f}", f"{max(undisturbed):.4f}"),
            ("undisturbed step, p99", f"{p99:.4f}", ""),
            *(
                (name, f"{statistics.median(values):.4f}", f"{max(values):.4f}")
                for name, values in (
                    ("clean hand-over", clean),
                    ("fail-over after a kill", killed),
                    ("stall: leader killed", stalls["kill"]),
                    ("stall: etcd killed", stalls["etcd"]),
                )
            ),
        ],
    )
    medians = {name: round(statistics.median(values), 4) for name, values in stalls.items()}
    result |= {
        "failover_s": {
            "clean": round(statistics.median(clean), 4),
            "kill": round(statistics.median(killed), 4),
        },
        "training_stall_during_failover_s": max(medians.values()),
        "training_stall_s": medians,
        "step_undisturbed_p99_s": round(p99, 4),
    }


def hand_over(
    pair: list[BenchmarkLighthouse], number: signal.Signals, trainers: Trainers
) -> tuple[float, float]:
    """End the leader by this signal; return the seconds until the other leads, and the longest step
    meanwhile.
    """
    wait_for(lambda: any(x.serves() for x in pair), "somebody to lead")
    leader = next(x for x in pair if x.serves())
    other = pair[1 - pair.index(leader)]
    wait_for(other.follows, "the other to stand in line")
    began = time.monotonic()
    leader.signal(number)
    wait_for(other.serves, "the other to lead", pause_s=0.001)
    seconds = time.monotonic() - began
    leader.wait()
    leader.launch()
    trainers.wait_steps(20)
    return seconds, max(trainers.durations(since=began))


def main() -> None:
    no_options(__doc__)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < SESSIONS + 200:
        raise SystemExit(
            f"lighthouse.py: {SESSIONS} sessions need as many open files, and {hard} are allowed"
        )
    begin()
    result: dict[str, Any] = dict.fromkeys(KEYS)
    for key in BY_HOW:
        result[key] = {"clean": None, "kill": None}
    for what, figures in (("the crowd", crowd_figures), ("the training job", training_figures)):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fabric-lighthouse-")))
            measured(what, functools.partial(figures, stack, folder, result))
    verdict("sessions", result["sessions"], at_least=10_000)
    verdict("epoch told to all after a death, p99 s", result["push_epoch_p99_s"], at_most=1.0)
    verdict("share of one core", result["core_share"], at_most=0.8)
    verdict("lateness of beats, p99 s", result["beat_lateness_p99_s"], at_most=0.25)
    verdict("false deaths", result["false_deaths"], at_most=0)
    for name in ("clean", "kill"):
        verdict(f"sessions not back, {name}", result["all_back_missing"][name], at_most=0)
        verdict(f"false deaths when all come back, {name}", result["all_back_false_deaths"][name], at_most=0)
    verdict("store writes per s", result["store_writes_per_s"], at_most=5.0)
    verdict("clean hand-over, s", result["failover_s"]["clean"], at_most=0.05)
    verdict("training stall, s", result["training_stall_during_failover_s"], at_most=0.05)
    finish(result)


if __name__ == "__main__":
    main()
