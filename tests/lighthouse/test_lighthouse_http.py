"""HTTP for people and tools: open paths, tokens, names, bodies, curl."""

import re
import shutil
import subprocess

import aiohttp
import pytest
from lighthouse_support import TOKEN, WireStatus, close_all, eventually, get, headers, post, start_job

from fabric.model import SnapshotRef, StepTimes
from fabric.protocol.messages import network as m


async def test_health_and_metrics_are_open(lighthouse, http):
    status, body = await get(http, f"{lighthouse.url}/healthz", token=None)
    assert status == 200 and body["ok"] and body["is_leader"] and body["store_reachable"]
    assert body["leader"] == lighthouse.url
    async with http.get(f"{lighthouse.url}/metrics") as answer:
        text = await answer.text()
        assert answer.status == 200 and answer.content_type == "text/plain"
    assert "fabric_lighthouse_is_leader 1.0" in text


async def test_answers_name_no_versions_and_stay_in_no_cache(lighthouse, http, job):
    for path in ("/healthz", "/livez", "/v1/jobs", "/v1/jobs/nobody"):
        async with http.get(lighthouse.url + path, headers=headers()) as answer:
            assert answer.headers["Server"] == "fabric"
            assert (answer.headers.get("Cache-Control") == "no-store") == path.startswith("/v1/")


async def test_liveness_does_not_ask_the_store_and_readiness_agrees_with_health(lighthouse, http, job):
    assert await get(http, f"{lighthouse.url}/livez", token=None) == (200, {"ok": True})
    assert await get(http, f"{lighthouse.url}/readyz", token=None) == await get(
        http, f"{lighthouse.url}/healthz", token=None
    )


async def test_metrics_describe_a_job(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, job=job)
    async with http.get(f"{lighthouse.url}/metrics") as answer:
        text = await answer.text()
    for line in (
        f'fabric_lighthouse_sessions{{job="{job}"}} 3.0',
        f'fabric_lighthouse_members{{job="{job}"}} 3.0',
        f'fabric_lighthouse_epoch{{job="{job}"}} 1.0',
        f'fabric_lighthouse_steps{{job="{job}"}} 0.0',
        f'fabric_lighthouse_record_writes_total{{job="{job}",outcome="written"}} 1.0',
        f'fabric_lighthouse_events_total{{job="{job}",kind="epoch"}} 1.0',
        f'fabric_lighthouse_job_complete{{job="{job}"}} 0.0',
        f'fabric_lighthouse_job_failed{{job="{job}"}} 0.0',
    ):
        assert line in text
    assert 'fabric_lighthouse_store_write_seconds_bucket{le="5.0"}' in text
    await close_all(members)


async def test_metrics_tell_a_finished_job_from_a_stalled_job(lighthouse, http, job):
    """Alerts need this difference, because neither job commits steps."""
    done, failed = f"{job}-done", f"{job}-failed"
    members = await start_job(http, lighthouse.url, count=1, job=done)
    await members[0].say(m.Finished(members[0].newest.fence, 40))
    await members[0].next(m.Complete)
    members += await start_job(http, lighthouse.url, count=1, job=failed)
    await members[1].say(m.LoopFailed(members[1].newest.fence, 3, "ValueError: of the user's"))

    async def is_told() -> bool:
        async with http.get(f"{lighthouse.url}/metrics") as answer:
            text = await answer.text()
        told = {
            (kind, name): f'job_{kind}{{job="{name}"}} 1.0' in text
            for kind in ("complete", "failed")
            for name in (done, failed)
        }
        return [key for key, is_so in told.items() if is_so] == [("complete", done), ("failed", failed)]

    await eventually(is_told, "both to be told")
    body = (await get(http, f"{lighthouse.url}/v1/jobs/{failed}"))[1]
    assert body["headline"].endswith("ValueError: of the user's")
    assert body["waiting_for"] == "a person, to mend what failed and say `fabric retry`"
    await close_all(members)


async def test_the_newest_durable_checkpoint_and_why_the_next_one_failed(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, job=job)
    status = await WireStatus(http, lighthouse.url, "r0", job).open()
    await status.beat(durable=(SnapshotRef(1, 5, "a"),), durable_error="step 9: the disk is full")

    async def is_known() -> bool:
        _, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}")
        return body["durable"] == {"generation": 1, "step": 5, "digest": "a", "steps_behind": 0}

    await eventually(is_known, "the durable checkpoint to be known")
    _, events = await get(http, f"{lighthouse.url}/v1/jobs/{job}/events")
    said = {e["kind"]: e["why"] for e in events if e["kind"].startswith("durable")}
    assert said == {
        "durable": "the checkpoint of step 5 is complete",
        "durable failed": "step 9: the disk is full",
    }
    async with http.get(f"{lighthouse.url}/metrics") as answer:
        text = await answer.text()
    labels = r'host="[^"]+",job="%s",kind="durable failed",replica="r0",why="step 9: the disk is full"'
    assert re.search(r"fabric_lighthouse_replica_troubled\{%s\} 1.0" % (labels % job), text)
    await close_all(members)


async def test_the_times_of_a_step_stay_until_the_next_step_is_reported(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=1, job=job)
    await members[0].say(m.Heartbeat(3, 1, 1, 1, times=StepTimes(compute_s=0.25)))
    await members[0].say(m.Heartbeat(4, 1, 1, 1, phase="told again"))

    async def told() -> bool:
        _, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}")
        member = body["members"][0]
        return member["phase"] == "told again" and member["times"]["compute_s"] == 0.25

    await eventually(told, "both beats to arrive")
    await close_all(members)


async def test_how_old_the_freshest_recoverable_state_is(lighthouse, http, job):
    """The status, the gauges and the command show this age; without a state they show none."""
    members = await start_job(http, lighthouse.url, job=job)
    _, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}")
    assert body["recoverable"] is None
    statuses = [await WireStatus(http, lighthouse.url, f"r{i}", job).open() for i in range(2)]
    old, new = SnapshotRef(1, 5, "a"), SnapshotRef(1, 9, "b")
    await statuses[0].beat(snapshots=(old,), ages_s=(70.0,))
    await statuses[1].beat(snapshots=(old, new), ages_s=(60.0, 30.0))
    await eventually(lambda: state_is(http, lighthouse.url, job, 9), "the newest snapshot to be known")
    _, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}")
    state = body["recoverable"]
    assert (state["digest"], state["steps_behind"]) == ("b", 0) and 30 <= state["age_s"] < 60
    async with http.get(f"{lighthouse.url}/metrics") as answer:
        text = await answer.text()
    assert f'fabric_lighthouse_recoverable_step{{job="{job}"}} 9.0' in text
    (line,) = [
        x
        for x in text.splitlines()
        if x.startswith(f'fabric_lighthouse_recoverable_age_seconds{{job="{job}"')
    ]
    assert 30 <= float(line.split()[-1]) < 60
    await statuses[1].socket.close()
    await eventually(lambda: state_is(http, lighthouse.url, job, 5), "the one that is left to count")
    _, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}")
    assert 70 <= body["recoverable"]["age_s"] < 100
    await close_all(members)


async def state_is(http, url, job, step) -> bool:
    _, body = await get(http, f"{url}/v1/jobs/{job}")
    return body["recoverable"] is not None and body["recoverable"]["step"] == step


PATHS = [
    "/v1/jobs",
    "/v1/jobs/x",
    "/v1/jobs/x/events",
    "/v1/jobs/x/session",
    "/v1/jobs/x/trainer-status",
    "/nowhere",
]


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x"])
@pytest.mark.parametrize("path", PATHS)
async def test_everything_else_needs_the_token(lighthouse, http, path, token):
    status, body = await get(http, lighthouse.url + path, token=token)
    assert status == 401 and "token" in body["error"]


@pytest.mark.parametrize("action", ["drain", "evict"])
async def test_commands_need_the_token(lighthouse, http, action):
    status, _ = await post(http, f"{lighthouse.url}/v1/jobs/x/{action}", {"replica": "r0"}, token=None)
    assert status == 401


@pytest.mark.parametrize("name", ["a%20b", "a%2Fb", "%C3%A4", "x" * 65, "a%00b", "%0a", "%25", "..."])
async def test_bad_job_names_are_refused(lighthouse, http, name):
    for path in ("", "/events", "/session"):
        status, body = await get(http, f"{lighthouse.url}/v1/jobs/{name}{path}")
        assert status in (400, 404) and body["error"]
    status, _ = await post(http, f"{lighthouse.url}/v1/jobs/{name}/drain", COMMAND)
    assert status in (400, 404)


async def test_a_bad_job_name_says_what_a_good_one_is(lighthouse, http):
    status, body = await get(http, f"{lighthouse.url}/v1/jobs/a%20b")
    assert status == 400 and "letters" in body["error"]


COMMAND = {"replica": "r0", "who": "me", "why": "because"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * 50_000,
        {},
        {**COMMAND, "who": ""},
        {**COMMAND, "why": 3},
        {**COMMAND, "why": "a\nb"},
        {**COMMAND, "why": "x" * 301},
        {**COMMAND, "replica": "a/b"},
    ],
    ids=lambda body: str(body)[:40],
)
async def test_bad_operator_commands_are_refused(lighthouse, http, job, body):
    members = await start_job(http, lighthouse.url, count=2, job=job)
    for action in ("drain", "evict"):
        status, answer = await post(http, f"{lighthouse.url}/v1/jobs/{job}/{action}", body)
        assert status == 400 and answer["error"]
    assert (await get(http, f"{lighthouse.url}/v1/jobs/{job}"))[1]["roster"] == ["r0", "r1"]
    await close_all(members)


async def test_a_body_over_the_limit_is_refused(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=1, job=job)
    status, answer = await post(http, f"{lighthouse.url}/v1/jobs/{job}/drain", b" " * 70_000)
    assert status == 413 and "send at most 65536 bytes" in answer["error"]
    await close_all(members)


async def test_unknown_jobs_paths_and_methods_are_refused(lighthouse, http):
    assert (await get(http, f"{lighthouse.url}/v1/jobs/nobody"))[0] == 404
    assert (await get(http, f"{lighthouse.url}/v1/jobs/nobody/events"))[0] == 404
    assert (await post(http, f"{lighthouse.url}/v1/jobs/nobody/drain", COMMAND))[0] == 404
    assert (await get(http, f"{lighthouse.url}/v2"))[0] == 404
    assert (await post(http, f"{lighthouse.url}/v1/jobs", {}))[0] == 405


@pytest.mark.parametrize(
    "query", ["after=x", "after=-1", "follow=2", "follow=yes", "after=99999999999999999999"]
)
async def test_bad_queries_are_refused(lighthouse, http, job, query):
    members = await start_job(http, lighthouse.url, count=1, job=job)
    status, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}/events?{query}")
    assert status == 400 and body["error"]
    await close_all(members)


@pytest.mark.parametrize("replicas", ["0", "x", "3:2", "1:2:3", "-1", "9999999999"])
async def test_an_impossible_policy_is_refused(lighthouse, http, job, replicas):
    url = f"{lighthouse.url}/v1/jobs/{job}/session?replicas={replicas}"
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await http.ws_connect(url, headers={"Authorization": f"Bearer {TOKEN}"})
    assert refused.value.status == 400
    status, body = await get(http, url)
    assert status == 400 and replicas in body["error"]
    assert (await get(http, f"{lighthouse.url}/v1/jobs/{job}"))[0] == 404


async def test_a_session_request_without_a_websocket_is_refused(lighthouse, http, job):
    for path in ("session", "trainer-status"):
        status, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}/{path}")
        assert status == 400 and "WebSocket" in body["error"]
    assert (await get(http, f"{lighthouse.url}/v1/jobs/{job}"))[0] == 404


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on PATH: install it to run this test")
async def test_curl_as_in_the_documentation(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=2, job=job)

    def curl(words: str) -> str:
        command = f'curl -sf -H "Authorization: Bearer $(cat {lighthouse.token_file})" {words}'
        return subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True).stdout

    assert '"roster": ["r0", "r1"]' in curl(f"{lighthouse.url}/v1/jobs/{job}")
    assert '"kind": "epoch"' in curl(f"{lighthouse.url}/v1/jobs/{job}/events")
    order = """-d '{"replica": "r1", "who": "me", "why": "its host is hot"}'"""
    assert '"ok": true' in curl(f"{order} {lighthouse.url}/v1/jobs/{job}/evict")
    assert (await members[0].epoch(2)).names == ("r0",)
    await close_all(members)
