"""The lighthouse probes checkpoint servers only at known addresses, and with bounded memory."""

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from fabric.errors import ConfigError
from fabric.lighthouse.diagnosis import rank_probe
from fabric.lighthouse.diagnosis.rank_probe import AllowedHosts, PeerAddresses, ProbeAccess, ProbeTarget, ask
from fabric.protocol.messages.network import OpenSession

HERE = frozenset({"127.0.0.1"})


@asynccontextmanager
async def server(
    body: bytes = b'{"trainer": {"state": "running", "pid": 7}}',
) -> AsyncIterator[tuple[str, list]]:
    """Run a server; yield its port and the list of its requests (path and authorization)."""
    asked: list[tuple[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.path_qs, request.headers.get("Authorization", "")))
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield str(runner.addresses[0][1]), asked
    finally:
        await runner.cleanup()


def shown(token: str | None, hosts: AllowedHosts = AllowedHosts()):  # noqa: B008
    return lambda _with_own: ProbeAccess(token, hosts=hosts)


async def test_a_checkpoint_server_is_asked_where_its_process_has_connected_from():
    async with server() as (port, asked):
        (seen,) = await ask([ProbeTarget("r0", 0, f"http://127.0.0.1:{port}", HERE)], shown("of-the-job"))
        assert seen.pid == 7 and not seen.problem
        assert {token for _, token in asked} == {"Bearer of-the-job"}
        assert sorted(path.partition("?")[0] for path, _ in asked) == [
            "/debug/flight",
            "/debug/stacks",
            "/debug/state",
        ]


ENTRY = {
    "process_group": ["0", "default_pg"],
    "collective_seq_id": 3,
    "profiling_name": "gloo:all_reduce",
    "state": "scheduled",
}


@pytest.mark.parametrize(("more", "numbers"), [({}, [3]), ({"collective_seq_id": "three"}, None)])
async def test_a_recording_is_read_without_its_members_and_a_damaged_one_is_not_kept(more, numbers):
    body = {"entries": [ENTRY | more], "pg_config": {"0": {"ranks": str([*range(20_000)])}}}
    async with server(json.dumps(body).encode()) as (port, _):
        (seen,) = await ask([ProbeTarget("r0", 1, f"http://127.0.0.1:{port}", HERE)], shown("of-the-job"))
    if numbers is None:
        assert seen.recording is None
    else:
        assert [call.number for call in seen.recording.collectives] == numbers
        assert (seen.recording.process.replica, seen.recording.process.rank) == ("r0", 1)
        assert not any(group.ranks for group in seen.recording.groups.values())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("came_from", [frozenset(), frozenset({"192.0.2.7"}), frozenset({"no address"})])
async def test_a_probe_shows_the_token_to_known_addresses_only(host, came_from):
    """A tenant could otherwise name any address of the lighthouse's network as its checkpoint server."""
    async with server() as (port, asked):
        (seen,) = await ask([ProbeTarget("r0", 0, f"http://{host}:{port}", came_from)], shown("of-the-job"))
        assert not asked
        assert f"at {host} is not where it has connected from" in seen.problem
        assert "--ckpt-networks" in seen.problem


async def test_networks_that_the_lighthouse_was_given_may_be_asked():
    async with server() as (port, asked):
        hosts = AllowedHosts.parse("10.0.0.0/8, 127.0.0.0/8")
        (seen,) = await ask(
            [ProbeTarget("r0", 0, f"http://localhost:{port}", frozenset())], shown("t", hosts)
        )
        assert asked and seen.pid == 7


def test_malformed_networks_in_the_setting_are_refused():
    assert AllowedHosts.parse("").networks == ()
    for text in ("10.0.0.0/99", "everything", "10.0.0.1/8"):
        with pytest.raises(ConfigError, match="ckpt-networks"):
            AllowedHosts.parse(text)


def test_a_process_over_loopback_may_have_any_address_of_this_host_and_no_other():
    hosts = AllowedHosts()
    assert hosts.allow("127.0.0.1", HERE) and hosts.allow("::1", HERE) and hosts.allow("127.0.0.1", ["::1"])
    assert hosts.allow("10.0.0.7", ["::ffff:10.0.0.7"]) and hosts.allow("::ffff:10.0.0.7", ["10.0.0.7"])
    assert not hosts.allow("192.0.2.1", HERE) and not hosts.allow("0.0.0.0", HERE)
    assert not hosts.allow("127.0.0.1", ["10.0.0.7"]) and not hosts.allow("", [""])
    own = socket.gethostbyname("localhost")
    assert hosts.allow(own, HERE)


async def test_the_token_is_asked_for_at_the_moment_of_asking_and_per_member():
    asked_for: list[bool] = []

    def access(is_trusted: bool) -> ProbeAccess:
        asked_for.append(is_trusted)
        return ProbeAccess("own" if is_trusted else None)

    async with server() as (port, asked):
        url = f"http://127.0.0.1:{port}"
        await ask(
            [
                ProbeTarget("r0", 0, url, HERE),
                ProbeTarget("r1", 0, url + "#1", HERE, is_trusted=True),
            ],
            access,
        )
    assert asked_for == [False, True]
    assert sorted({token for _, token in asked}) == ["", "Bearer own"]


@pytest.mark.parametrize("depth", [False, True])
async def test_an_answer_is_bounded_in_bytes_and_in_kept_values(monkeypatch, depth):
    """Nine answers of 4 MiB of empty lists once took a gigabyte of memory."""
    kept: list[object] = []
    parse = rank_probe._parse
    monkeypatch.setattr(rank_probe, "_parse", lambda data: kept.append(parse(data)) or kept[-1])
    inner = b"[" * 900 + b"]" * 900 if depth else b",".join([b"[]"] * 80_000)
    body = b'{"trainer":{"state":"running","pid":7},"rest":[' + inner + b"]}"
    assert len(body) < rank_probe.MAX_ANSWER_BYTES == 256 * 1024
    async with server(body) as (port, _):
        (seen,) = await ask([ProbeTarget("r0", 0, f"http://127.0.0.1:{port}", HERE)], shown(None))
    assert seen.pid == 7 and len(kept) == 3
    assert all(json.dumps(value).count("[") <= 20_000 for value in kept)


async def test_a_longer_answer_is_not_read():
    async with server(b'{"x":"' + b"y" * rank_probe.MAX_ANSWER_BYTES + b'"}') as (port, _):
        (seen,) = await ask([ProbeTarget("r0", 0, f"http://127.0.0.1:{port}", HERE)], shown(None))
    assert f"more than {rank_probe.MAX_ANSWER_BYTES} bytes" in seen.problem


def session(replica: str, incarnation: int = 1, secret: str = "") -> OpenSession:
    return OpenSession(replica, incarnation, 0, 0, "", 0, "", "", 1, secret=secret)


def test_peer_addresses_are_those_of_the_newest_session_and_status():
    found = PeerAddresses()
    assert found.of("r0", 0) == frozenset() and not found.is_trusted("r0")
    found.session(session("r0"), "10.0.0.1", is_trusted=True)
    found.status("r0", 1, "10.0.0.2")
    assert found.of("r0", 0) == {"10.0.0.1"} and found.of("r0", 1) == {"10.0.0.1", "10.0.0.2"}
    assert found.is_trusted("r0")
    found.session(session("r0"), "10.0.0.3", is_trusted=False)
    found.status("r0", 1, "10.0.0.4")
    assert found.of("r0", 1) == {"10.0.0.3", "10.0.0.4"} and not found.is_trusted("r0")
    assert found.of("r1", 0) == frozenset()


def test_a_process_is_known_by_its_secret():
    found = PeerAddresses()
    assert not found.stranger(session("r0", 1, "mine"))
    found.session(session("r0", 1, "mine"), "10.0.0.1", is_trusted=False)
    assert not found.stranger(session("r0", 1, "mine"))
    for secret in ("", "other", "\udcff"):
        assert "another process speaks for r0" in found.stranger(session("r0", 1, secret))
    assert not found.stranger(session("r0", 2, "other")), "a later process; the core decides about that"
    found.session(session("r1", 1), "10.0.0.1", is_trusted=False)
    assert not found.stranger(session("r1", 1, "any")), "an older version, which says none"
