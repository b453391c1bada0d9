"""``fabric pause``, ``resume``, ``scale`` and ``admit`` as a person uses them, against real lighthouses."""

import json
from contextlib import AsyncExitStack

import pytest
from lighthouse_support import (
    LighthouseProcess,
    WireMember,
    WireStatus,
    close_all,
    eventually,
    fabric,
    get,
    post,
    sentence_of,
    start_job,
)

from fabric.protocol.messages import network as m

ANN = {"who": "ann", "why": "maintenance"}


def common(lighthouse, job):
    return ("--lighthouse", lighthouse.url, "--token-file", lighthouse.token_file, "--job", job)


def status(lighthouse, job):
    return json.loads(fabric("status", *common(lighthouse, job), "--json").stdout)


async def newcomer(http, url, replica, members, **others):
    """A replica outside the roster that holds the members' state and sends heartbeats."""
    newest = members[0].newest
    found = WireMember(http, url, replica, generation=newest.generation, step=newest.base.step, **others)
    await found.open()
    await found.next(m.Epoch)
    await say_outside(found)
    return found


async def say_outside(member):
    await member.say(
        m.Heartbeat(
            1, member.newest.epoch, member.newest.generation, member.newest.base.step, phase="outside"
        )
    )


async def test_joins_are_paused_and_resumed_over_a_fail_over(http, tmp_path, job):
    store, arguments = f"sqlite://{tmp_path}/store.db", ("--limit", "lease-s=2")
    with (
        LighthouseProcess(tmp_path, store, arguments=arguments) as first,
        LighthouseProcess(tmp_path, store, "two", arguments) as second,
    ):
        members = await start_job(http, first.url, count=2, job=job)
        done = fabric("pause", *common(first, job), "--why", "maintenance", "--who", "ann")
        assert done.returncode == 0 and "admits no replica now" in done.stdout, done.stderr
        late = await newcomer(http, first.url, "r9", members, job=job)
        reason = (await late.next(m.Rejected)).reason
        assert "paused by ann: maintenance" in reason and "fabric resume" in reason
        assert "paused by ann: maintenance" in fabric("status", *common(first, job)).stdout
        first.end()

        async def leads():
            code, body = await get(http, f"{second.url}/healthz", token=None)
            return code == 200 and body["is_leader"]

        await eventually(leads, "the second to lead")
        epoch = members[0].newest.epoch
        for member in members:
            member.session = again(member.session, member.newest)
            await member.open(second.url)
            await member.next(m.Epoch)
            await member.report()
        for member in members:
            await member.next(m.Resume)
            await member.run()
        late = await newcomer(http, second.url, "r9", members, job=job)
        assert "maintenance" in (await late.next(m.Rejected)).reason, "the next leader knows it"
        assert members[0].newest.epoch == epoch
        done = fabric("resume", *common(second, job), "--why", "it is over")
        assert done.returncode == 0, done.stderr
        assert "r9" in (await members[0].epoch(epoch + 1)).names
        said = fabric("events", *common(second, job)).stdout
        assert "resume asked" in said and "it is over" in said
        await close_all([*members, late])


def again(session, newest):
    """Report to the next leader as this member."""
    return m.OpenSession(
        replica=session.replica,
        incarnation=session.incarnation,
        generation=newest.generation,
        step=newest.base.step,
        digest="",
        epoch=newest.epoch,
        link=session.link,
        ckpt=session.ckpt,
        micro_batches=session.micro_batches,
    )


async def test_the_size_of_a_job_is_set_and_members_learn_what_it_needs(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=3, job=job)
    done = fabric("scale", "--max", "2", *common(lighthouse, job), "--why", "budget", "--who", "ann")
    assert done.returncode == 0 and "may have 2" in done.stdout, done.stderr
    record = await members[0].epoch(2)
    assert [x.replica for x in record.roster if x.leaving] == ["r2"] and "budget" in record.reason
    done = fabric("scale", "--min", "4", "--max", "5", *common(lighthouse, job), "--why", "no small batches")
    assert done.returncode == 0 and "stands still until it has 4" in done.stdout, done.stderr
    for member in members:
        await member.epoch(2)
        await member.run()
    record = await members[0].epoch(3)
    assert record.min_replicas == 4 and record.is_forced, "they stop until there are as many"
    policy = status(lighthouse, job)["policy"]
    assert (policy["min_replicas"], policy["max_replicas"]) == (4, 5)
    await close_all(members)


@pytest.mark.parametrize(
    ("action", "body", "code", "said"),
    [
        (
            "scale",
            {**ANN, "min": 5, "max": 2},
            409,
            "at least 5 and at most 2 replicas cannot be: the first must",
        ),
        ("scale", ANN, 400, "give"),
        ("scale", {**ANN, "max": -1}, 400, "count of replicas"),
        ("scale", {**ANN, "max": 1025}, 400, "from 0 to 1024, this lighthouse's max-replicas"),
        ("scale", {**ANN, "max": True}, 400, "count of replicas"),
        ("scale", {**ANN, "max": "2"}, 400, "count of replicas"),
        ("pause", {"who": "ann"}, 400, '"why" must be'),
        ("resume", [], 400, "JSON object"),
        ("admit", ANN, 400, '"about" must be'),
        ("admit", {**ANN, "about": "nobody"}, 404, "knows no replica or host nobody"),
        ("adapt", ANN, 400, 'give "mode", "veto"'),
        ("adapt", {**ANN, "mode": "often"}, 400, 'must be "off", "advise" or "act"'),
        ("adapt", {**ANN, "mode": ["act"]}, 400, 'must be "off", "advise" or "act"'),
        ("adapt", {**ANN, "mode": "act", "veto": "r9"}, 404, "knows no replica r9"),
        ("adapt", {**ANN, "veto": 7}, 400, '"veto" must be'),
    ],
)
async def test_an_impossible_limit_is_refused_and_changes_nothing(
    lighthouse, http, job, action, body, code, said
):
    members = await start_job(http, lighthouse.url, count=1, job=job)
    before = (await get(http, f"{lighthouse.url}/v1/jobs/{job}"))[1]["record"]
    answer = await post(http, f"{lighthouse.url}/v1/jobs/{job}/{action}", body)
    assert answer[0] == code and said in answer[1]["error"], answer
    assert (await get(http, f"{lighthouse.url}/v1/jobs/{job}"))[1]["record"] == before
    await close_all(members)


async def test_orders_need_the_token_and_a_job_that_has_begun(lighthouse, http, job):
    url = f"{lighthouse.url}/v1/jobs/{job}"
    assert (await post(http, f"{url}/pause", ANN, token="wrong"))[0] == 401
    assert (await post(http, f"{url}/pause", ANN))[0] == 404
    waits = await WireMember(http, lighthouse.url, "r0", job=job, replicas="2").open()

    async def known():
        return (await get(http, url))[0] == 200

    await eventually(known, "the job to be known")
    answer = await post(http, f"{url}/pause", ANN)
    assert answer[0] == 409 and "has not started" in answer[1]["error"]
    await close_all([waits])


async def test_a_repeated_pause_or_scale_command_changes_nothing(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=1, job=job)
    url = f"{lighthouse.url}/v1/jobs/{job}"
    for _ in range(2):
        assert await post(http, f"{url}/pause", ANN) == (
            200,
            {"ok": True, "job": job, "paused": "by ann: maintenance", "min": 0, "max": 0},
        )
    records = [(await get(http, url))[1]["record"]]
    assert (await post(http, f"{url}/scale", {**ANN, "max": 4}))[0] == 200
    records.append((await get(http, url))[1]["record"])
    assert (await post(http, f"{url}/scale", {**ANN, "max": 4, "why": "again"}))[0] == 200
    records.append((await get(http, url))[1]["record"])
    assert records[1] == records[2] != records[0]
    await close_all(members)


async def die_and_come_back(http, lighthouse, members, server, job):
    """End the last member's process, let the others go on, and let its next process come with their state."""
    dead = members[-1]
    incarnation = dead.session.incarnation
    await server.beat("running", incarnation)
    await server.beat("gone", incarnation)
    epoch = members[0].newest.epoch + 1
    for member in members[:-1]:
        await member.epoch(epoch)
        await member.report()
    for member in members[:-1]:
        await member.next(m.Resume)
        await member.run()
    await dead.close()
    return await newcomer(
        http,
        lighthouse.url,
        dead.replica,
        members,
        job=job,
        incarnation=incarnation + 1,
        predecessors=(1,),
    )


async def test_a_replica_that_fails_repeatedly_waits_until_an_operator_admits_it(http, tmp_path, job):
    arguments = ("--limit", "failures=2")
    with LighthouseProcess(tmp_path, f"sqlite://{tmp_path}/store.db", arguments=arguments) as lighthouse:
        async with AsyncExitStack() as stack:
            members = await start_job(http, lighthouse.url, count=3, job=job)
            server = await WireStatus(http, lighthouse.url, "r2", job=job).open()
            stack.push_async_callback(server.socket.close)
            members[-1] = await die_and_come_back(http, lighthouse, members, server, job)
            record = await members[0].epoch(3)
            assert "r2" in record.names, "once is no offence"
            for member in members:
                await member.epoch(3)
                await member.run()
            members[-1] = await die_and_come_back(http, lighthouse, members, server, job)
            reason = (await members[-1].next(m.Rejected)).reason
            assert "r2 failed 2 times, last: its process is gone" in reason and "fabric admit r2" in reason
            assert not members[-1].socket.closed, "it waits"
            body = status(lighthouse, job)
            (penalty,) = body["penalties"]
            assert (penalty["kind"], penalty["about"], penalty["times"]) == ("replica", "r2", 2)
            assert body["joiners"][0]["verdict"] == reason
            # all replicas of the test are on this host, so it does not become suspect
            (host,) = body["hosts"]
            assert (host["times"], host["suspect"]) == (2, False) and host["score"] > 1.99
            assert host["replicas"] == ["r0", "r1", "r2"] and host["why"] == "its process is gone"
            url = f"{lighthouse.url}/v1/jobs/{job}/hosts"
            (listed,) = (await get(http, url))[1]
            assert {**listed, "score": 2} == {**host, "score": 2}, "the endpoint lists what status shows"
            shown = fabric("status", *common(lighthouse, job)).stdout
            assert "replica r2 failed 2 times" in shown
            assert host["failed"] == ["r2"]
            assert f"host {host['host']} failed 2 times (lately r2), last" in " ".join(shown.split())
            done = fabric("admit", "r2", *common(lighthouse, job), "--why", "new memory")
            assert done.returncode == 0 and "nothing against r2" in done.stdout, done.stderr
            await say_outside(members[-1])
            assert "r2" in (await members[0].epoch(5)).names
            await close_all(members)


def test_operator_commands_need_a_reason_and_scale_needs_a_number(lighthouse, job):
    assert fabric("pause", *common(lighthouse, job)).returncode == 2
    assert "--min, --max or both" in fabric("scale", *common(lighthouse, job), "--why", "x").stderr
    refused = fabric("scale", "--max", "2", *common(lighthouse, "no-such-job"), "--why", "x")
    assert "there is no job no-such-job" in sentence_of(refused)


async def test_the_mode_against_slow_replicas_and_vetoes_outlive_their_leader(http, tmp_path, job):
    store, arguments = f"sqlite://{tmp_path}/store.db", ("--limit", "lease-s=2")
    with (
        LighthouseProcess(tmp_path, store, arguments=arguments) as first,
        LighthouseProcess(tmp_path, store, "two", arguments) as second,
    ):
        members = await start_job(http, first.url, count=2, job=job)
        done = fabric("adapt", "--mode", "act", "--veto", "r1", *common(first, job), "--why", "hot racks")
        assert f"job {job}: mode act; replicas under a veto: r1" in done.stdout, done.stderr
        health = status(first, job)["health"]
        assert (health["mode"], health["vetoed"]) == ("act", ["r1"])
        first.end()

        async def knows():
            code, body = await get(http, f"{second.url}/v1/jobs/{job}")
            return code == 200 and body["health"]["mode"] == "act"

        await eventually(knows, "the second to lead with the order")
        assert status(second, job)["health"]["vetoed"] == ["r1"]
        done = fabric("adapt", "--mode", "off", "--allow", "r1", *common(second, job), "--why", "over")
        assert f"job {job}: mode off; replicas under a veto: none" in done.stdout, done.stderr
        await close_all(members)


async def test_a_veto_and_its_end_for_one_replica_are_refused(http, lighthouse, job):
    members = await start_job(http, lighthouse.url, count=2, job=job)
    done = fabric("adapt", "--veto", "r1", "--allow", "r1", *common(lighthouse, job), "--why", "both")
    assert "a veto for r1 and its end contradict each other: give one of them" in sentence_of(done)
    assert status(lighthouse, job)["health"]["vetoed"] == []
    done = fabric("adapt", "--veto", "r1", "--allow", "r0", *common(lighthouse, job), "--why", "two replicas")
    assert done.stdout.endswith("replicas under a veto: r1\n"), done.stderr
    await close_all(members)


async def test_adapt_needs_an_order_and_the_token(lighthouse, job):
    done = fabric("adapt", *common(lighthouse, job), "--why", "nothing")
    assert done.returncode == 2 and "give --mode, --veto or --allow" in done.stderr
    wrong = ("--lighthouse", lighthouse.url, "--job", job)
    done = fabric("adapt", *wrong, "--mode", "act", "--why", "no token")
    assert done.returncode != 0 and "token" in done.stderr
