"""A token is replaced while its job runs, as docs/runbook.md says: no process ends, and the old token opens
nothing.
"""

import json
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from job import Job

OLD, NEW = "a-test-token", "the-next-token"


def status_of(url: str, token: str) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:
        return 0


def test_a_token_is_replaced_while_the_job_runs(zygote, tmp_path):
    key = tmp_path / "drill-key"
    write(key, "a-key-of-drills")
    environment = {"TINY_STEPS": "1000000", "TINY_STEP_S": "0.1", "FABRIC_DRILL": str(key)}
    with Job(zygote, tmp_path, replicas=2, environment=environment) as job:
        # Every process has its own token file, and each of the three steps changes the files one by one.
        files = {"lighthouse": job.token, "r0": tmp_path / "token-r0", "r1": tmp_path / "token-r1"}
        for name in ("r0", "r1"):
            write(files[name], OLD)
            job.start(name, FABRIC_TOKEN_FILE=str(files[name]))

        def goes_on(token: str) -> None:
            before = step_of(job, token)
            job.wait_for(lambda: step_of(job, token) > before + 2, "commits")

        def opens(token: str, *, everywhere: bool) -> bool:
            """Return whether the token opens all services, or, with ``everywhere`` False, none."""
            wanted = 200 if everywhere else 401
            places = [f"{job.url}/v1/jobs/test", *(f"{url}/v1/snapshots" for url in servers)]
            return all(status_of(url, token) == wanted for url in places)

        job.wait_for(lambda: len(members(job, OLD)) == 2, "both members")
        servers = [member["ckpt"] for member in members(job, OLD)]
        assert opens(OLD, everywhere=True) and opens(NEW, everywhere=False)
        for lines in ((OLD, NEW), (NEW, OLD)):
            for file in files.values():
                write(file, *lines)
            job.wait_for(lambda: opens(NEW, everywhere=True) and opens(OLD, everywhere=True), "both")
        # Every session and status connection opens again, with the token now in force.
        port = urlsplit(job.url).port
        job.stop_lighthouse()
        job.start_lighthouse(port)
        job.wait_for(lambda: opens(NEW, everywhere=True), "the lighthouse")
        goes_on(NEW)
        for file in files.values():
            write(file, NEW)
        job.wait_for(
            lambda: opens(OLD, everywhere=False) and opens(NEW, everywhere=True), "the end of the old"
        )
        job.wait_for(lambda: "r1" in incarnations(job, NEW), "r1 in the epoch")
        first = incarnations(job, NEW)
        job.kill("r1")
        job.wait_for(lambda: job.ended("r1") is not None, "the end of r1")
        # r1 uses the new token for its session, its links and its fetch of the state.
        job.start("r1", FABRIC_TOKEN_FILE=str(files["r1"]))
        job.wait_for(lambda: incarnations(job, NEW).get("r1", 0) > first["r1"], "r1 to take part again")
        goes_on(NEW)
        # A new lighthouse has heard of no injector yet, so those that it knows have asked with the new token.
        job.stop_lighthouse()
        job.start_lighthouse(port)
        job.wait_for(lambda: injectors(job, NEW) == {"r0", "r1"}, "the injectors' questions")
        assert job.starts == {"r0": 1, "r1": 2} and job.ended("r0") is None and job.ended("r1") is None


def shown(job: Job, token: str) -> dict:
    """The job as the lighthouse shows it."""
    request = urllib.request.Request(f"{job.url}/v1/jobs/test", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())
    except urllib.error.URLError:  # the lighthouse is just starting, or does not know the job yet
        return {"members": []}


def injectors(job: Job, token: str) -> set[str]:
    """Return the replicas whose injectors have asked the lighthouse lately."""
    request = urllib.request.Request(
        f"{job.url}/v1/jobs/test/drill", headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return {entry["replica"] for entry in json.loads(answer.read())["injectors"]}
    except urllib.error.URLError:  # the lighthouse is just starting, or does not know the job yet
        return set()


def members(job: Job, token: str) -> list[dict]:
    return [member for member in shown(job, token)["members"] if member["ckpt"]]


def step_of(job: Job, token: str) -> int:
    return max((member["step"] or 0 for member in members(job, token)), default=0)


def incarnations(job: Job, token: str) -> dict[str, int]:
    """Return the incarnations of the members."""
    return {x["replica"]: x["incarnation"] for x in members(job, token) if x["running"]}


def write(file: Path, *tokens: str) -> None:
    draft = file.with_suffix(".draft")
    draft.touch(mode=0o600)
    draft.write_text("".join(f"{token}\n" for token in tokens))
    draft.replace(file)
