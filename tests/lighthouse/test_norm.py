"""A real lighthouse takes its members' settings for the norm, not those of the process that speaks first."""

import signal

import pytest
from lighthouse_support import LighthouseProcess, WireMember, close_all, eventually, get, start_job
from msgspec.structs import replace

from fabric.protocol.messages import network as m

SAME, OTHER = "on_nan propagate", "on_nan skip"
LEASE = ("--limit", "lease-s=3")


@pytest.mark.parametrize("is_restarted", [False, True], ids=["blink", "restart"])
async def test_a_stranger_that_speaks_before_the_members_is_refused_and_no_member_is(
    http, tmp_path, is_restarted
):
    with LighthouseProcess(tmp_path, f"sqlite://{tmp_path}/store.db", arguments=LEASE) as lighthouse:
        members = await start_job(http, lighthouse.url, 2, data=SAME)
        await close_all(members)
        if is_restarted:
            lighthouse.end(signal.SIGKILL)
            lighthouse.launch(port=lighthouse.port)
            lighthouse.wait_ready()

        async def is_alone() -> bool:
            _, body = await get(http, f"{lighthouse.url}/v1/jobs/job")
            return not any(member["connected"] for member in body["members"])

        await eventually(is_alone, "the members' sessions to end")
        stranger = await WireMember(http, lighthouse.url, "r9", data=OTHER, replicas="8:8").open()
        await stranger.epoch(1)
        back = [WireMember(http, lighthouse.url, f"r{i}", generation=1, data=SAME) for i in range(2)]
        for member in back:
            await member.open()
            assert (await member.epoch(1)).names == ("r0", "r1")
            await member.run()
        refusal = await stranger.next(m.Rejected)
        assert not refusal.retry and "r9 has other data settings than r0" in refusal.reason
        _, body = await get(http, f"{lighthouse.url}/v1/jobs/job")
        assert body["policy"]["min_replicas"] == 1, "the stranger asked for eight"
        await close_all([*back, stranger])


async def test_a_second_process_of_a_member_waits_after_a_restart_of_the_lighthouse(http, tmp_path):
    with LighthouseProcess(tmp_path, f"sqlite://{tmp_path}/store.db", arguments=LEASE) as lighthouse:
        members = await start_job(http, lighthouse.url, 2)
        await close_all(members)
        lighthouse.end(signal.SIGKILL)
        lighthouse.launch(port=lighthouse.port)
        lighthouse.wait_ready()
        twin = WireMember(http, lighthouse.url, "r0", incarnation=2)
        twin.session = replace(twin.session, secret="another process")
        await twin.open()
        refusal = await twin.next(m.Rejected)
        assert refusal.retry and "has not spoken to this lighthouse" in refusal.reason
        member = await WireMember(http, lighthouse.url, "r0", generation=1).open()
        assert (await member.epoch(1)).names == ("r0", "r1")
        await twin.open()
        refusal = await twin.next(m.Rejected)
        assert not refusal.retry and "taken by a living process" in refusal.reason
        await close_all([member, twin])
