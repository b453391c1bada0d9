"""The detector on real processes: three replicas with packed sequences of varying length, one throttled to
half speed.

A timed wait in small pieces stands for the device. First 500 undisturbed steps, then SIGSTOP and SIGCONT in
turns for one replica. The figures: false alarms before, steps until the replica is named, other named
replicas, and steps until its recovery is noticed. Ends with 1 where a target is missed.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(root), str(root / "tests" / "integration")]

from job import Job, Zygote

from benchmarks.common import begin, finish, say, verdict

UNDISTURBED = 500
PATIENCE = 60  # number of steps within which a verdict must come
TURN_S = 0.02  # the slow replica is stopped for this time and then runs for this time, in turns
THROTTLED = "r1"


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


def step_of(job: Job) -> int:
    return int(job.status()["step"])


def named(job: Job, kind: str) -> list[str]:
    return [event["about"] for event in job.told(kind)]


def until_named(job: Job, kind: str, before: int) -> int | None:
    """Steps until the throttled replica has one more event of this kind than ``before``, or None."""
    began = step_of(job)
    while (step := step_of(job)) < began + PATIENCE:
        if named(job, kind).count(THROTTLED) > before:
            return step - began
        time.sleep(0.05)
    return None


def measure(job: Job) -> dict[str, float | None]:
    for number in range(3):
        job.start(f"r{number}")
    job.wait_for(lambda: job.events("r0", "commit"), "the first step")
    job.wait_for(lambda: step_of(job) >= UNDISTURBED, f"{UNDISTURBED} steps", 400.0)
    false = [about for about in named(job, "slow") if about]
    whole = named(job, "slow").count("")
    say(
        f"{UNDISTURBED} undisturbed steps, {len(false)} alarms: {', '.join(false) or 'none'}; "
        f"of the whole job {whole}"
    )
    throttle = Throttle(job.pids[THROTTLED])
    try:
        found = until_named(job, "slow", false.count(THROTTLED))
        health = job.status()["health"]
        say(f"found after {found} steps: {[x['evidence'] for x in health['slow']]}")
        say(f"advice: {(health['advice'] or {}).get('micro_batches')}")
    finally:
        throttle.end()
    cleared = until_named(job, "no longer slow", named(job, "no longer slow").count(THROTTLED))
    others = sum(bool(about) and about != THROTTLED for about in named(job, "slow")) - sum(
        about != THROTTLED for about in false
    )
    return {
        "found_after_steps": found,
        "false_alarms": len(false),
        "whole_job_alarms": whole,
        "others_named": others,
        "cleared_after_steps": cleared,
    }


def main() -> int:
    begin()
    zygote = Zygote()
    environment = {"TEST_TRAINER": "packed_trainer", "PACKED_STEPS": "1000000"}
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Job(zygote, Path(folder), environment=environment) as job,
        ):
            figures = measure(job)
    finally:
        zygote.close()
    met = [
        verdict("steps until it is named", figures["found_after_steps"], at_most=5),
        verdict("alarms in undisturbed steps", figures["false_alarms"], at_most=0),
        verdict("other replicas named", figures["others_named"], at_most=0),
        verdict("steps until it is called well", figures["cleared_after_steps"], at_most=20),
    ]
    finish(figures)
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
