"""A slow replica found and lived with, on real processes: three replicas of one rank with packed sequences of
varying length, one of them throttled to half speed.

A timed wait in small pieces stands for the device. First undisturbed steps, then SIGSTOP and SIGCONT in turns
for one replica: the lighthouse must name it, and only it. The throughput is measured undisturbed, throttled
in the mode advise, and throttled in the mode act. Then the throttle ends, and all shares must be given back.
Ends with 1 where a target is missed. With ``--undisturbed 60`` the run is short; its false alarms count for
nothing.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

if str(ROOT := Path(__file__).resolve().parent.parent) not in sys.path:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "integration")]

from job import Job, Zygote

from benchmarks.common import begin, finish, say, verdict
from fabric.health.detector import JobDetector
from fabric.health.work import WorkAmount

UNDISTURBED = 500
SPAN = 60  # steps over which a throughput is measured
PATIENCE = 120  # steps for which an event is waited for
TURN_S = 0.02  # stopped for so long, then running for so long
THROTTLED = "r1"
SPEEDS = (1.0, 0.5, 1.0)  # relative speeds of the replicas under the throttle
REPORTS = 300


class Throttle:
    """Stops a process half of the time, until ``end``."""

    def __init__(self, pid: int) -> None:
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            os.kill(self._pid, signal.SIGSTOP)
            time.sleep(TURN_S)
            os.kill(self._pid, signal.SIGCONT)
            self._over.wait(TURN_S)

    def end(self) -> None:
        self._over.set()
        self._thread.join()


@dataclass(frozen=True)
class Commits:
    """The times of the commits of one replica."""

    times: list[float]

    @classmethod
    def of(cls, job: Job) -> "Commits":
        return cls([event["t"] for event in job.events("r0", "commit")])

    def between(self, first: float, last: float) -> int:
        return sum(first < at <= last for at in self.times)

    def rate(self, since: float) -> float:
        """Steps a second from the first commit after ``since`` to the newest one."""
        later = [at for at in self.times if at > since]
        return (len(later) - 1) / (later[-1] - later[0]) if len(later) > 1 else 0.0


def wait_steps(job: Job, steps: int, since: float, done: Callable[[], object] = lambda: False) -> bool:
    """Wait for ``steps`` commits after ``since``, or until ``done``; return whether it was done."""
    while not done():
        if Commits.of(job).between(since, time.time()) >= steps:
            return False
        time.sleep(0.1)
    return True


def rate_over(job: Job, steps: int) -> float:
    """The throughput of the next ``steps`` steps."""
    began = time.time()
    wait_steps(job, steps, began)
    return Commits.of(job).rate(began)


def steps_until(job: Job, since: float, event: Callable[[], float | None]) -> int | None:
    """Commits from ``since`` to the time of the event, or None if it does not come in time."""
    wait_steps(job, PATIENCE, since, lambda: event() is not None)
    at = event()
    return None if at is None else Commits.of(job).between(since, at)


def event_at(job: Job, kind: str, since: float, about: str = THROTTLED) -> float | None:
    times = [x["t"] for x in job.told(kind) if x["t"] > since and x["about"] == about]
    return min(times, default=None)


def set_mode(job: Job, mode: str) -> None:
    command = ["adapt", "--mode", mode, "--why", "a benchmark", "--lighthouse", job.url, "--job", "test"]
    subprocess.run(
        [sys.executable, "-m", "fabric.cli.main", *command, "--token-file", str(job.token)],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def shares(job: Job) -> dict[str, int]:
    return {member["replica"]: member["shares"] for member in job.status()["members"]}


def detector_s() -> float:
    """Processor seconds of the lighthouse's detector for one step of three replicas, verdicts included."""
    detector, began = JobDetector(), 0.0
    for step in range(REPORTS):
        if step == REPORTS // 2:
            began = time.process_time()  # the warm-up is over
        for number in range(len(SPEEDS)):
            amount = WorkAmount(1000.0 + (step * 37 + number * 11) % 500, 0.0, 4.0, 4)
            detector.observe(f"r{number}", 1, step, amount, 1e-4 * amount.tokens)
        detector.slowdowns()
    return (time.process_time() - began) / (REPORTS - REPORTS // 2)


def names(job: Job, since: float = 0.0) -> list[str]:
    """The replicas that the lighthouse has called slow."""
    return [x["about"] for x in job.told("slow") if x["about"] and x["t"] > since]


def throttled(job: Job, healthy: float) -> dict[str, float | None]:
    """The figures under the throttle and after it. ``healthy``: steps a second before it."""
    began = time.time()
    throttle = Throttle(job.pids[THROTTLED])
    try:
        found = steps_until(job, began, lambda: event_at(job, "slow", began))
        say(f"found after {found} steps: {[x['evidence'] for x in job.status()['health']['slow']]}")
        unmitigated = rate_over(job, SPAN)
        set_mode(job, "act")
        ordered = time.time()
        wait_steps(job, PATIENCE, ordered, lambda: len(set(shares(job).values())) > 1)
        in_force = job.status()["health"]["shares"]
        say(f"shares by speed: {in_force and in_force['micro_batches']}")
        mitigated = rate_over(job, SPAN) if in_force else None
    finally:
        throttle.end()
    ended = time.time()
    wait_steps(job, PATIENCE, ended, lambda: len(set(shares(job).values())) == 1)
    removed = Commits.of(job).between(ended, time.time()) if len(set(shares(job).values())) == 1 else None
    healthy = max(healthy, rate_over(job, SPAN))  # the host's other work may have changed meanwhile
    possible = healthy * sum(SPEEDS) / len(SPEEDS)
    say(f"steps/s: healthy {healthy:.2f}, possible {possible:.2f}, unmitigated {unmitigated:.2f}")
    return {
        "found_after_steps": found,
        "others_named": sum(name != THROTTLED for name in names(job, began)),
        "throughput_of_possible": None if mitigated is None else round(mitigated / possible, 3),
        "unmitigated_of_possible": round(unmitigated / possible, 3),
        "removed_after_steps": removed if in_force else None,
    }


def measure(job: Job, undisturbed: int) -> dict[str, float | None]:
    for number in range(len(SPEEDS)):
        job.start(f"r{number}")
    job.wait_for(lambda: job.events("r0", "commit"), "the first step")
    job.wait_for(lambda: len(Commits.of(job).times) >= undisturbed, f"{undisturbed} steps", 900.0)
    healthy = Commits(Commits.of(job).times[-SPAN:]).rate(0.0)
    false = names(job)
    whole = sum(not x["about"] for x in job.told("slow"))
    say(f"{undisturbed} undisturbed steps, {len(false)} alarms: {', '.join(false) or 'none'}")
    say(f"alarms of the whole job, which accuse no replica: {whole}")
    return {
        "false_alarms": len(false),
        "whole_job_alarms": whole,
        "detector_overhead_share": round(detector_s() * healthy, 5),
        **throttled(job, healthy),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--undisturbed", type=int, default=UNDISTURBED, help="steps before the throttle")
    undisturbed = parser.parse_args().undisturbed
    begin()
    zygote = Zygote()
    environment = {"TEST_TRAINER": "packed_trainer", "PACKED_STEPS": "1000000"}
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Job(zygote, Path(folder), environment=environment) as job,
        ):
            figures = measure(job, undisturbed)
    finally:
        zygote.close()
    met = [
        verdict("steps until it is named", figures["found_after_steps"], at_most=5),
        verdict("alarms in undisturbed steps", figures["false_alarms"], at_most=0),
        verdict("other replicas named", figures["others_named"], at_most=0),
        verdict("throughput of what is possible", figures["throughput_of_possible"], at_least=0.9),
        verdict("steps until shares are given back", figures["removed_after_steps"], at_most=20),
        verdict("the detector's share of a step", figures["detector_overhead_share"], at_most=0.005),
    ]
    finish(figures)
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
