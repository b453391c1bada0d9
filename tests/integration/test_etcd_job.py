"""The same job over a real etcd: a kill, the death of the leading lighthouse, and its successor."""

import signal

import pytest
from job import Job
from test_failures import finish_and_check

pytestmark = pytest.mark.etcd


@pytest.mark.long("integration/test_etcd_job.py")
def test_a_kill_with_etcd_as_the_store(zygote, tmp_path, etcd_url):
    environment = {"TEST_STORE": etcd_url, "TEST_NAMESPACE": "kill"}
    with Job(zygote, tmp_path, environment=environment) as job:
        job.start_all({"r1": "ring@12=kill"})
        finish_and_check(job)
        assert job.starts == {"r0": 1, "r1": 2, "r2": 1}


@pytest.mark.long("sim/test_worlds.py")
def test_a_lighthouse_dies_in_the_middle_of_a_recovery(zygote, tmp_path, etcd_url):
    """The lighthouse is killed when a replica dies; the next leader reads the record and decides."""
    environment = {"TEST_STORE": etcd_url, "TEST_NAMESPACE": "failover", "FABRIC_EXCHANGE_S": "30"}
    with Job(zygote, tmp_path, environment=environment) as job:
        job.start_all()
        job.wait_for(lambda: len(job.events("r0", "commit")) > 10, "ten steps")
        port = int(job.url.rsplit(":", 1)[1])
        job.stop_lighthouse(signal.SIGKILL)
        job.kill("r1")
        job.wait_for(lambda: job.events("r0", "abort"), "the survivors' abort")
        job.start_lighthouse(port)
        finish_and_check(job)
        assert job.starts == {"r0": 1, "r1": 2, "r2": 1}


def test_the_leading_lighthouse_of_two_dies_and_the_other_goes_on(zygote, tmp_path, etcd_url):
    """Trainers know both addresses and reach the follower first: it sends them on, and then leads itself."""
    environment = {
        "TEST_STORE": etcd_url,
        "TEST_NAMESPACE": "two",
        "TINY_STEPS": "60",
        "TINY_PATIENT_STEPS": "40",
    }
    with Job(zygote, tmp_path, environment=environment) as job:
        leader, leader_url = job.lighthouse, job.url
        job.start_lighthouse()  # after this call job.lighthouse is the follower, which ends with the job
        try:
            job.environment["FABRIC_LIGHTHOUSE"] = f"{job.url},{leader_url}"
            job.start_all()
            job.wait_for(lambda: len(job.events("r0", "commit")) > 10, "ten steps")
        finally:
            leader.kill()
            leader.wait(timeout=10)
        job.kill("r1")
        finish_and_check(job, 60)
        assert job.starts == {"r0": 1, "r1": 2, "r2": 1}
