"""Real trainers that wait for others say on standard error for whom, in the lighthouse's words, without being
asked and without filling a log."""

import re

from job import Job
from test_failures import finish_and_check


def told(job: Job, replica: str) -> list[str]:
    path = job.folder / f"{replica}.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if " has waited " in line]


def test_a_trainer_that_waits_says_for_whom_at_the_start_and_in_a_step(zygote, tmp_path):
    gate = tmp_path / "go-on"
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "12", "TINY_STEP_S": "0"}) as job:
        job.start("r0")
        job.wait_for(lambda: told(job, "r0"), "r0 to say that it waits")
        [line] = told(job, "r0")
        assert line.startswith("fabric: r0 has waited ")
        until = r"after 120 s \(now [\d.]+ s, at [\d:]+ UTC\) 1 will do"
        assert re.search(f"s: for replicas to start with: 1 of 3 have a session, {until}$", line), line
        job.start("r2", f"forward@6=wait:{gate}")
        # r1 starts last, so it has no earlier wait, and this is its first log line about a wait
        job.start("r1")

        def named() -> list[str]:
            return [line for line in told(job, "r1") if "s: for r2" in line]

        job.wait_for(named, "r1 to say that it waits for r2")
        # The line has the lighthouse's sentence, or the replica's own if the lighthouse has sent none yet.
        assert re.search(
            r"s: for r2(, in user code in step 6, for .+, may take until .+| in step 6)$", named()[0]
        )
        gate.touch()
        finish_and_check(job, 12)
