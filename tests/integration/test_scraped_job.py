"""A real Prometheus scrapes a job's lighthouse and checkpoint servers, and an alert of ours fires."""

from job import Job
from prometheus_process import Prometheus

HELD_STEP = 3


def test_prometheus_scrapes_a_job_and_says_when_it_fails(zygote, tmp_path):
    with Job(zygote, tmp_path / "job", environment={"TINY_STEPS": "20", "TINY_STEP_S": "0.005"}) as job:
        gate = job.folder / "gate"
        job.start("r0", f"forward@{HELD_STEP}=wait:{gate}")
        job.start("r1")
        # This replica raises in step 5, which fails the job.
        job.start("r2", TEST_TRAINER="odd_trainer", ODD="an exception")
        job.wait_for(lambda: len(job.events("r0", "commit")) == HELD_STEP, "the steps before")
        servers = sorted(member["ckpt"].removeprefix("http://") for member in job.status()["members"])
        targets = {"fabric-lighthouse": [job.url.removeprefix("http://")], "fabric-ckpt": servers}
        with Prometheus(tmp_path / "prometheus", targets) as prometheus:
            assert sum(len(group["rules"]) for group in prometheus.ask("rules")["groups"]) >= 19
            job.wait_for(lambda: len(prometheus.query("up == 1")) == 4, "all four targets to be up")
            shown = prometheus.query('fabric_lighthouse_steps{job="test"}')
            assert [value for _, value in shown] == [HELD_STEP], "the label job is the job's name"
            assert [value for _, value in prometheus.query("sum(fabric_lighthouse_members)")] == [3]
            running = prometheus.query('fabric_ckpt_trainer{state="running"} == 1')
            assert sorted(labels["instance"] for labels, _ in running) == servers
            job.wait_for(lambda: prometheus.query("fabric_lighthouse_is_leader == 1"), "the leader")
            firing = 'ALERTS{alertstate="firing", alertname="FabricJobFailed"}'
            assert prometheus.query(firing) == []
            gate.touch()
            job.wait_for(lambda: prometheus.query(firing), "the alert")
            [(labels, _)] = prometheus.query(firing)
            assert (labels["job"], labels["severity"]) == ("test", "critical")
            job.finish()
