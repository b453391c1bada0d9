"""Members and checkpoint servers over real WebSockets against a real lighthouse process."""

import asyncio
import json

import aiohttp
import pytest
from lighthouse_support import (
    WireMember,
    WireStatus,
    close_all,
    closing,
    connect,
    eventually,
    get,
    post,
    start_job,
)

from fabric.lighthouse.connections.connection import MALFORMED, REFUSED, REPLACED
from fabric.lighthouse.connections.validation import MOST_BYTES
from fabric.model import Fence
from fabric.protocol.messages import network as m
from fabric.protocol.messages import roster_delta, wire


async def test_a_job_starts_when_all_its_replicas_have_a_session(lighthouse, http, job):
    first = await WireMember(http, lighthouse.url, "r0", job=job).open()
    second = await WireMember(http, lighthouse.url, "r1", job=job).open()
    await first.say(m.Heartbeat(1, 0, 0, 0))
    await first.next(m.HeartbeatAck)
    await second.say(m.Heartbeat(1, 0, 0, 0))
    await second.next(m.HeartbeatAck)
    _, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}")
    assert body["epoch"] == 0 and "2 of 3" in body["waiting_for"]
    assert first.newest is None
    third = await WireMember(http, lighthouse.url, "r2", job=job).open()
    for member in (first, second, third):
        record = await member.epoch(1)
        assert (record.epoch, record.generation, record.names) == (1, 1, ("r0", "r1", "r2"))
        assert record.is_forced
        await member.report()
    resumes = [await member.next(m.Resume) for member in (first, second, third)]
    assert all(resume.undivided and not resume.idle for resume in resumes)
    await close_all([first, second, third])


async def test_the_policy_is_read_from_the_query(lighthouse, http, job):
    member = await WireMember(http, lighthouse.url, "r0", job=job, replicas="2:8").open()
    await member.say(m.Heartbeat(1, 0, 0, 0))
    await member.next(m.HeartbeatAck)
    _, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}")
    assert body["policy"] == {
        "min_replicas": 2,
        "max_replicas": 8,
        "start_replicas": 8,
        "start_wait_s": 60.0,
    }
    await member.close()


async def test_a_killed_member_is_evicted_and_the_others_go_on(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, job=job)
    statuses = [await WireStatus(http, lighthouse.url, f"r{i}", job).open() for i in range(3)]
    for status in statuses:
        await status.beat()
    members[1].cut()
    await statuses[1].beat("gone")
    for member in (members[0], members[2]):
        record = await member.epoch(2)
        assert record.names == ("r0", "r2") and record.is_forced
        assert "r1" in record.reason and "gone" in record.reason
        await member.report()
    told = [await member.next(m.Resume) for member in (members[0], members[2])]
    assert told[0].step == told[1].step and told[0].reason == told[1].reason
    _, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}")
    assert [x["replica"] for x in body["members"]] == ["r0", "r2"]
    async with http.get(f"{lighthouse.url}/metrics") as answer:
        assert f'fabric_lighthouse_evictions_total{{job="{job}"}} 1.0' in await answer.text()
    await close_all([members[0], members[2]])


async def test_silence_of_session_and_status_is_death_too(lighthouse, http, job):
    """Both connections of the process are cut, without evidence of its end."""
    members = await start_job(http, lighthouse.url, job=job)
    status = await WireStatus(http, lighthouse.url, "r1", job).open()
    await status.beat()
    members[1].cut()
    await status.socket.close()
    record = await members[0].epoch(2)
    assert record.names == ("r0", "r2") and "session ended" in record.reason
    await close_all([members[0], members[2]])


@pytest.mark.parametrize("says", ["all", "that nothing has changed"])
async def test_a_member_whose_trainer_runs_may_reconnect(lighthouse, http, job, says):
    """A cut session evicts no member while the status says that its trainer runs: the epoch stays."""
    members = await start_job(http, lighthouse.url, job=job)
    status = await WireStatus(http, lighthouse.url, "r1", job).open()
    await status.beat()
    assert isinstance(wire.decode((await status.socket.receive(10)).data), m.StatusTerms)
    beating = asyncio.create_task(status.keep_beating(status.beat if says == "all" else status.say_unchanged))
    members[1].cut()

    async def is_away() -> bool:
        _, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}")
        return not body["members"][1]["connected"]

    await eventually(is_away, "the lighthouse to see the session's end")
    again = await WireMember(http, lighthouse.url, "r1", job=job, generation=1).open()
    assert (await again.epoch(1)).epoch == 1
    _, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}")
    assert body["epoch"] == 1 and body["members"][1]["connected"]
    beating.cancel()
    await close_all([members[0], again, members[2]])


async def test_a_member_that_lives_and_does_not_answer_a_forced_epoch_is_evicted(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, job=job)
    mute = await WireMember(http, lighthouse.url, "r1", job=job, generation=1, user_code_s=0.5).open()
    body = {"replica": "r2", "who": "me", "why": "to begin a forced epoch"}
    assert (await post(http, f"{lighthouse.url}/v1/jobs/{job}/evict", body))[0] == 202
    assert (await members[0].epoch(2)).names == (await mute.epoch(2)).names == ("r0", "r1")
    await members[0].report()
    record = await members[0].epoch(3)
    assert record.names == ("r0",) and "r1 evicted: it lives, but did not answer epoch 2" in record.reason
    assert (await mute.epoch(3)).names == ("r0",), "it is told, and may come back"
    await close_all([*members, mute])


async def test_a_second_socket_of_the_same_process_replaces_the_first(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=2, job=job)
    again = await WireMember(http, lighthouse.url, "r0", job=job, generation=1).open()
    assert (await again.epoch(1)).epoch == 1
    code, _ = await members[0].close_reason()
    assert code == REPLACED
    await again.say(m.Heartbeat(7, 1, 1, 0, phase="on the new socket"))
    assert (await again.next(m.HeartbeatAck)).number == 7
    _, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}")
    assert body["members"][0]["phase"] == "on the new socket" and body["members"][0]["connected"]
    await close_all([again, members[1]])


async def test_a_taken_replica_id_is_refused_and_the_living_one_stays(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=2, job=job)
    thief = await WireMember(http, lighthouse.url, "r0", job=job, incarnation=2).open()
    rejected = await thief.next(m.Rejected)
    assert "taken by a living process" in rejected.reason
    assert (await thief.close_reason())[0] == REFUSED
    await members[0].say(m.Heartbeat(9, 1, 1, 0))
    assert (await members[0].next(m.HeartbeatAck)).number == 9
    await close_all(members)


async def test_an_older_process_is_refused(lighthouse, http, job):
    newer = await WireMember(http, lighthouse.url, "r0", job=job, incarnation=5).open()
    await newer.say(m.Heartbeat(1, 0, 0, 0))
    await newer.next(m.HeartbeatAck)
    older = await WireMember(http, lighthouse.url, "r0", job=job, incarnation=4).open()
    assert "newer process" in (await older.next(m.Rejected)).reason
    assert (await older.close_reason())[0] == REFUSED
    await newer.say(m.Heartbeat(2, 0, 0, 0))
    assert (await newer.next(m.HeartbeatAck)).number == 2
    await newer.close()


async def test_another_model_is_refused_by_name(lighthouse, http, job):
    first = await WireMember(http, lighthouse.url, "r0", job=job, layout="aa").open()
    await first.say(m.Heartbeat(1, 0, 0, 0))
    await first.next(m.HeartbeatAck)
    other = await WireMember(http, lighthouse.url, "r1", job=job, layout="bb").open()
    assert "r1 has other parameters" in (await other.next(m.Rejected)).reason
    await first.close()


BAD_FIRST = [
    "not json",
    "[]",
    "{}",
    json.dumps({"kind": "OpenSession", "version": 3}),
    json.dumps({"kind": "OpenSession", "version": 99}),
    wire.encode(m.Running(Fence("s", 1, 1), 0)).decode(),
    wire.encode(m.HeartbeatAck(1)).decode(),
    "[" * 100_000,
]
BAD_FIELDS = [
    {"replica": ""},
    {"replica": "../etc"},
    {"replica": "r" * 65},
    {"incarnation": -1},
    {"micro_batches": 0},
    {"link": "x" * 301},
    {"layout": "l" * 201},
    {"digest": "\n"},
    {"shares": -1},
    {"snapshots": [{"generation": 1, "step": 1, "digest": "d"}] * 65},
    {"step": 1.5},
    {"step": float("inf")},
]


def session_body(**changes: object) -> str:
    member = WireMember(None, "", "r0")
    body = json.loads(wire.encode(member.session))
    return json.dumps({**body, **changes})


@pytest.mark.parametrize(
    "text", BAD_FIRST + [session_body(**c) for c in BAD_FIELDS], ids=lambda text: text[:12] + text[-24:]
)
async def test_a_malformed_first_message_is_refused_with_a_sentence(lighthouse, http, job, text):
    socket = await connect(http, lighthouse.url, job, "session")
    await socket.send_str(text)
    frame = await socket.receive(10)
    rejected = wire.decode(frame.data)
    assert isinstance(rejected, m.Rejected) and rejected.reason and "Traceback" not in rejected.reason
    assert (await closing(socket))[0] == MALFORMED
    # The lighthouse has not begun the refused job.
    assert (await get(http, f"{lighthouse.url}/v1/jobs/{job}"))[0] == 404


async def test_malformed_messages_disturb_no_other_member(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=3, job=job)
    await members[2].socket.send_str('{"kind": "Heartbeat", "version": 3, "number": "x"}')
    assert "Heartbeat.number" in (await members[2].next(m.Rejected)).reason
    assert (await members[2].close_reason())[0] == MALFORMED
    binary = await connect(http, lighthouse.url, job, "session")
    await binary.send_bytes(wire.encode(members[0].session))
    assert isinstance(wire.decode((await binary.receive(10)).data), m.Rejected)
    for member in members[:2]:
        await member.say(m.Heartbeat(50, 1, 1, 0))
        while (await member.next(m.HeartbeatAck)).number != 50:
            pass
    await close_all(members[:2])


async def test_a_socket_speaks_for_one_process(lighthouse, http, job):
    member = await WireMember(http, lighthouse.url, "r0", job=job).open()
    await member.say(WireMember(None, "", "r1").session)
    assert "one process" in (await member.next(m.Rejected)).reason


async def test_a_message_over_the_limit_ends_the_connection(lighthouse, http, job):
    member = await WireMember(http, lighthouse.url, "r0", job=job).open()
    # The server closes while the test still sends: the test gets either the close code or a reset.
    try:
        await member.socket.send_str("x" * (MOST_BYTES + 1))
        code, _ = await member.close_reason()
        assert code in (aiohttp.WSCloseCode.MESSAGE_TOO_BIG, aiohttp.WSCloseCode.ABNORMAL_CLOSURE)
    except ConnectionError:
        pass
    assert (await get(http, f"{lighthouse.url}/v1/jobs"))[0] == 200


@pytest.mark.parametrize(
    "change",
    [{"replica": "a/b"}, {"trainer": "dreaming"}, {"kind": "Heartbeat"}, {"ckpt": "h" * 301}],
    ids=str,
)
async def test_a_malformed_trainer_status_is_refused(lighthouse, http, job, change):
    socket = await connect(http, lighthouse.url, job, "trainer-status")
    body = json.loads(wire.encode(m.TrainerStatus("r0", 1, "running", 1)))
    await socket.send_str(json.dumps({**body, **change}))
    assert isinstance(wire.decode((await socket.receive(10)).data), m.Rejected)
    assert (await closing(socket))[0] == MALFORMED


async def test_a_server_that_has_said_nothing_cannot_say_that_nothing_changed(lighthouse, http, job):
    status = await WireStatus(http, lighthouse.url, "r0", job).open()
    await status.say_unchanged()
    assert isinstance(wire.decode((await status.socket.receive(10)).data), m.Rejected)
    assert (await closing(status.socket))[0] == MALFORMED


async def test_a_checkpoint_server_speaks_for_one_replica(lighthouse, http, job):
    status = await WireStatus(http, lighthouse.url, "r0", job).open()
    await status.beat()
    status.replica = "r1"
    await status.beat()
    assert (await closing(status.socket))[0] == MALFORMED


async def test_long_reasons_are_cut_before_they_reach_the_record(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=3, job=job)
    fence = members[0].newest.fence
    await members[0].say(m.Aborted(fence, 0, "no\n" + "x" * 100_000, "r1"))
    record = await members[1].epoch(2)
    assert "x" * 100 in record.reason and len(record.reason) < 1000 and "\n" not in record.reason
    await close_all(members)


async def test_a_drained_member_leaves_at_a_boundary(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=3, job=job)
    url = f"{lighthouse.url}/v1/jobs/{job}/drain"
    status, body = await post(http, url, {"replica": "r2", "who": "me", "why": "its host is hot"})
    assert (status, body["ok"]) == (202, True)
    record = await members[0].epoch(2)
    assert not record.is_forced and [x.leaving for x in record.roster] == [False, False, True]
    assert [e["kind"] for e in await events(http, lighthouse.url, job)].count("drain asked") == 1
    await close_all(members)


async def test_a_member_gets_deltas_and_the_roster_on_request(lighthouse, http, job):
    others = {"job": job, "replicas": "2"}
    first = await WireMember(http, lighthouse.url, "r0", roster="", **others).open()
    second = await WireMember(http, lighthouse.url, "r1", **others).open()
    before = await first.epoch(1)
    for member in (first, second):
        await member.epoch(1)
        await member.report()
    for member in (first, second):
        await member.next(m.Resume)
        await member.run()
    url = f"{lighthouse.url}/v1/jobs/{job}/evict"
    assert (await post(http, url, {"replica": "r1", "who": "me", "why": "a test"}))[0] == 202
    told = await first.next(m.RosterDelta)
    assert told.left == ("r1",) and told.before == before.roster_digest
    assert "r1" not in told.record.names
    await first.say(m.RequestRoster(told.record.fence))
    whole = (await first.next(m.Epoch)).record
    assert roster_delta.applied(told, before) == whole and whole.names == ("r0",)
    await close_all([first, second])


async def test_an_evicted_member_is_left_out(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=2, job=job)
    url = f"{lighthouse.url}/v1/jobs/{job}/evict"
    status, _ = await post(http, url, {"replica": "r1", "who": "me", "why": "it is slow"})
    assert status == 202
    record = await members[0].epoch(2)
    assert record.names == ("r0",) and "evicted by me: it is slow" in record.reason
    await members[0].report()
    await members[0].next(m.Resume)
    await members[0].run()
    status, body = await post(http, url, {"replica": "r0", "who": "me", "why": "it is slow"})
    assert status == 409 and "no other member" in body["error"]
    status, body = await post(http, url, {"replica": "r9", "who": "me", "why": "it is slow"})
    assert status == 404 and "r9" in body["error"]
    await close_all(members)


async def test_events_are_listed_and_followed(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=2, job=job)
    listed = await events(http, lighthouse.url, job)
    assert {"session opened", "epoch", "resume"} <= {e["kind"] for e in listed}
    assert [e["id"] for e in listed] == sorted({e["id"] for e in listed})
    assert set(listed[0]) == {"id", "t", "kind", "epoch", "about", "why", "incident_id"}
    last = listed[-1]["id"]
    assert await events(http, lighthouse.url, job, last) == []
    url = f"{lighthouse.url}/v1/jobs/{job}/events?follow=1&after={listed[0]['id']}"
    async with http.get(url, headers={"Authorization": "Bearer a-token-for-tests"}) as answer:
        for expected in listed[1:]:
            assert json.loads(await answer.content.readline()) == expected
        await post(
            http, f"{lighthouse.url}/v1/jobs/{job}/evict", {"replica": "r1", "who": "me", "why": "to see it"}
        )
        kinds = []
        while "epoch" not in kinds:
            async with asyncio.timeout(10):
                line = json.loads(await answer.content.readline())
            assert line["id"] > last
            kinds.append(line["kind"])
        assert kinds[0] == "evict asked"
    await close_all(members)


async def events(http, url: str, job: str, after: int = 0) -> list[dict]:
    status, body = await get(http, f"{url}/v1/jobs/{job}/events?after={after}")
    assert status == 200
    return body


async def test_the_job_is_shown_with_everything_that_is_known(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=2, job=job)
    status = await WireStatus(http, lighthouse.url, "r0", job).open()
    await status.beat("running")

    async def has_status() -> bool:
        return bool((await get(http, f"{lighthouse.url}/v1/jobs/{job}"))[1]["members"][0]["trainer_status"])

    await eventually(has_status, "the status to arrive")
    _, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}")
    assert (body["epoch"], body["generation"], body["roster"]) == (1, 1, ["r0", "r1"])
    assert body["record"]["store_id"] == body["store"]["id"]
    assert body["lighthouse"]["url"] == lighthouse.url
    assert body["waiting_for"] == "nothing: every member runs"
    member = body["members"][0]
    assert (member["phase"], member["step"], member["verdict"]) == ("run", 0, "alive")
    assert member["ckpt"] == "http://r0.test:9999" and member["trainer_status"]["trainer"] == "running"
    assert 0 <= member["session_age_s"] < 30 and 0 <= member["trainer_status"]["age_s"] < 30
    joiner = await WireMember(http, lighthouse.url, "r2", job=job, replicas="2").open()
    await joiner.epoch(1)
    _, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}")
    assert [x["replica"] for x in body["joiners"]] == ["r2"]
    assert "no state" in body["joiners"][0]["verdict"]
    await close_all([*members, joiner])


async def test_a_job_of_which_nothing_is_stored_is_forgotten(lighthouse, http, job):
    status = await WireStatus(http, lighthouse.url, "r0", job).open()
    await status.beat("absent")

    async def answer() -> int:
        return (await get(http, f"{lighthouse.url}/v1/jobs/{job}"))[0]

    async def is_known() -> bool:
        return await answer() == 200

    async def is_gone() -> bool:
        return await answer() == 404

    await eventually(is_known, "the status to be heard")
    await status.socket.close()
    await eventually(is_gone, "the job to be forgotten")


async def test_a_finished_job_is_complete_and_stays_so(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=2, job=job)
    for member in members:
        await member.say(m.Finished(member.newest.fence, 40))
    for member in members:
        assert (await member.next(m.Complete)).step == 40
    late = await WireMember(http, lighthouse.url, "r0", job=job, incarnation=2, predecessors=(1,)).open()
    assert (await late.next(m.Complete)).step == 40
    _, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}")
    assert body["complete"] and body["step"] == 40 and "complete at step 40" in body["waiting_for"]
    await close_all([*members, late])
