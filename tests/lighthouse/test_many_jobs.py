"""Many jobs on one lighthouse: each has its own token and quotas, and its record is deleted after its end."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from lighthouse_support import (
    TOKEN,
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
    sentence_of,
    start_job,
)

from fabric.lighthouse.http.routes import OPEN_PATHS, make_app
from fabric.protocol.messages import network as m

ANN = {"replica": "r0", "about": "r0", "who": "ann", "why": "a test", "max": 2}
TOKENS = {"a": "token-of-a", "b": "token-of-b"}


# An application of these parts names its routes, and answers nothing.
NO_PARTS = SimpleNamespace(jobs=SimpleNamespace(token_refused=None))


def folder_of(path: Path, **tokens: str) -> Path:
    folder = path / "tokens"
    folder.mkdir(exist_ok=True)
    for name, token in tokens.items():
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(token + "\n")
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A lighthouse with its own token, and with two jobs that have their own tokens."""
    path = tmp_path_factory.mktemp("many")
    folder = folder_of(path, **TOKENS)
    (folder / "..data").mkdir()  # Kubernetes makes this folder in a mounted secret
    (folder / "empty").touch(mode=0o600)
    arguments = ("--job-tokens", str(folder))
    with LighthouseProcess(path, f"sqlite://{path}/store.db", arguments=arguments) as process:
        yield process


def routes_of_a_job() -> list[tuple[str, str]]:
    """Return the method and path of every route of the application that names a job."""
    found = []
    for route in make_app(NO_PARTS, None).router.routes():
        path = route.resource.canonical if route.resource is not None else ""
        if "{job}" in path and route.method in ("GET", "POST"):
            found.append((route.method, path))
    assert len(found) >= 12
    return found


@pytest.mark.parametrize(("method", "path"), routes_of_a_job())
async def test_the_token_of_one_job_opens_nothing_of_another(shared, http, method, path):
    job = await WireMember(http, shared.url, "r0", job="b", replicas="1").open()
    await job.epoch(1)
    before = (await get(http, f"{shared.url}/v1/jobs/b", TOKENS["b"]))[1]["record"]
    url = shared.url + path.replace("{job}", "b")
    async with http.request(method, url, json=ANN, headers=headers(TOKENS["a"])) as answer:
        assert answer.status == 401
        assert "not that of job b" in (await answer.json())["error"]
    assert (await get(http, f"{shared.url}/v1/jobs/b", TOKEN))[1]["record"] == before
    await job.close()


async def test_its_own_token_and_the_lighthouses_open_a_job(shared, http):
    for token in (TOKENS["a"], TOKEN):
        assert (await get(http, f"{shared.url}/v1/jobs/a", token))[0] == 404, "let in, and there is none"
        socket = await connect(http, shared.url, "a", "session?replicas=1", token)
        await socket.close()
    for job in ("c", "empty", "..data"):
        assert (await get(http, f"{shared.url}/v1/jobs/{job}", TOKENS["a"]))[0] == 401
    for wrong in ("", "token-of-", None):
        assert (await get(http, f"{shared.url}/v1/jobs/a", wrong))[0] == 401


async def test_every_path_outside_the_open_paths_needs_a_token(shared, http):
    for route in make_app(NO_PARTS, None).router.routes():
        path = route.resource.canonical.replace("{job}", "a") if route.resource is not None else ""
        if path not in OPEN_PATHS and route.method in ("GET", "POST"):
            async with http.request(route.method, shared.url + path) as answer:
                assert answer.status == 401, path


async def test_a_jobs_token_lists_that_job_alone(shared, http):
    members = []
    for job, token in TOKENS.items():
        socket = await connect(http, shared.url, job, "session?replicas=1", token)
        member = WireMember(http, shared.url, "r0", job=job)
        member.socket = socket
        await member.say(member.session)
        await member.epoch(1)
        members.append(member)
    for given, seen in ((TOKENS["a"], ["a"]), (TOKENS["b"], ["b"]), (TOKEN, ["a", "b"])):
        status, jobs = await get(http, f"{shared.url}/v1/jobs", given)
        assert status == 200 and [job["job"] for job in jobs] == seen
    # The page's login trades a job's token for a credential that opens that job.
    async with http.post(f"{shared.url}/login", json={"token": TOKENS["a"]}) as answer:
        page = {"Authorization": f"Page {(await answer.json())['page']}"}
    for path, status in (("/v1/jobs/a", 200), ("/v1/jobs/b", 401)):
        async with http.get(shared.url + path, headers=page) as answer:
            assert answer.status == status
    async with http.get(f"{shared.url}/v1/jobs", headers=page) as answer:
        assert [job["job"] for job in await answer.json()] == ["a"]
    async with http.post(f"{shared.url}/v1/jobs/b/pause", json=ANN, headers=page) as answer:
        assert answer.status == 401
    await close_all(members)


async def test_a_job_token_is_added_and_removed_without_a_restart(http, tmp_path):
    folder = folder_of(tmp_path)
    with LighthouseProcess(
        tmp_path, f"sqlite://{tmp_path}/store.db", arguments=("--job-tokens", str(folder))
    ) as lighthouse:
        url = f"{lighthouse.url}/v1/jobs/late"
        assert (await get(http, url, "token-of-late"))[0] == 401

        async def answers(status, token):
            return (await get(http, url, token))[0] == status

        folder_of(tmp_path, late="token-of-late")
        await eventually(lambda: answers(404, "token-of-late"), "the job to be let in")
        folder_of(tmp_path, late="another")
        await eventually(lambda: answers(401, "token-of-late"), "the old token to be refused")
        await eventually(lambda: answers(404, "another"), "the new one to be taken")
        (folder / "late").unlink()
        await eventually(lambda: answers(401, "another"), "the job to be shut out")


async def test_the_lighthouses_own_setting_bounds_what_a_job_may_have(http, tmp_path):
    with LighthouseProcess(
        tmp_path, f"sqlite://{tmp_path}/store.db", arguments=("--limit", "max-replicas=5000")
    ) as lighthouse:
        member, *_ = await start_job(http, lighthouse.url, count=1, job="large", data_slot=1500)
        url = f"{lighthouse.url}/v1/jobs/large"
        assert (await get(http, url))[1]["policy"]["max_replicas"] == 5000
        where = ("--lighthouse", lighthouse.url, "--token-file", lighthouse.token_file, "--job", "large")
        done = fabric("scale", "--max", "3000", *where, "--why", "it grows")
        assert done.returncode == 0 and "may have 3000" in done.stdout, done.stderr
        assert (await get(http, url))[1]["policy"]["max_replicas"] == 3000
        refused = fabric("scale", "--max", "5001", *where, "--why", "it grows")
        assert "from 0 to 5000" in sentence_of(refused)
        await member.close()


async def test_quotas_are_refused_with_a_remedy(http, tmp_path):
    with LighthouseProcess(
        tmp_path,
        f"sqlite://{tmp_path}/store.db",
        arguments=("--limit", "max-jobs=1", "--limit", "max-replicas=2"),
    ) as lighthouse:
        members = await start_job(http, lighthouse.url, count=2, job="first")
        third = await WireMember(http, lighthouse.url, "r2", job="first", replicas="2").open()
        reason = (await third.next(m.Rejected)).reason
        assert "job first has 2 replicas" in reason and "--limit max-replicas" in reason
        other = await WireMember(http, lighthouse.url, "r0", job="second", replicas="1").open()
        reason = (await other.next(m.Rejected)).reason
        assert "leads 1 job," in reason and "--limit max-jobs" in reason
        # `fabric scale` has the same bound, and no other bound.
        url = f"{lighthouse.url}/v1/jobs/first/scale"
        asked = {"who": "me", "why": "more"}
        code, answer = await post(http, url, {**asked, "max": 3})
        assert code == 400 and "from 0 to 2" in answer["error"]
        assert (await post(http, url, {**asked, "max": 2}))[0] == 200
        # A member comes back after its connection broke.
        members[1].cut()
        await members[1].open()
        await members[1].next(m.Epoch)
        await close_all([*members, third, other])


async def test_more_replicas_than_the_lighthouse_allows_are_not_waited_for(http, tmp_path):
    with LighthouseProcess(
        tmp_path, f"sqlite://{tmp_path}/store.db", arguments=("--limit", "max-replicas=2")
    ) as lighthouse:
        members = [
            await WireMember(http, lighthouse.url, name, job="eager", replicas="3").open()
            for name in ("r0", "r1")
        ]
        for member in members:
            assert (await member.epoch(1)).names == ("r0", "r1"), "at once, not after start-wait-s"
        _, told = await get(http, f"{lighthouse.url}/v1/jobs/eager/events")
        assert [event["why"] for event in told if event["kind"] == "policy kept"] == [
            "it asked to start with 3 replicas, this lighthouse allows 2"
        ]
        needy = await WireMember(http, lighthouse.url, "r0", job="needy", replicas="3:8").open()
        reason = (await needy.next(m.Rejected)).reason
        assert "asks for at least 3 replicas, and this lighthouse allows 2" in reason
        assert "FABRIC_REPLICAS" in reason and "--limit max-replicas" in reason
        await close_all([*members, needy])


async def test_a_complete_job_without_connections_is_forgotten_when_its_time_is_over(http, tmp_path):
    store = f"sqlite://{tmp_path}/store.db"
    with LighthouseProcess(tmp_path, store, arguments=("--limit", "retain-s=1")) as lighthouse:
        url = f"{lighthouse.url}/v1/jobs/done"
        (member,) = await start_job(http, lighthouse.url, count=1, job="done")
        status = await WireStatus(http, lighthouse.url, "r0", job="done").open()
        await status.beat("running")
        await member.say(m.Finished(member.newest.fence, 7))
        assert (await member.next(m.Complete)).step == 7
        await member.close()
        kept = (await get(http, url))[1]["record"]
        assert kept["complete"] and kept["ended"] > 1e9
        late = await WireMember(
            http, lighthouse.url, "r0", job="done", incarnation=2, predecessors=(1,)
        ).open()
        assert (await late.next(m.Complete)).step == 7, "who comes late is told"
        await late.close()
        await status.socket.close()

        async def forgotten():
            return (await get(http, url))[0] == 404

        await eventually(forgotten, "the job to be forgotten")
        (again,) = await start_job(http, lighthouse.url, count=1, job="done")
        assert again.newest.generation == 1, "the name is free"
        await again.close()


def test_impossible_settings_of_jobs_are_refused(tmp_path):
    for arguments, said in (
        (("--job-tokens", str(tmp_path / "none")), "does not exist"),
        (("--limit", "max-jobs=0"), "give at least 1"),
        (("--limit", "max-replicas=1000000"), "at most"),
        (("--limit", "retain-s=0"), "retain-s is 0"),
        (("--limit", "failures=-1"), "failures is -1"),
    ):
        done = fabric("lighthouse", "--store", f"sqlite://{tmp_path}/store.db", *arguments)
        assert done.returncode == 1 and said in done.stderr, done.stderr
