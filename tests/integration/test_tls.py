"""A job that speaks HTTP only over TLS in both directions, and the clients that it refuses."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from authority import Authority, mixed, tls_folder
from forked_processes import run_python
from job import SHORT_CONTACT, Job

from fabric.ckpt_server.fetch.fetcher import StateFetcher
from fabric.errors import ConfigError, StateError
from fabric.model import SnapshotRef
from fabric.runtime.http.tls import Tls

TOKEN = "Authorization: Bearer a-test-token"
HELD_STEP = 6
PAGE = Path(__file__).parents[2] / "docs" / "http.md"


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


def curl(address: str, tls: Tls | None, *options: str) -> subprocess.CompletedProcess:
    """As docs/http.md has it."""
    names = zip(("--cert", "--key", "--cacert"), map(str, tls.files if tls else ()), strict=False)
    files = [word for named in names for word in named]
    command = ["curl", "-sS", "-m", "20", "-w", "\n%{http_code}", *files, *options, address]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def status(answer: subprocess.CompletedProcess) -> str:
    return answer.stdout.rpartition("\n")[2]


def test_a_job_over_tls_survives_a_death_and_admits_no_other_certificate(
    zygote, tmp_path, authority, monkeypatch
):
    mine, stranger = authority.tls("mine"), Authority(tmp_path / "other").tls("stranger")
    monkeypatch.setenv("FABRIC_TLS", str(mine.folder))  # the lighthouse and the commands inherit it
    environment = {"TINY_STEPS": "24", "FABRIC_SNAPSHOT_EVERY": "100000%", "FABRIC_TLS": str(mine.folder)}
    with Job(zygote, tmp_path / "job", replicas=2, environment=environment) as job:
        assert job.url.startswith("https://127.0.0.1:")
        job.start("r0", f"forward@{HELD_STEP}=wait:{job.folder / 'go-on'}")
        job.start("r1")
        job.wait_for(lambda: len(job.events("r0", "commit")) == HELD_STEP, "the steps before")
        shown = curl(f"{job.url}/v1/jobs/test", mine, "-H", TOKEN)
        members = {m["replica"]: m for m in json.loads(shown.stdout.rpartition("\n")[0])["members"]}
        ckpt = members["r0"]["ckpt"]
        assert ckpt.startswith("https://127.0.0.1:")
        job.wait_for(lambda: told_by_status(job, mine), "the checkpoint servers' status over TLS")

        assert "test" in [entry["job"] for entry in json.loads(the_line_of_the_page(job, mine))]
        for url in (job.url, ckpt):
            assert status(curl(f"{url}/healthz", mine)) == "200"
            assert status(curl(f"{url}/v1/snapshots", mine)) == "401", "the token is wanted as well"
            refused = curl(f"{url}/healthz", None, "--cacert", str(mine.files[2]))
            assert refused.returncode != 0 and status(refused) == "000", "no certificate, not even for health"
            assert status(curl(f"{url}/healthz", mixed(stranger, mine))) == "000", (
                "a certificate of another authority"
            )
            assert curl(f"{url}/healthz", mixed(mine, stranger)).returncode == 60
            plain = curl(url.replace("https", "http") + "/healthz", None)
            assert status(plain) != "200"
        assert command(job, "status", "--job", "test").returncode == 0
        cut_off = command(job, "status", "--job", "test", FABRIC_TLS="")
        assert cut_off.returncode == 1 and "no lighthouse answers" in cut_off.stderr
        pulled = command(job, "pull", ckpt, "-o", str(tmp_path / "state.safetensors"))
        assert pulled.returncode == 0, pulled.stderr
        the_client_believes_nobody_else(ckpt, mine, stranger, job)

        job.kill("r1")
        job.wait_for(
            lambda: looked_at(job, mine), "the lighthouse's look at the dead one's checkpoint server"
        )
        assert looked_at(job, mine)[0]["process"] != "unknown", "it was let in"
        # Its memory is lost too, or it would need no state of the others.
        os.kill(int((job.folder / "run" / "r1" / "ckpt.lock").read_text()), signal.SIGKILL)
        (job.folder / "go-on").touch()
        job.finish()
        assert set(job.codes.values()) == {0}, job.logs()
        joins = job.events("r1", "join")
        assert joins and all(url.startswith("https://") for e in joins for url in e["sources"])


def the_line_of_the_page(job: Job, tls: Tls) -> str:
    """The curl line of docs/http.md, as it stands there."""
    [line] = re.findall(r"^curl .*--cacert.*$", PAGE.read_text(), re.MULTILINE)
    (job.folder / "auth").write_text(TOKEN + "\n")
    environment = {**os.environ, "FABRIC_TLS": str(tls.folder), "LIGHTHOUSE": job.url}
    return subprocess.run(
        ["bash", "-euc", line], cwd=job.folder, env=environment, capture_output=True, text=True, check=True
    ).stdout


def looked_at(job: Job, tls: Tls) -> list[dict]:
    """Return the lighthouse's probe of r1 after the loss of r1."""
    lines = curl(f"{job.url}/v1/jobs/test/recoveries", tls, "-H", TOKEN).stdout.splitlines()[:-1]
    diagnoses = [json.loads(line).get("diagnosis") for line in lines if line.strip()]
    return [seen for found in diagnoses if found for seen in found["seen"] if seen["replica"] == "r1"]


def told_by_status(job: Job, tls: Tls) -> bool:
    answer = curl(f"{job.url}/v1/jobs/test", tls, "-H", TOKEN).stdout.rpartition("\n")[0]
    return all(
        m["trainer_status"] and m["trainer_status"]["trainer"] == "running"
        for m in json.loads(answer)["members"]
    )


def command(job: Job, *arguments: str, **others: str) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "FABRIC_LIGHTHOUSE": job.url,
        "FABRIC_TOKEN_FILE": str(job.token),
        **others,
    }
    return run_python("-m", "fabric.cli.main", *arguments, environment=environment)


def the_client_believes_nobody_else(ckpt: str, mine: Tls, stranger: Tls, job: Job) -> None:
    """Check that a fetch with the right certificates succeeds, and any other is refused before the first
    byte.
    """
    [entry] = json.loads(curl(f"{ckpt}/v1/snapshots", mine, "-H", TOKEN).stdout.rpartition("\n")[0])[-1:]
    state, memory = (
        SnapshotRef(entry["generation"], entry["step"], entry["digest"]),
        bytearray(entry["nbytes"]),
    )

    def fetch(tls: Tls) -> None:
        fetcher = StateFetcher("a-test-token", ssl_context=tls.client_context())
        fetcher.fetch_state([ckpt], state, lambda nbytes: memoryview(memory))

    for tls in (mixed(mine, stranger), mixed(stranger, mine)):
        with pytest.raises(StateError, match="nothing was loaded"):
            fetch(tls)
    assert memory == bytes(len(memory)), "untouched"
    fetch(mine)
    assert memory != bytes(len(memory))


def test_a_certificate_for_another_host_is_not_believed(zygote, tmp_path, authority, monkeypatch):
    elsewhere = authority.tls("elsewhere", "DNS:elsewhere.example")
    monkeypatch.setenv("FABRIC_TLS", str(elsewhere.folder))
    with Job(zygote, tmp_path / "job", replicas=1) as job:
        told = command(job, "status")
        assert told.returncode == 1 and "IP address mismatch" in told.stderr
        job.start("r0", FABRIC_TLS=str(elsewhere.folder), **SHORT_CONTACT)
        job.wait_for(lambda: job.ended("r0") is not None, "the trainer to give up")
        assert job.ended("r0") == 1 and "cannot be reached" in (job.folder / "r0.log").read_text()


def test_settings_of_tls_that_cannot_be(tmp_path, authority):
    cert, key = authority.issue("whole")
    tls_folder(cert, key, authority.ca).check()
    Tls().check()
    for tls, why in (
        (Tls(tmp_path / "nowhere"), "No such file"),
        (Tls(cert), "Not a directory"),
        (tls_folder(cert, key, tmp_path / "none"), "No such file"),
        (tls_folder(cert, authority.ca, authority.ca), "check the files"),
        (tls_folder(key, cert, authority.ca), "check the files"),
    ):
        with pytest.raises(ConfigError, match=why):
            tls.check()
    line = [
        sys.executable,
        "-m",
        "fabric.ckpt_server",
        "--job=j",
        "--replica=r",
        f"--run-dir={tmp_path / 'r'}",
    ]
    ended = subprocess.run(
        [*line, f"--tls-folder={tmp_path / 'nowhere'}"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert ended.returncode == 1 and ended.stderr.startswith("fabric: TLS cannot be used (No such file")
