"""The threads of a joining replica in a real job.

While it replays outside of the roster, torch's optimizers step at low priority and user code runs in the main
thread. The state is bitwise that of the other members.
"""

import os
import signal

from job import Job
from test_ways_in import said


def states(job: Job, replica: str) -> dict[int, str]:
    """The state's digest by step."""
    return {event["step"]: event["digest"] for event in job.events(replica, "state")}


def test_a_joining_replica_replays_at_low_priority_and_then_steps_in_the_main_thread(zygote, tmp_path):
    # The test ends the job after the join, so the number of steps does not matter.
    environment = {
        "TEST_TRAINER": "low_priority_trainer",
        "EXAMPLE_STEPS": "100000",
        "EXAMPLE_PAUSE_S": "0.05",
    }
    with Job(zygote, tmp_path, replicas=2, environment=environment) as job:
        job.start_all({"r1": "ring@6=kill"})
        job.wait_for(lambda: job.ended("r1") is not None, "the death of r1")
        job.start("r1", "install=stop")
        job.wait_for(lambda: job.is_stopped("r1"), "r1 to stop with a state that it has not loaded")
        before = len(job.events("r0", "commit"))
        job.wait_for(lambda: len(job.events("r0", "commit")) > before + 1, "steps that r1 must replay")
        os.kill(job.pids["r1"], signal.SIGCONT)

        def steps(replayed: bool) -> list[int]:
            joined = job.events("r1", "joined")
            if not joined:
                return []
            commits = [e for e in job.events("r1", "commit") if e["step"] > 6]
            return [e["step"] for e in commits if (e["replay"] if replayed else e["contributed"])]

        job.wait_for(lambda: len(steps(replayed=False)) > 2, "steps that r1 makes with the other one")
        threads = said(job, "r1", "ran")
        low = "0 fabric-low-priority MainThread"
        assert threads[steps(replayed=True)[0]] == low
        assert {threads[step] for step in steps(replayed=True)} <= {low, "0 MainThread MainThread"}
        own = {threads[step].split(maxsplit=1)[1] for step in steps(replayed=False)[:2]}
        assert own == {"MainThread MainThread"}
        ours, theirs = states(job, "r0"), states(job, "r1")
        both = ours.keys() & theirs.keys()
        assert set(steps(replayed=True)) <= {step - 1 for step in both}
        assert {step: ours[step] for step in both} == {step: theirs[step] for step in both}
