"""A link between two real replicas gets slow: the lighthouse names it, and an echo over it confirms it. A
peer that stops in the middle of an echo does not stop the job.
"""

import os
import signal
from pathlib import Path

import pytest
from job import Job
from slow_link import SlowLink
from test_slow_replica import PATIENCE_S, health, slowdowns

# An exchange carries some 0.9 MB over each link, so a slow step takes half a second longer.
SLOW_BYTES_PER_S = 2_000_000
ENVIRONMENT = {
    "TINY_STEPS": "1000000",
    "TINY_WIDTH": "8192",
    "FABRIC_DATA_PLANE": "tcp",
    "FABRIC_DIGEST_EVERY": "50",
}
# The links' warm-up, and the steps from which the alarm learns how much their times vary.
STEPS = 75


def start_behind(job: Job, link: SlowLink, points: str = "") -> None:
    """Start three replicas; what reaches r1 comes through ``link``."""
    job.start("r0", points)
    job.start("r1", FABRIC_BIND=f"127.0.0.1:{link.port}", FABRIC_ADVERTISE=link.host)
    job.start("r2")
    job.wait_for(lambda: job.events("r0", "commit"), "the first step")
    assert job.status()["roster"] == ["r0", "r1", "r2"], "r0 sends to r1"
    job.wait_for(lambda: is_usual_known(job), "the usual times of the links", PATIENCE_S)


def is_usual_known(job: Job) -> bool:
    links = {(x["from"], x["to"]): x["steps"] for x in health(job)["links"]}
    return len(links) == 3 and min(links.values()) >= STEPS


def names_the_link(job: Job) -> bool:
    return any(e["about"] == "r0" and "the link from r0 to r1" in e["why"] for e in job.told("slow"))


def confirmed(job: Job) -> list[str]:
    """What echoes have shown of the link. On a crowded host devices are checked, too."""
    told = [e["why"] for e in job.told("slowness confirmed") if e["about"] == "r0"]
    return [why for why in told if "the link from r0 to r1 has" in why]


def test_a_slow_link_between_replicas_is_named_and_an_echo_confirms_it(zygote, tmp_path):
    with Job(zygote, tmp_path, environment=ENVIRONMENT) as job, SlowLink(SLOW_BYTES_PER_S) as link:
        start_behind(job, link)
        link.is_slow.set()
        job.wait_for(lambda: names_the_link(job), "the link to be named", PATIENCE_S)
        job.wait_for(lambda: confirmed(job), "an echo to confirm it", PATIENCE_S)
        why = confirmed(job)[0]
        assert "the network from r0 to r1 is slow" in why
        records = [x for x in slowdowns(job) if why in [action["why"] for action in x["actions"]]]
        assert [(x["replica"], x["verdict"]) for x in records] == [("r0", "confirmed")], records
        link.is_slow.clear()
        job.wait_for(
            lambda: [e for e in job.told("no longer slow") if e["about"] == "r0"], "its recovery", PATIENCE_S
        )


@pytest.mark.long("client/test_link_echo.py")
def test_a_job_goes_on_when_the_peer_stops_in_the_middle_of_an_echo(zygote, tmp_path):
    go_on = tmp_path / "go-on"
    awaited = Path(f"{go_on}.awaited")
    environment = {**ENVIRONMENT, "FABRIC_EXCHANGE_S": "3"}
    with Job(zygote, tmp_path, environment=environment) as job, SlowLink(SLOW_BYTES_PER_S) as link:
        start_behind(job, link, f"echo=wait:{go_on}")
        link.is_slow.set()
        job.wait_for(awaited.exists, "r0 to be connected for its echo", PATIENCE_S)
        os.kill(job.pids["r1"], signal.SIGSTOP)
        job.wait_for(lambda: job.is_stopped("r1"), "r1 to stop")
        step = max(e["step"] for e in job.events("r0", "commit"))
        go_on.touch()
        job.wait_for(
            lambda: max(e["step"] for e in job.events("r0", "commit")) > step + 3,
            "steps without r1",
            PATIENCE_S,
        )
        job.wait_for(lambda: job.told("slowness no answer"), "the end of the check", PATIENCE_S)
        assert job.starts == {"r0": 1, "r1": 1, "r2": 1}
