"""After the death of all trainers the job resumes from host memory, at the step that ``recoverable``
showed.
"""

import json
import time

from job import Job

from fabric.audit.journal import read_run
from fabric.audit.summary import judge

EVERY, STEPS = 4, 24


def recoverable(job: Job) -> dict:
    return job.status()["recoverable"] or {"step": -1, "age_s": 0.0}


def test_replicas_killed_all_at_once_resume_from_the_newest_recoverable_state(zygote, tmp_path):
    environment = {"FABRIC_SNAPSHOT_EVERY": str(EVERY), "TINY_STEPS": str(STEPS)}
    with Job(zygote, tmp_path, environment=environment) as job:
        job.start_all()
        job.wait_for(lambda: job.events("r0", "commit"), "a step")
        job.wait_for(lambda: recoverable(job)["step"] >= 2 * EVERY, "snapshots")
        servers = [member["ckpt"] for member in job.status()["members"]]
        for replica in job.pids:
            job.kill(replica)
        job.wait_for(lambda: all(job.ended(r) is not None for r in job.pids), "everybody's death")
        # The trainers are dead, but their servers still hold the state, which gets older.
        job.wait_for(lambda: recoverable(job)["age_s"] > 0.3, "the state to age")
        left = recoverable(job)
        entries = [
            {**s, "server": url} for url in servers for s in json.loads(job.ask(f"{url}/v1/snapshots"))
        ]
        taken = [s["created"] for s in entries if s["step"] == left["step"]]
        assert taken and left["step"] == max(s["step"] for s in entries) and left["step"] % EVERY == 0
        assert left["age_s"] <= time.time() - min(taken) + 0.001
        job.finish()
        assert set(job.codes.values()) == {0}, job.logs()

        commits = {
            g: [e for r in job.pids for e in job.events(r, "commit") if e["generation"] == g] for g in (1, 2)
        }
        assert {e["step"] for e in commits[2]} == set(range(left["step"], STEPS))
        # No server sent the state: each replica took it from its own server's memory.
        for replica, server in zip(job.pids, servers, strict=True):
            (join,) = [e for e in job.events(replica, "join") if e["step"] == left["step"]][:1]
            held = any(s["step"] == left["step"] for s in entries if s["server"] == server)
            assert (list(join["sources"]) == ["own memory"]) == held, join
        # The lost steps were committed after the state was taken, so within the state's age.
        lost = [e for e in commits[1] if e["step"] >= left["step"]]
        assert all(e["t"] >= min(taken) for e in lost)
        assert len({e["step"] for e in lost}) <= EVERY + 1, "every fourth step, and the one being copied"
        verdict = judge(read_run(job.folder))
        assert not verdict.broken, verdict.broken[:5]
        assert verdict.summary.steps_lost == len({e["step"] for e in lost})
