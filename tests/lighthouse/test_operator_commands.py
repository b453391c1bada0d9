"""``fabric drain``, ``evict``, ``events`` and ``top`` as a person uses them, against a real lighthouse."""

import getpass
import json
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

from lighthouse_support import (
    DEADLINE_S,
    FABRIC,
    ROOT,
    LighthouseProcess,
    WireMember,
    close_all,
    eventually,
    fabric,
    get,
    sentence_of,
    start_job,
)

from fabric.cli.status import _trouble


def common(lighthouse: LighthouseProcess, job: str) -> tuple[object, ...]:
    return ("--lighthouse", lighthouse.url, "--token-file", lighthouse.token_file, "--job", job)


async def test_a_replica_is_drained_and_evicted_with_who_and_why_on_record(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=3, job=job)
    done = fabric("drain", "r2", *common(lighthouse, job), "--why", "its host is hot", "--who", "ann")
    assert done.returncode == 0 and "next step boundary" in done.stdout, done.stderr
    record = await members[0].epoch(2)
    assert [x.leaving for x in record.roster] == [False, False, True]
    done = fabric("evict", "r1", *common(lighthouse, job), "--why", "it is slow")
    assert done.returncode == 0, done.stderr
    record = await members[0].epoch(3)
    assert "r1" not in record.names and "it is slow" in record.reason
    listed = fabric("events", *common(lighthouse, job)).stdout
    assert "drain asked  r2  by ann: its host is hot" in listed
    assert f"evict asked  r1  by {getpass.getuser()}@" in listed
    await close_all(members)


async def test_an_impossible_command_is_one_sentence(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=1, job=job)
    evict = ("evict", "r0", *common(lighthouse, job), "--why", "to see")
    assert "no other member knows" in sentence_of(fabric(*evict))
    drain = ("drain", "r0", *common(lighthouse, job), "--why", "to see")
    assert "r0 is not drained: no other member would stay" in sentence_of(fabric(*drain))
    unknown = ("drain", "r9", *common(lighthouse, job), "--why", "to see")
    assert "knows no replica r9" in sentence_of(fabric(*unknown))
    assert "no job is named" in sentence_of(fabric("drain", "r0", "--lighthouse", "http://x", "--why", "y"))
    assert fabric("drain", "r0", *common(lighthouse, job)).returncode == 2, "a reason is required"
    await close_all(members)


async def test_events_are_followed_over_a_fail_over(http, tmp_path, job):
    store = f"sqlite://{tmp_path}/store.db"
    arguments = ("--limit", "lease-s=60")
    with (
        LighthouseProcess(tmp_path, store, arguments=arguments) as first,
        LighthouseProcess(tmp_path, store, "two", arguments) as second,
    ):
        members = await start_job(http, first.url, count=1, job=job)
        follower = follow(f"{first.url},{second.url}", job, first.token_file)
        assert follower.stdout is not None
        try:
            assert read_until(follower, "epoch")["about"] == ""
            first.end()

            async def leads() -> bool:
                status, body = await get(http, f"{second.url}/healthz", token=None)
                return status == 200 and body["ok"] and body["is_leader"]

            await eventually(leads, "the second to lead")
            again = await start_members(http, second.url, job)
            assert read_until(follower, "session opened")["about"] == "r0"
            await close_all([*members, *again])
        finally:
            follower.send_signal(signal.SIGINT)
            assert follower.wait(timeout=DEADLINE_S) == 0, "Ctrl-C is how it ends"
            follower.stdout.close()


async def test_a_follower_ends_when_its_reader_is_gone(lighthouse, http, job):
    """The reader ends as in ``fabric events --follow | grep -m1 evicted``."""
    members = await start_job(http, lighthouse.url, count=2, job=job)
    follower = follow(lighthouse.url, job, lighthouse.token_file)
    assert follower.stdout is not None
    try:
        read_until(follower, "epoch")
        follower.stdout.close()
        for number in range(2):  # the first request may still fit into the buffer of the unread socket
            why = ("--why", f"time {number}")
            assert fabric("pause", *common(lighthouse, job), *why).returncode == 0
        assert follower.wait(timeout=DEADLINE_S) == 1
    finally:
        if follower.poll() is None:
            follower.kill()
            follower.wait()
    await close_all(members)


async def start_members(http, url: str, job: str):
    member = WireMember(http, url, "r0", job=job, replicas="1", generation=1)
    await member.open()
    return [member]


def read_until(follower: subprocess.Popen, kind: str) -> dict[str, object]:
    assert follower.stdout is not None
    for line in follower.stdout:
        event = json.loads(line)
        if event["kind"] == kind:
            return event
    raise AssertionError(f"the events ended before {kind!r}")


async def test_top_shows_the_job_in_a_terminal_until_a_signal_ends_it(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=2, job=job)
    ours, theirs = pty.openpty()
    process = top_in(theirs, *common(lighthouse, job))
    os.close(theirs)
    try:
        shown = read_terminal(ours, "led by")
        assert f"job {job}" in shown and "r1" in shown and "alive" in shown
        # The output is live: it must also show later events.
        done = fabric("drain", "r1", *common(lighthouse, job), "--why", "to see it")
        assert done.returncode == 0
        read_terminal(ours, "leaving")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=DEADLINE_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)
    await close_all(members)


def follow(urls: str, job: str, token_file: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [*FABRIC, "events", "--follow", "--json", "--job", job, "--token-file", str(token_file)],
        cwd=ROOT,
        env={**os.environ, "FABRIC_LIGHTHOUSE": urls, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def top_in(terminal: int, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [*FABRIC, "top", *map(str, arguments), "--every-s", "0.1"],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        stdin=None if terminal == subprocess.PIPE else terminal,
        stdout=terminal,
        stderr=None if terminal == subprocess.PIPE else terminal,
    )


def read_terminal(master: int, wanted: str) -> str:
    """Read a terminal's output until ``wanted`` is in it."""
    end = time.monotonic() + DEADLINE_S
    shown = ""
    while wanted not in shown:
        assert time.monotonic() < end, f"{wanted!r} was not shown: {shown[-2000:]!r}"
        if select.select([master], [], [], 0.2)[0]:
            shown += os.read(master, 65536).decode(errors="replace")
    return shown


async def test_a_narrow_terminal_gets_whole_words(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=2, job=job)
    shown = fabric("status", *common(lighthouse, job), COLUMNS="80").stdout
    for member in members:
        address = f"{member.replica}: checkpoint server http://{member.replica}.test:9999"
        assert address in shown.replace(", status", "\n").splitlines(), "below the table, whole"
    for word in ("replica", "member", "session", "trainer", "verdict", "alive"):
        assert word in shown
    await close_all(members)


async def test_top_into_a_pipe_is_one_picture_after_the_other(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=2, job=job)
    process = top_in(subprocess.PIPE, *common(lighthouse, job))
    assert process.stdout is not None
    try:
        pictures = (line for line in process.stdout if line.startswith(f"job {job}: ".encode()))
        assert [next(pictures), next(pictures)], "the second while it still runs"
        process.send_signal(signal.SIGINT)
        process.stdout.close()
        assert process.wait(timeout=DEADLINE_S) in (0, 1), "1 where it was writing"
    finally:
        process.kill()
        process.wait()
    await close_all(members)


async def test_a_very_narrow_terminal_cuts_no_name_off(lighthouse, http, job):
    """Two names that differ only at their ends must stay distinguishable."""
    members = [
        await WireMember(http, lighthouse.url, f"worker-of-rack-4-number-{i}", job=job).open() for i in "12"
    ]
    shown = fabric("status", *common(lighthouse, job), COLUMNS="60").stdout
    columns = [line.split("\u2502")[1].strip() for line in shown.splitlines() if line.startswith("\u2502")]
    assert "worker-of-rack-4-number-1" in "".join(columns) and "worker-of-rack-4-number-2" in "".join(columns)
    await close_all(members)


def test_a_long_table_names_replicas_in_trouble_above_it():
    alive = {"verdict": "alive"}
    rows = [({"replica": f"r{i}", **alive}, "member") for i in range(30)]
    assert _trouble({"complete": False}, rows) == []
    rows[7][0]["verdict"] = "silent"
    assert _trouble({"complete": False}, rows) == ["not as they should be: r7 (silent)"]
    assert _trouble({"complete": False}, rows[:20]) == []
