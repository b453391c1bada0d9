"""The drill of a running job at the lighthouse: one at a time, with a lease and a right of its own."""

import json
import time

import pytest
from in_process import Clock
from lighthouse_support import LighthouseProcess, close_all, get, post, start_job

from fabric.errors import Refused
from fabric.lighthouse.http.tokens import SIGNED_S
from fabric.lighthouse.jobs.drills import INJECTOR_S, LEASE_S, Drills, InjectorRequest
from fabric.runtime.drill_orders import order_key, proof_of, signed_request

DRILL_TOKEN = "the-token-for-drills"


class Room:
    """The drills of a job with the trainers ``names``, on a clock of the test's own."""

    def __init__(self, *names: str, restarts: bool = True) -> None:
        self.clock, self.events, self.restarts = Clock(), [], restarts
        self.drills = Drills("gpt", lambda *event: self.events.append(event), self.clock)
        for name in names:
            self.ask(name)

    def ask(self, name: str, drill: str = "", gone: bool = False, process: str = "1", **report: str) -> list:
        reports = {"1": report} if report else {}
        asked = InjectorRequest(
            name,
            f"{name}-{process}",
            int(process),
            "host",
            self.restarts,
            gone=gone,
            drill=drill,
            reports=reports,
        )
        return self.drills.ask(asked)["faults"]

    def begin(self, replicas: int = 2, may_lose: bool = False) -> str:
        return self.drills.begin("me", "weekly", replicas, may_lose=may_lose).id

    def fault(self) -> dict:
        return self.drills.as_json()["faults"][0]


def test_a_fault_reaches_its_injector_alone_and_leaves_events_with_the_drills_id():
    room = Room("r0", "r1")
    drill = room.begin()
    room.drills.inject(drill, "stop", "r1", 5.0)
    assert room.ask("r0", drill) == []
    assert [(x["fault"], x["seconds"]) for x in room.ask("r1", drill)] == [("stop", 5.0)]
    room.ask("r1", drill, observed="process 7 is stopped")
    room.ask("r1", drill, observed="process 7 is stopped", undone="process 7 runs")
    assert room.ask("r1", drill) == []
    room.drills.end(drill)
    kinds = [kind for kind, _, _ in room.events]
    assert kinds == ["drill began", "drill fault", "drill observed", "drill undone", "drill ended"]
    assert all(f"drill {drill}" in why for _, _, why in room.events)
    assert {about for kind, about, _ in room.events if kind not in ("drill began", "drill ended")} == {"r1"}


def test_a_fault_ends_with_its_time_and_with_the_drill():
    room = Room("r0", "r1")
    drill = room.begin()
    first = room.drills.inject(drill, "stop", "r1", 5.0)
    room.clock.now += 5.0
    assert room.ask("r1", drill) == []
    second = room.drills.inject(drill, "stop", "r1", 5.0)
    assert [x["number"] for x in room.ask("r1", drill)] == [second.number] != [first.number]
    room.drills.end(drill)
    assert room.ask("r1", drill) == []


def test_a_drill_that_is_not_renewed_ends_with_its_faults():
    room = Room("r0", "r1")
    drill = room.begin()
    room.drills.inject(drill, "stop", "r1", 600.0)
    room.clock.now += LEASE_S
    assert room.ask("r1", drill)
    room.clock.now += 0.1
    assert room.ask("r1", drill) == []
    assert "was not renewed" in room.events[-1][2]
    with pytest.raises(Refused, match="is over: begin another one"):
        room.drills.renew(drill)
    room.begin()


def test_a_second_drill_of_one_job_is_refused():
    room = Room("r0", "r1")
    drill = room.begin()
    with pytest.raises(Refused, match=f"the drill {drill} of me breaks job gpt: wait for its end"):
        room.begin()


def test_a_job_that_may_not_survive_is_drilled_only_on_demand():
    with pytest.raises(Refused, match="job gpt has one replica"):
        Room("r0").begin(replicas=1)
    with pytest.raises(Refused, match="no launcher starts r0 of job gpt again"):
        Room("r0", "r1", restarts=False).begin()
    assert Room("r0").begin(replicas=1, may_lose=True)
    assert Room("r0", "r1", restarts=False).begin(may_lose=True)


def test_a_job_without_an_injector_is_not_drilled():
    with pytest.raises(Refused, match="start its trainers with FABRIC_DRILL=KEY-FILE"):
        Room().begin()


@pytest.mark.parametrize("leave", ["gone", "silent"])
def test_a_fault_on_a_replica_that_is_gone_is_one_sentence(leave):
    room = Room("r0", "r1")
    drill = room.begin()
    if leave == "gone":
        room.ask("r1", drill, gone=True)
    else:
        for _ in range(2):
            room.clock.now += INJECTOR_S / 2
            room.drills.renew(drill)
    with pytest.raises(Refused, match="r1 of job gpt is gone, or was not started for drills"):
        room.drills.inject(drill, "kill", "r1", 0.0)


def test_the_next_process_shows_that_a_kill_is_over_and_is_not_killed():
    room = Room("r0", "r1")
    drill = room.begin()
    room.drills.inject(drill, "kill", "r1", 0.0)
    assert room.ask("r1", drill)
    room.ask("r1", drill, gone=True, observed="process 1 is gone")
    assert room.fault()["undone"] == ""
    assert room.ask("r1", drill, process="2") == []
    assert room.fault()["undone"] == "process 2 of r1 started"


def test_a_process_that_was_replaced_before_its_fault_is_named():
    room = Room("r0", "r1")
    drill = room.begin()
    room.drills.inject(drill, "kill", "r1", 0.0)
    assert room.ask("r1", process="2") == []
    assert room.fault()["problem"] == "its process was replaced before the fault happened"


def test_reports_of_another_drill_and_of_another_injector_do_not_count():
    room = Room("r0", "r1")
    drill = room.begin()
    room.drills.inject(drill, "stop", "r1", 5.0)
    room.ask("r1", "another drill", observed="nothing")
    room.ask("r0", drill, observed="nothing")
    assert room.fault()["observed"] == ""


@pytest.fixture(scope="module")
def drilled(tmp_path_factory):
    """A lighthouse with a token for drills."""
    folder = tmp_path_factory.mktemp("drilled")
    (folder / "drill-token").touch(mode=0o600)
    (folder / "drill-token").write_text(DRILL_TOKEN)
    arguments = ("--limit", "lease-s=60", "--drill-token-file", str(folder / "drill-token"))
    with LighthouseProcess(folder, f"sqlite://{folder}/store.db", arguments=arguments) as process:
        yield process


INJECTOR = {"replica": "r1", "id": "i1", "pid": 7, "host": "h", "restarts": True}
BEGIN = {"who": "me", "why": "weekly"}


async def test_only_the_token_with_the_right_drills_and_opens_nothing_else(drilled, http, job):
    members = await start_job(http, drilled.url, job=job)
    base = f"{drilled.url}/v1/jobs/{job}"
    assert (await post(http, f"{base}/injector", INJECTOR))[0] == 200
    status, body = await post(http, f"{base}/drill", BEGIN)
    assert status == 401 and "has no right to drill" in body["error"]
    for path in ("", "/events", "/drill"):
        assert (await get(http, base + path, token=DRILL_TOKEN))[0] == 200
    for path in ("/drain", "/evict", "/pause", "/injector"):
        body = {"replica": "r1", **BEGIN, **INJECTOR}
        assert (await post(http, base + path, body, token=DRILL_TOKEN))[0] == 401, path
    assert (await get(http, f"{base}/session", token=DRILL_TOKEN))[0] == 401
    status, body = await post(http, f"{base}/drill", BEGIN, token=DRILL_TOKEN)
    assert status == 200
    drill = body["drill"]
    order = {"drill": drill, "fault": "stop", "replica": "r1", "seconds": 5.0}
    assert (await post(http, f"{base}/drill/fault", order))[0] == 401
    status, body = await post(http, f"{base}/drill/fault", order, token=DRILL_TOKEN)
    assert status == 200 and body["faults"][0]["fault"] == "stop"
    status, body = await post(http, f"{base}/injector", {**INJECTOR, "nonce": "n1"})
    assert status == 200 and [x["fault"] for x in body["faults"]] == ["stop"]
    proofs = body.pop("proofs")
    assert proofs == [proof_of(order_key(DRILL_TOKEN, job), "n1", body)]
    assert (await post(http, f"{base}/drill/end", {"drill": drill}, token=DRILL_TOKEN))[0] == 200
    _, events = await get(http, f"{base}/events")
    kinds = [event["kind"] for event in events if event["kind"].startswith("drill")]
    assert kinds == ["drill began", "drill fault", "drill ended"]
    await close_all(members)


async def test_a_proved_token_drills_once_by_the_request_that_it_proves(drilled, http, job, monkeypatch):
    members = await start_job(http, drilled.url, job=job)
    await post(http, f"{drilled.url}/v1/jobs/{job}/injector", INJECTOR)
    path, body = f"/v1/jobs/{job}/drill", json.dumps(BEGIN).encode()

    async def sent(authorization: str, method: str = "POST") -> tuple[int, str]:
        sent = {"Authorization": authorization, "Content-Type": "application/json"}
        data = body if method == "POST" else None
        async with http.request(method, drilled.url + path, data=data, headers=sent) as answer:
            return answer.status, await answer.text()

    proved = signed_request(DRILL_TOKEN, "POST", path, body)
    for stolen in (
        signed_request("a-guess", "POST", path, body),
        signed_request(DRILL_TOKEN, "GET", path, body),
        signed_request(DRILL_TOKEN, "POST", f"{path}/end", body),
        signed_request(DRILL_TOKEN, "POST", path, b"{}"),
        "Drill 1.",
    ):
        status, text = await sent(stolen)
        assert status == 401 and "has no right to drill" in text, stolen
    now = time.time()
    with monkeypatch.context() as clock:
        clock.setattr("fabric.runtime.drill_orders.time.time", lambda: now - SIGNED_S - 60)
        late = signed_request(DRILL_TOKEN, "POST", path, body)
    status, text = await sent(late)
    assert status == 401 and "set both clocks" in text
    assert (await sent(signed_request(DRILL_TOKEN, "GET", path, b""), "GET"))[0] == 200
    assert (await sent(proved))[0] == 200
    status, text = await sent(proved)
    assert status == 401 and "has come before" in text
    await close_all(members)


async def test_a_lighthouse_without_a_token_for_drills_permits_none(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, job=job)
    for token in ("", DRILL_TOKEN):
        status, _ = await post(http, f"{lighthouse.url}/v1/jobs/{job}/drill", BEGIN, token=token)
        assert status == 401
    await close_all(members)


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", {}, {**INJECTOR, "pid": -1}, {**INJECTOR, "wait_s": 1e9}, {**INJECTOR, "replica": "a b"}],
)
async def test_a_malformed_request_of_an_injector_is_one_sentence(drilled, http, job, body):
    members = await start_job(http, drilled.url, count=1, job=job)
    status, answer = await post(http, f"{drilled.url}/v1/jobs/{job}/injector", body)
    assert status == 400 and "\n" not in answer["error"]
    await close_all(members)
