"""The control plane of 98,304 GPUs: 12 replicas of 1,024 hosts with 8 GPUs, played with mock hosts and ranks.

- *lighthouse*: a real lighthouse process with a SQLite store, on a core of its own, and real connections
  over loopback from one process beside it (``scale_crowd.py``). Mock: the hosts. Each host has ``--servers``
  connections with trainer statuses; 8 is one for each rank. Each replica has the session of its rank 0, which
  names 8,192 addresses. Three replicas die in the window, each after one of its hosts; none comes back. Then
  launchers connect too, of as many replicas as the limit of open files lets them.
- *head*: rank 0 of one replica (``scale_head.py`` says which parts are real). Once as it is, with a voice for
  each host of 8 ranks; once with hosts of one rank, where every rank speaks to rank 0. A step's control time
  is rank 0's processor time in a step. The mock ranks share one core here, so the time by the clock, which is
  said too, has their work in it.
- *start*: what rank 0 receives and decodes when all ranks describe themselves, and its answers
  (``RankGroup.ask``), made here; the collective over the network is not measured.
- *day*: ``scale_day.py``, virtual time with the real cores, beside the figures that FT-HSDP published.

``--quick`` is for a look: fewer hosts, ranks and hours, with the same aims. ``--only`` runs one part.
A figure that could not be measured is null, and missed.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import begin, finish, quantile, say, table, verdict
from lighthouse_fleet import BenchmarkLighthouse, cores, pinned, wait_for

from fabric.client.loop.start import answers_of_rank_0

HERE = Path(__file__).resolve().parent
JOB = "scale"
FT_HSDP = {"synchronous": 0.44, "fault tolerant": 0.80}  # arXiv 2602.00277
START_S = 240.0
TOLD_WITHIN_S = 60.0
STEADY_S = 3.0
LOOK_S = 0.25
_SPARE_FILES = 600  # of the lighthouse, for other uses than these connections
KEYS = (
    "host_connections",
    "lighthouse_core_share",
    "epoch_told_p99_s",
    "false_deaths",
    "head_step_s",
    "head_step_of_lone_ranks_s",
    "head_death_told_s",
    "head_death_told_of_lone_ranks_s",
    "head_start_s",
    "head_start_of_lone_ranks_s",
    "effective_training",
)


@dataclass(frozen=True, slots=True)
class Size:
    """How large a run is."""

    replicas: int = 12
    hosts: int = 1024
    ranks: int = 8
    servers: int = 1
    window_s: float = 60.0
    deaths: int = 3
    launchers_s: float = 30.0
    steps: int = 5
    day_s: float = 86400.0

    @property
    def connections(self) -> int:
        return self.replicas * self.hosts * self.servers

    @property
    def launched_replicas(self) -> int:
        """The replicas whose launchers find room beside the other connections."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        left = files - _SPARE_FILES - self.connections - self.replicas
        return max(0, min(self.replicas - self.deaths, left // self.hosts))


QUICK = Size(replicas=12, hosts=64, window_s=12.0, deaths=1, launchers_s=12.0, steps=3, day_s=3600.0)


# --- the lighthouse ---------------------------------------------------------------------------------------


class CrowdProcess:
    """The process with the mock hosts, asked by lines."""

    def __init__(self, lighthouse: BenchmarkLighthouse, size: Size, on: list[int], stack: ExitStack) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "scale_crowd.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE.parent,
        )
        stack.callback(self._process.wait)
        stack.callback(self._process.kill)
        os.sched_setaffinity(self._process.pid, on)
        shape = {x: getattr(size, x) for x in ("replicas", "hosts", "ranks", "servers")}
        about = {"url": lighthouse.url, "token": lighthouse.token, "job": JOB, "shape": shape}
        self.first = self.ask(json.dumps(about))

    def ask(self, line: str) -> dict[str, Any]:
        """Send one line; return the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError("the crowd's process ended: its words are above")
        found: dict[str, Any] = json.loads(answer)
        return found

    def run(self, replicas: int, after: int = 0) -> bool:
        """Whether the sessions of so many replicas run in one epoch above ``after``."""
        state = self.ask("state")
        return bool(state["running"] == replicas and state["lowest"] > after)


def lighthouse_figures(size: Size, result: dict[str, Any]) -> None:
    """Write into ``result`` the figures of the lighthouse."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fabric-scale-")))
        core, others = cores()
        lighthouse = BenchmarkLighthouse(folder, f"sqlite://{folder}/lighthouse.db", "lighthouse")
        stack.enter_context(lighthouse)
        pinned(lighthouse, [core])
        empty_kb, began = lighthouse.rss_kb(), time.monotonic()
        crowd = CrowdProcess(lighthouse, size, others, stack)
        result["host_connections"] = crowd.first["servers"]
        result["hosts_connected_s"] = round(crowd.first["hosts_s"], 2)
        try:
            wait_for(lambda: crowd.run(size.replicas), "every replica to run", START_S, LOOK_S)
        except TimeoutError:
            say("\n".join(f"lost: {x}" for x in crowd.ask("state")["refused"]))
            raise
        result["all_run_s"] = round(time.monotonic() - began, 2)
        time.sleep(STEADY_S)
        result["lighthouse_rss_mb"] = round((lighthouse.rss_kb() - empty_kb) / 1024, 1)
        window(size, crowd, lighthouse, result)
        try:
            launched(size, crowd, lighthouse, result)
        except TimeoutError as error:
            say(f"MISSED  the launchers: {error}; {crowd.ask('state')['started']} have started")


@dataclass(slots=True)
class Told:
    """What the crowd has seen since the window began: counts, and when each was told of which epoch."""

    crowd: CrowdProcess
    statuses: int = 0
    cpu_s: float = 0.0
    period_s: float = 0.0
    members: dict[int, list[float]] = field(default_factory=dict)
    hosts: dict[int, list[float]] = field(default_factory=dict)

    def look(self) -> None:
        seen = self.crowd.ask("mark")
        self.statuses += seen["statuses"]
        self.cpu_s, self.period_s = seen["cpu_s"], seen["period_s"]
        for kept, new in ((self.members, seen["told"]), (self.hosts, seen["notices"])):
            for epoch, times in new.items():
                kept.setdefault(int(epoch), []).extend(times)

    def are(self, epoch: int, members: int, hosts: int) -> bool:
        """Whether so many have been told of this epoch."""
        self.look()
        return len(self.members.get(epoch, ())) >= members and len(self.hosts.get(epoch, ())) >= hosts

    def since(self, epoch: int, at: float, count: int) -> list[float]:
        """Return how long after ``at`` each of ``count`` was told; one that was not counts as the limit."""
        found = [x - at for x in self.members.get(epoch, []) + self.hosts.get(epoch, [])]
        return found + [TOLD_WITHIN_S] * (count - len(found))


def window(size: Size, crowd: CrowdProcess, lighthouse: BenchmarkLighthouse, result: dict[str, Any]) -> None:
    """Measure the window with its deaths."""
    told = Told(crowd)
    told.look()
    told.statuses, crowd_cpu_s = 0, told.cpu_s
    cpu_s, began = lighthouse.cpu_s(), time.monotonic()
    delays: list[float] = []
    undisturbed = 0.0
    for number in range(size.deaths):
        time.sleep(max(0.0, began + size.window_s * (number + 1) / (size.deaths + 1) - time.monotonic()))
        if not number:
            undisturbed = (lighthouse.cpu_s() - cpu_s) / (time.monotonic() - began)
        told.look()
        epoch = int(crowd.ask("state")["lowest"]) + 1
        at = float(crowd.ask(f"kill {number}")["at"])
        members, hosts = size.replicas - 1 - number, size.connections - size.servers * (number + 1)
        try:
            wait_for(partial(told.are, epoch, members, hosts), "all to be told", TOLD_WITHIN_S, LOOK_S)
        except TimeoutError as error:
            say(f"MISSED  death {number + 1}: {error}")
        when = told.since(epoch, at, members + hosts)
        delays += when
        say(f"  death {number + 1}: {members} members and {hosts} hosts were told within {max(when):.2f} s")
    time.sleep(max(0.0, began + size.window_s - time.monotonic()))
    told.look()
    state, seconds = crowd.ask("state"), time.monotonic() - began
    for sentence in (*state["lost"], *state["refused"]):
        say(f"lost: {sentence}")
    roster = len(lighthouse.job(JOB)["roster"])
    result |= {
        "lighthouse_core_share": round((lighthouse.cpu_s() - cpu_s) / seconds, 4),
        "lighthouse_core_share_undisturbed": round(undisturbed, 4),
        "epoch_told_p99_s": round(quantile(delays, 0.99), 4),
        "epoch_told_max_s": round(max(delays), 4),
        "false_deaths": size.replicas - size.deaths - roster,
        "host_connections_lost": size.connections - size.deaths * size.servers - state["servers"],
        "statuses_per_s": round(told.statuses / seconds, 1),
        "status_period_s": told.period_s,
        "crowd_core_share": round((told.cpu_s - crowd_cpu_s) / seconds, 4),
    }


def launched(
    size: Size, crowd: CrowdProcess, lighthouse: BenchmarkLighthouse, result: dict[str, Any]
) -> None:
    """Measure what the launchers of some replicas add: the start of their attempts, then the waiting."""
    count = size.launched_replicas
    result["launchers"] = count * size.hosts
    if not count:
        return
    began = time.monotonic()
    crowd.ask(f"launch {count}")
    wait_for(
        lambda: crowd.ask("state")["started"] == count * size.hosts, "the attempts to start", 60.0, LOOK_S
    )
    result["attempts_started_s"] = round(time.monotonic() - began, 2)
    time.sleep(STEADY_S)
    cpu_s, began = lighthouse.cpu_s(), time.monotonic()
    time.sleep(size.launchers_s)
    share = (lighthouse.cpu_s() - cpu_s) / (time.monotonic() - began)
    result["lighthouse_core_share_with_launchers"] = round(share, 4)


# --- the head, and the start ------------------------------------------------------------------------------


def head_run(replicas: int, ranks: int, per_host: int, steps: int) -> dict[str, float]:
    """Run one head with so many ranks; return its figures."""
    core, others = cores()
    about = {"replicas": replicas, "ranks": ranks, "per_host": per_host, "steps": steps}
    done = subprocess.run(
        [sys.executable, str(HERE / "scale_head.py")],
        input=json.dumps({**about, "follower_cores": others}) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE.parent,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, [core]),
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def head_figures(size: Size, result: dict[str, Any]) -> None:
    """Write into ``result`` the figures of the head, with a voice per host and with one per rank."""
    rows, ranks = [], size.hosts * size.ranks
    for suffix, per_host in (("", size.ranks), ("_of_lone_ranks", 1)):
        found = head_run(size.replicas, ranks, per_host, size.steps)
        result |= {
            f"head_step{suffix}_s": round(found["step_cpu_s"], 4),
            f"head_step_clock{suffix}_s": round(found["step_wall_s"], 4),
            f"head_death_told{suffix}_s": round(found["death_told_s"], 4),
            f"head_start{suffix}_s": round(found["start_s"], 3),
            f"head_start_processor{suffix}_s": round(found["linked_cpu_s"] + found["agreed_cpu_s"], 3),
            f"head_rss{suffix}_mb": round(found["rss_mb"], 1),
            f"voice_step{suffix}_s": round(found["voice_step_cpu_s"], 6),
        }
        shown = ("linked_s", "agreed_s", "start_s", "step_cpu_s", "step_wall_s", "death_told_s")
        rows.append([ranks // per_host, *(f"{found[x]:.3f}" for x in shown)])
    names = ("hosts", "linked s", "agreed s", "start s", "step: processor s", "step: clock s", "death told s")
    table("the head of one replica", names, rows)


def start_figures(size: Size, result: dict[str, Any]) -> None:
    """Write into ``result`` what the descriptions of all ranks cost rank 0, and each other rank."""
    digest, rows = "0123456789abcdef" * 2, []
    for rank in range(size.hosts * size.ranks):
        row = {
            "link": f"10.10.10.10:{32768 + rank % 8}",
            "ckpt": f"http://10.10.{rank >> 11}.{rank >> 3 & 255}:51234/ranks/{rank}#{rank}",
            "work": [384, "seed 0 micro_batch_size 4 global_batch_size 1536", 0],
            "layout": digest,
            "digest": digest,
            "part": rank,
            "names": digest,
            "snapshots": [[1, 1000, digest], [1, 1001, digest]],
            "holds": True,
        }
        rows.append(json.dumps(row).encode())
    began = time.process_time()
    answers = [json.dumps(x).encode() for x in answers_of_rank_0([json.loads(data) for data in rows], [])]
    result |= {
        "start_rank_0_s": round(time.process_time() - began, 4),
        "start_bytes_at_rank_0": sum(map(len, rows)),
        "start_bytes_per_rank": max(map(len, answers)),
    }


# --- the day ----------------------------------------------------------------------------------------------


def day_figures(size: Size, result: dict[str, Any]) -> None:
    """Write into ``result`` how much of a drawn day the job trained."""
    import scale_day

    day = scale_day.play(size.day_s)
    result |= {
        "effective_training": round(day.effective, 4),
        "day_s": day.seconds,
        "day_deaths": day.deaths,
        "day_steps": day.steps,
        "day_step_s": round(day.step_s, 3),
        "day_fewest_replicas": day.fewest,
    }
    rows = [(f"FT-HSDP, {name} (published)", value) for name, value in FT_HSDP.items()]
    table(
        f"effective training time, {day.deaths} deaths in {day.seconds / 3600:g} h of virtual time",
        ("policy", "share"),
        [*rows, ("fabric (virtual time, real cores)", f"{day.effective:.3f}")],
    )


PARTS: dict[str, Callable[[Size, dict[str, Any]], None]] = {
    "lighthouse": lighthouse_figures,
    "head": head_figures,
    "start": start_figures,
    "day": day_figures,
}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--servers", type=int, default=1, choices=(1, 2, 4, 8))
    parser.add_argument("--hosts", type=int, default=0)
    arguments = parser.parse_args()
    whole = QUICK if arguments.quick else Size()
    size = replace(whole, hosts=arguments.hosts or whole.hosts, servers=arguments.servers)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < size.connections + _SPARE_FILES:
        raise SystemExit(
            f"scale.py: {size.connections} connections need as many open files, and {hard} are allowed"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    begin()
    result: dict[str, Any] = dict.fromkeys(KEYS)
    for name in arguments.only or PARTS:
        try:
            PARTS[name](size, result)
        except Exception as error:  # noqa: BLE001  (whatever it is: the other figures are still worth having)
            say(f"MISSED  {name} could not be measured: {type(error).__name__}: {error}")
    table("figures", ("what", "figure"), [*result.items()])
    judge(result)
    finish(result)


def judge(result: dict[str, Any]) -> None:
    """Compare the figures with their aims."""
    verdict("host connections", result["host_connections"], at_least=12_288)
    verdict("lighthouse, share of one core", result["lighthouse_core_share"], at_most=0.8)
    verdict("epoch told to all after a death, p99 s", result["epoch_told_p99_s"], at_most=1.0)
    verdict("false deaths", result["false_deaths"], at_most=0)
    verdict("head: control of a step, s", result["head_step_s"], at_most=0.1)
    verdict("head: a death told to all, s", result["head_death_told_s"], at_most=1.0)
    verdict("head: start agreed, s", result["head_start_s"], at_most=10.0)
    verdict("effective training time", result["effective_training"], at_least=FT_HSDP["fault tolerant"])


if __name__ == "__main__":
    main()
