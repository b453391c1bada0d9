"""A stopped checkpoint server stops no trainer; the lighthouse reports it, and the server recovers."""

import json
import os
import signal

from job import Job

STEPS = 110
# The gate comes seconds after the server's return, because a failed snapshot is tried again after a second.
LAST_GATE = 100


def test_a_stopped_checkpoint_server_costs_no_step_is_reported_and_heals(zygote, tmp_path):
    environment = {"FABRIC_SNAPSHOT_EVERY": "2", "TINY_STEPS": str(STEPS), "TINY_STEP_S": "0.04"}
    gate, end = tmp_path / "go-on", tmp_path / "end"
    with Job(zygote, tmp_path, replicas=2, environment=environment) as job:
        job.start_all({"r0": f"optimizer@30=wait:{gate},optimizer@{LAST_GATE}=wait:{end}"})
        job.wait_for(lambda: len(job.events("r1", "commit")) >= 4, "some steps")
        [server] = [s for s in job.status()["checkpoint_servers"] if s["replica"] == "r1"]
        pid = int((tmp_path / "run" / "r1" / "ckpt.lock").read_text())
        os.kill(pid, signal.SIGSTOP)
        try:
            # Meanwhile at least ten snapshots are due; waiting for the stopped server would take half a
            # minute each.
            job.wait_for(gate.with_name("go-on.awaited").exists, "the steps until the gate")
            job.wait_for(lambda: job.told("server silent"), "the lighthouse to say it")
            [event] = job.told("server silent")
            assert event["about"] == "r1" and "checkpoint server has not answered for" in event["why"]
            verdicts = {member["replica"]: member["verdict"] for member in job.status()["members"]}
            assert verdicts["r0"] == "alive"
            assert verdicts["r1"].startswith("alive, but its checkpoint server has not answered for")
        finally:
            os.kill(pid, signal.SIGCONT)
        job.wait_for(lambda: job.told("server heard"), "the lighthouse to hear it again")

        def newest() -> int:
            return max(s["step"] for s in json.loads(job.ask(f"{server['ckpt']}/v1/snapshots")))

        gate.touch()
        job.wait_for(lambda: newest() > 30, "a snapshot of r1 again")
        end.touch()
        job.finish()
        assert set(job.codes.values()) == {0}, job.logs()
        assert not job.told("evicting")
        assert [e["step"] for e in job.events("r1", "commit")] == list(range(STEPS))
