"""``fabric launch --nodes``: real launchers, one per host of a replica, meet at a real lighthouse."""

import contextlib
import json
import os
import re
import signal
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked_processes import ForkedProcess, run_python, start_supervisor
from lighthouse_support import DEADLINE_S, LighthouseProcess, headers, wait_for
from rich.console import Console

from fabric.cli.status import _job
from fabric.lighthouse.http.node_meeting import NodeMeetings

# A rank: notes its environment, and acts as $PLAY says for its rank and attempt: an exit code, or "waits".
RANK = """
import json, os, signal, sys, time
names = ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID "
         "TORCHELASTIC_RESTART_COUNT FABRIC_REPLICA FABRIC_LAYOUT HOST")
row = {name: os.environ.get(name, "") for name in names.split()} | {"pid": os.getpid()}
with open(os.environ["NOTES"], "a") as file:
    file.write(json.dumps(row) + "\\n")
words = json.loads(os.environ["PLAY"]).get(row["RANK"], ["0"])
act = words[min(int(row["TORCHELASTIC_RESTART_COUNT"]), len(words) - 1)]
while act == "waits":
    time.sleep(1000)
sys.exit(int(act))
"""


class Hosts:
    """Launchers that stand for hosts; each tells its ranks which host they are on."""

    def __init__(self, lighthouse, job: str, folder) -> None:
        self.lighthouse, self.job = lighthouse, job
        self.script, self.notes, self.folder = folder / "rank.py", folder / "notes", folder
        self.script.write_text(RANK)
        self.launchers: dict[str, ForkedProcess] = {}

    def start(
        self,
        host: str,
        *options: str,
        play: dict[str, list[str]],
        replica: str = "r0",
        advertise: str = "",
    ) -> None:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("FABRIC_")}
        own = {"NOTES": str(self.notes), "HOST": host, "PLAY": json.dumps(play)}
        own |= {"FABRIC_ADVERTISE": advertise} if advertise else {}
        named = ["--job", self.job, "--lighthouse", self.lighthouse.url]
        named += ["--replica", replica] if replica else []
        command = ["launch", *named, "--token-file", str(self.lighthouse.token_file), *options]
        command += ["--no-python", sys.executable, str(self.script)]
        with self.log(host).open("wb") as log:
            self.launchers[host] = start_supervisor(*command, log=log, environment={**plain, **own})

    def log(self, host: str) -> Path:
        return self.folder / f"{host}.log"

    def rows(self, attempt: int | None = None) -> list[dict]:
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        rows = [json.loads(line) for line in lines]
        return [x for x in rows if attempt is None or x["TORCHELASTIC_RESTART_COUNT"] == str(attempt)]

    def until_run(self, ranks: int, attempt: int) -> list[dict]:
        """Wait until so many ranks have started in an attempt; return their notes, in rank order."""
        deadline = time.monotonic() + DEADLINE_S
        while len(self.rows(attempt)) < ranks:
            assert time.monotonic() < deadline, self.rows()
            time.sleep(0.02)
        return sorted(self.rows(attempt), key=lambda row: int(row["RANK"]))

    def status(self) -> dict:
        asked = urllib.request.Request(f"{self.lighthouse.url}/v1/jobs/{self.job}", headers=headers())
        with urllib.request.urlopen(asked, timeout=DEADLINE_S) as answer:
            return json.load(answer)

    def until_status(self, is_so) -> dict:
        return wait_for(lambda: body if is_so(body := self.status()) else None, "the status")

    def codes(self) -> dict[str, int]:
        return {host: x.wait(DEADLINE_S) for host, x in self.launchers.items()}


@contextlib.contextmanager
def gathered(hosts: Hosts):
    """End the launchers at the end."""
    try:
        yield hosts
    finally:
        for launcher in hosts.launchers.values():
            launcher.terminate()
        for launcher in hosts.launchers.values():
            launcher.wait(DEADLINE_S)


@pytest.fixture
def hosts(lighthouse, job, tmp_path):
    with gathered(Hosts(lighthouse, job, tmp_path)) as found:
        yield found


NODES = ("--nodes", "2", "--ranks", "2")


def test_the_hosts_of_a_replica_start_together_and_finish_together(hosts):
    for number in (1, 0):
        hosts.start(f"host-{number}", *NODES, "--node", str(number), play={})
    assert hosts.codes() == {"host-0": 0, "host-1": 0}
    rows = hosts.until_run(4, 0)
    assert [row["RANK"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["LOCAL_RANK"] for row in rows] == ["0", "1", "0", "1"]
    assert [row["HOST"] for row in rows] == ["host-0", "host-0", "host-1", "host-1"]
    assert {row["FABRIC_LAYOUT"] for row in rows} == {"ranks=4"}
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        assert len({row[name] for row in rows}) == 1


def test_a_dead_rank_starts_all_ranks_of_all_hosts_again(hosts):
    play = {rank: ["waits", "0"] for rank in "0123"}
    for number in (0, 1):
        hosts.start(f"host-{number}", *NODES, "--node", str(number), play=play)
    os.kill(hosts.until_run(4, 0)[3]["pid"], signal.SIGKILL)
    again = hosts.until_run(4, 1)
    assert hosts.codes() == {"host-0": 0, "host-1": 0}
    first = hosts.rows(0)
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        assert {row[name] for row in first}.isdisjoint({row[name] for row in again})


def test_a_mistake_on_one_host_ends_the_launchers_of_all(hosts):
    for number in (0, 1):
        hosts.start(f"host-{number}", *NODES, "--node", str(number), play={"0": ["waits"], "2": ["1"]})
    assert hosts.codes() == {"host-0": 1, "host-1": 1}
    assert len(hosts.rows()) == 4


def test_a_spare_host_takes_the_place_of_a_killed_one(hosts):
    play = {rank: ["waits", "0"] for rank in "0123"}
    for number in (0, 1):
        hosts.start(f"host-{number}", *NODES, "--node", str(number), play=play)
    hosts.until_run(4, 0)
    hosts.start("host-2", *NODES, "--node", "spare", play=play, replica="")
    wait_for(lambda: "stands by" in hosts.log("host-2").read_text(), "the spare host to stand by")
    hosts.launchers["host-0"].kill()
    again = hosts.until_run(4, 1)
    assert [row["HOST"] for row in again] == ["host-2", "host-2", "host-1", "host-1"]
    assert {row["FABRIC_REPLICA"] for row in again} == {"r0"}
    assert hosts.codes() == {"host-0": -9, "host-1": 0, "host-2": 0}


def test_the_status_names_the_lost_host_until_a_spare_host_has_its_place(hosts):
    """The replica has never attached, so only its launchers' words show it."""
    play = {rank: ["waits"] for rank in "0123"}
    for number in (0, 1):
        hosts.start(
            f"host-{number}", *NODES, "--node", str(number), play=play, advertise=f"127.0.0.{number + 5}"
        )
    hosts.until_run(4, 0)
    hosts.launchers["host-0"].kill()
    body = hosts.until_status(lambda body: "it waits for a host" in body["headline"])
    said = r"it waits for a host: node 0 \(127.0.0.5\) .*, 127.0.0.5\)"
    assert re.fullmatch(r"0 of \d replicas?; r0 down since \S+ UTC \(.*" + said, body["headline"])
    body = hosts.until_status(lambda body: [x["state"] for x in body["nodes"]] == ["missing", "waiting"])
    console = Console(width=200, record=True)
    console.print(_job(body, 200))
    text = console.export_text()
    assert re.search(r"r0 node 0 +│ missing +│ 127.0.0.5 .*node 0 \(127.0.0.5\)", text)
    assert re.search(r"r0 node 1 +│ waiting +│ 127.0.0.6 ", text)
    asked = urllib.request.Request(f"{hosts.lighthouse.url}/metrics", headers=headers())
    with urllib.request.urlopen(asked, timeout=DEADLINE_S) as answer:
        metrics = answer.read().decode()
    where = f'host="127.0.0.5",job="{hosts.job}",kind="host missing",replica="r0",why="node 0'
    assert f"fabric_lighthouse_replica_troubled{{{where}" in metrics
    assert re.search(
        rf'replica_down{{host="127.0.0.5",job="{hosts.job}",replica="r0",why=".*waits for', metrics
    )
    hosts.start("host-2", *NODES, "--node", "spare", play=play, replica="", advertise="127.0.0.7")
    hosts.until_run(4, 1)
    body = hosts.until_status(lambda body: [x["state"] for x in body["nodes"]] == ["member", "member"])
    assert (body["nodes"][0]["host"], body["nodes"][0]["why"]) == ("127.0.0.7", "in the place of 127.0.0.5")
    asked = urllib.request.Request(f"{hosts.lighthouse.url}/v1/jobs/{hosts.job}/events", headers=headers())
    with urllib.request.urlopen(asked, timeout=DEADLINE_S) as answer:
        events = [(x["kind"], x["why"]) for x in json.load(answer)]
    assert ("nodes start", "attempt 1: node 0 on 127.0.0.5, node 1 on 127.0.0.6") in events
    again = "attempt 2: node 0 on 127.0.0.7 in the place of 127.0.0.5, node 1 on 127.0.0.6"
    assert ("nodes start", again) in events


def test_hosts_run_on_without_a_lighthouse_and_meet_again_at_the_next(job, tmp_path):
    """The next one knows of no attempt: it learns the nodes from the launchers."""
    play = {rank: ["waits", "0"] for rank in "0123"}
    arguments = ("--limit", "start-wait-s=60", "--limit", "lease-s=2")
    lighthouse = LighthouseProcess(tmp_path, f"sqlite://{tmp_path}/store.db", arguments=arguments)
    with lighthouse, gathered(Hosts(lighthouse, job, tmp_path)) as hosts:
        for number in (0, 1):
            hosts.start(f"host-{number}", *NODES, "--node", str(number), play=play)
        ranks = hosts.until_run(4, 0)
        port = lighthouse.port
        lighthouse.process.kill()
        lighthouse.process.wait(DEADLINE_S)
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        lighthouse.launch(port)
        lighthouse.wait_ready()
        assert [row["HOST"] for row in hosts.until_run(4, 1)] == [row["HOST"] for row in ranks]
        assert hosts.codes() == {"host-0": 0, "host-1": 0}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--nodes", "2"], "--nodes 2 needs this host's number: give --node 0 to 1, or --node spare"),
        (["--nodes", "2", "--node", "2"], "--node 2 is not below --nodes 2: give 0 to 1"),
        (["--node", "spare"], "--node spare is for replicas of several hosts: give their --nodes too"),
        (
            ["--nodes", "2", "--node", "first"],
            '--node is "first": give --node 0 to 1, or --node spare',
        ),
        (
            ["--nodes", "2", "--node", "1", "--ranks", "1:4"],
            "--ranks 1:4 with --nodes 2: give one count up to 64, the ranks of each host",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, sentence, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text("")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("FABRIC_")}
    done = run_python(
        "-m",
        "fabric.cli.main",
        "launch",
        *options,
        str(script),
        environment={**plain, "FABRIC_REPLICA": "r0", "FABRIC_LIGHTHOUSE": "http://127.0.0.1:1"},
    )
    assert done.returncode == 1 and sentence in done.stderr


class NotedJob:
    """A job that keeps what it hears of a replica's hosts."""

    def __init__(self):
        self.replaced = []

    def note(self, kind, replica, why):
        """An event for people."""

    def host_replaced(self, replica):
        self.replaced.append(replica)


@pytest.mark.parametrize(
    ("is_elsewhere", "why", "heard"), [(True, "", ["r0"]), (False, "", []), (True, "x", [])]
)
def test_the_leader_hears_when_ranks_start_on_another_host(is_elsewhere, why, heard):
    job = NotedJob()
    meetings = NodeMeetings(SimpleNamespace(by_name={"train": job}), lambda: None)
    nodes = SimpleNamespace(
        attempt=(2, {0: "node 0 on h2"}, set()), stage=("run", why, False), is_elsewhere=is_elsewhere
    )
    meetings._note("train", "r0", nodes)
    assert job.replaced == heard
