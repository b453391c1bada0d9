"""Real lighthouse processes on one store, killed, stopped and restarted: the record survives them all."""

import asyncio
import json
import re
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest
from lighthouse_support import (
    LighthouseProcess,
    WireMember,
    WireStatus,
    close_all,
    connect,
    eventually,
    fabric,
    get,
    headers,
    post,
    start_job,
)

from fabric.lighthouse.connections.connection import NOT_THE_LEADER
from fabric.lighthouse.jobs.job_history import record_key
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire
from fabric.store import open_store
from fabric.store.base import Put

# A lighthouse that must lose its lease during the test has SHORT; one that must keep it has LONG.
SHORT, LONG = ("--limit", "lease-s=3"), ("--limit", "lease-s=60")


def process(
    folder: Path, store: str, namespace: str, name: str = "one", lease: tuple[str, str] = LONG
) -> LighthouseProcess:
    return LighthouseProcess(folder, store, name, ("--namespace", namespace, *lease))


async def is_leading(http: aiohttp.ClientSession, url: str) -> bool:
    """Return whether the lighthouse leads and has read the records."""
    _, body = await get(http, f"{url}/healthz", token=None)
    return body["ok"] and body["is_leader"]


async def stored_epoch(url: str, namespace: str) -> int:
    store = open_store(url)
    await store.connect()
    found = await store.get(record_key(namespace, "job"))
    await store.close()
    return wire.decode_record(found.value).epoch


async def test_a_killed_lighthouse_comes_back_and_announces_the_record(http, tmp_path, store_url, namespace):
    with process(tmp_path, store_url, namespace, lease=SHORT) as lighthouse:
        members = await start_job(http, lighthouse.url)
        before = members[0].newest
        lighthouse.end(signal.SIGKILL)
        lighthouse.arguments = ("--namespace", namespace, *LONG)
        lighthouse.launch(port=lighthouse.port)  # the new lighthouse keeps the address, as a service does
        lighthouse.wait_ready()
        again = [WireMember(http, lighthouse.url, f"r{i}", generation=1) for i in range(3)]
        for member in again:
            await member.open()
            assert await member.epoch(1) == before
        for member in again:
            await member.run()
        status = await WireStatus(http, lighthouse.url, "r2").open()
        await status.beat("gone")
        record = await again[0].epoch(2)
        assert record.names == ("r0", "r1") and record.store_id == before.store_id
        assert await stored_epoch(store_url, namespace) == 2
        await close_all([*members, *again])


async def test_a_follower_redirects_and_takes_over_at_once_after_a_clean_end(
    http, tmp_path, store_url, namespace
):
    with (
        process(tmp_path, store_url, namespace) as first,
        process(tmp_path, store_url, namespace, "two") as two,
    ):
        members = await start_job(http, first.url)
        status, body = await get(http, f"{two.url}/v1/jobs/job?x=1")
        assert (status, body["leader"]) == (307, first.url)
        async with http.get(f"{two.url}/v1/jobs/job?x=1", headers=headers(), allow_redirects=False) as answer:
            assert answer.headers["Location"] == f"{first.url}/v1/jobs/job?x=1"
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            # Connect to the leader directly: the client library drops the token at a redirect to another
            # address.
            await connect(http, two.url, "job", "session")
        assert refused.value.status == 401 and refused.value.history[0].status == 307
        assert (await get(http, f"{two.url}/v1/jobs", token="wrong"))[0] == 401
        assert await is_leading(http, first.url) and not await is_leading(http, two.url)
        assert first.end(signal.SIGTERM) == 0
        code, _ = await members[0].close_reason()
        assert code == NOT_THE_LEADER

        async def leads() -> bool:
            return await is_leading(http, two.url)

        await eventually(leads, "the follower to lead")
        member = await WireMember(http, two.url, "r0", generation=1).open()
        assert (await member.epoch(1)).epoch == 1
        await close_all([*members, member])


async def test_a_leader_that_was_stopped_past_its_lease_changes_nothing(http, tmp_path, store_url, namespace):
    with (
        process(tmp_path, store_url, namespace, lease=SHORT) as first,
        process(tmp_path, store_url, namespace, "two") as two,
    ):
        old = await start_job(http, first.url)
        first.send(signal.SIGSTOP)

        async def leads() -> bool:
            return await is_leading(http, two.url)

        await eventually(leads, "the other lighthouse to lead")
        new = [WireMember(http, two.url, f"r{i}", generation=1) for i in range(3)]
        for member in new:
            await member.open()
            await member.epoch(1)
            await member.run()
        status = await WireStatus(http, two.url, "r2").open()
        await status.beat("gone")
        assert (await new[0].epoch(2)).names == ("r0", "r1")
        # After its stop the old leader has heard no member for long, and would evict one.
        await old[0].say(m.CannotContinue(old[0].newest.fence, "it must not be heard"))
        old[1].cut()
        first.send(signal.SIGCONT)
        code, _ = await old[2].close_reason()
        assert code == NOT_THE_LEADER

        async def redirects() -> bool:
            status, body = await get(http, f"{first.url}/v1/jobs/job")
            return status == 307 and body["leader"] == two.url

        await eventually(redirects, "the deposed one to follow")
        assert "leads no longer" in first.log
        assert await stored_epoch(store_url, namespace) == 2
        _, body = await get(http, f"{two.url}/v1/jobs/job")
        assert body["epoch"] == 2 and body["roster"] == ["r0", "r1"]
        await close_all([*old, *new])


async def test_a_follower_restarted_at_the_dead_leaders_address_does_not_redirect_to_itself(
    http, tmp_path, namespace
):
    """The dead leader's lease still names this URL, so a redirect would lead to the same lighthouse."""
    store = f"sqlite://{tmp_path}/store.db"
    with LighthouseProcess(
        tmp_path, store, arguments=("--namespace", namespace, "--limit", "lease-s=60")
    ) as lighthouse:
        lighthouse.end(signal.SIGKILL)
        lighthouse.launch(port=lighthouse.port)

        async def answer() -> tuple[int, dict] | None:
            try:
                return await get(http, f"{lighthouse.url}/v1/jobs")
            except aiohttp.ClientConnectorError:
                return None

        status, body = await eventually(answer, "the second process to listen")
        assert status == 503 and "no lighthouse leads" in body["error"]
        async with http.get(f"{lighthouse.url}/v1/jobs", headers=headers()) as response:
            assert response.headers["Retry-After"] == "1"
        _, health = await get(http, f"{lighthouse.url}/healthz", token=None)
        assert not health["ok"] and health["store_reachable"]
        assert not lighthouse.ready_file.exists()


async def test_a_dated_picture_is_shown_while_no_lighthouse_leads(http, tmp_path):
    url = f"sqlite://{tmp_path}/store.db"
    short = ("--namespace", "ns", "--limit", "lease-s=1")
    with LighthouseProcess(tmp_path, url, arguments=short) as lighthouse:
        members = await start_job(http, lighthouse.url)
        with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")  # the store answers nobody else

            async def leads_no_longer() -> bool:
                return not (await get(http, f"{lighthouse.url}/healthz", token=None))[1]["is_leader"]

            await eventually(leads_no_longer, "the lease to end")
            common = ("--lighthouse", lighthouse.url, "--token-file", lighthouse.token_file)
            shown = await asyncio.to_thread(fabric, "status", *common, "--job", "job")
            listed = await asyncio.to_thread(fabric, "status", *common)
            as_json = await asyncio.to_thread(fabric, "status", *common, "--job", "job", "--json")
            _, unknown = await get(http, f"{lighthouse.url}/v1/jobs/other?last=1")
        await close_all(members)
    assert re.match(r"as of \d{4}-\S+ \S+ UTC, when the lighthouse led no more \(.+\): 3 of 3", shown.stdout)
    assert f"look at the store sqlite://{tmp_path}/store.db" in shown.stderr
    assert listed.stdout.startswith("as of ") and "3 of 3 replicas" in listed.stdout
    assert [x.returncode for x in (shown, listed, as_json)] == [1, 1, 1]
    assert json.loads(as_json.stdout)["as_of"] < time.time() and "no job other" in unknown["error"]


async def test_a_standby_names_the_store_that_is_away_when_the_leader_dies(http, tmp_path, namespace):
    """The standby sent people to the dead leader's address, and named no store."""
    store = f"sqlite://{tmp_path}/store.db"
    short = ("--namespace", namespace, "--limit", "lease-s=1")
    with (
        LighthouseProcess(tmp_path, store, arguments=short) as leader,
        LighthouseProcess(tmp_path, store, name="two", arguments=short) as standby,
    ):
        members = await start_job(http, leader.url)

        async def follows() -> bool:
            health = (await get(http, f"{standby.url}/healthz", token=None))[1]
            return bool(health["leader"])

        async def stands_alone() -> bool:
            return not await follows()

        await eventually(follows, "the standby to know the leader")
        with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")  # the store answers nobody else
            leader.end(signal.SIGKILL)
            await eventually(stands_alone, "the leader's lease to end")
            common = ("--lighthouse", standby.url, "--token-file", standby.token_file, "--job", "job")
            shown = await asyncio.to_thread(fabric, "status", *common)
        await close_all(members)
    assert shown.returncode == 1 and f"the store sqlite://{tmp_path}/store.db" in shown.stderr


async def test_status_names_the_dead_leader_to_which_a_standby_still_leads(http, tmp_path, namespace):
    """The sentence said that nobody listens at the standby's address."""
    store = f"sqlite://{tmp_path}/store.db"
    with process(tmp_path, store, namespace) as leader, process(tmp_path, store, namespace, "two") as standby:
        leader.end(signal.SIGKILL)
        common = ("--lighthouse", standby.url, "--token-file", standby.token_file)
        shown = await asyncio.to_thread(fabric, "status", *common)
    assert f"({standby.url} names the leader {leader.url}: nobody listens there)" in shown.stderr


async def test_status_names_a_dead_standby(http, tmp_path, namespace):
    store = f"sqlite://{tmp_path}/store.db"
    with process(tmp_path, store, namespace) as first, process(tmp_path, store, namespace, "two") as second:
        both = ("--lighthouse", f"{first.url},{second.url}", "--token-file", first.token_file)
        assert "is missing" not in (await asyncio.to_thread(fabric, "status", *both)).stdout
        second.end(signal.SIGKILL)
        shown = await asyncio.to_thread(fabric, "status", *both)
    assert shown.returncode == 0
    assert (
        f"a lighthouse is missing: no lighthouse answers ({second.url}: nobody listens there)" in shown.stdout
    )


async def test_namespaces_do_not_see_each_other(http, tmp_path):
    store = f"sqlite://{tmp_path}/store.db"
    with process(tmp_path, store, "a") as first, process(tmp_path, store, "b", "two") as second:
        assert await is_leading(http, first.url) and await is_leading(http, second.url)
        members = await start_job(http, first.url)
        assert (await get(http, f"{second.url}/v1/jobs"))[1] == []
        await close_all(members)


async def test_an_unreadable_record_stops_its_own_job_only(http, tmp_path):
    url = f"sqlite://{tmp_path}/store.db"
    with process(tmp_path, url, "ns") as lighthouse:
        members = await start_job(http, lighthouse.url)
        await close_all(members)
        lighthouse.end()
    store = open_store(url)
    await store.connect()
    await store.commit([], [Put(record_key("ns", "bad"), b'{"version": 99}')])
    await store.close()
    with process(tmp_path, url, "ns") as lighthouse:
        _, jobs = await get(http, f"{lighthouse.url}/v1/jobs")
        assert [j["job"] for j in jobs] == ["job", "bad"] and "version 99" in jobs[1]["error"]
        status, body = await get(http, f"{lighthouse.url}/v1/jobs/bad")
        assert status == 409 and "version 99" in body["error"]
        assert (await get(http, f"{lighthouse.url}/v1/jobs/job"))[1]["epoch"] == 1
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await connect(http, lighthouse.url, "bad", "session")
        assert refused.value.status == 409


async def test_operator_commands_reach_the_leader_through_a_follower(http, tmp_path, namespace):
    store = f"sqlite://{tmp_path}/store.db"
    with process(tmp_path, store, namespace) as first, process(tmp_path, store, namespace, "two") as second:
        members = await start_job(http, first.url)
        body = {"replica": "r1", "who": "me", "why": "to see the redirect"}
        status, answer = await post(http, f"{second.url}/v1/jobs/job/evict", body)
        assert status == 307
        assert (await post(http, f"{answer['leader']}/v1/jobs/job/evict", body))[0] == 202
        assert (await members[0].epoch(2)).names == ("r0", "r2")
        await close_all(members)


def test_the_ready_file_names_the_process(tmp_path):
    with process(tmp_path, f"sqlite://{tmp_path}/store.db", "ns") as lighthouse:
        body = json.loads(lighthouse.ready_file.read_text())
        assert body["pid"] == lighthouse.process.pid and body["url"].startswith("http://127.0.0.1:")
