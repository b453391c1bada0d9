"""Data links between processes on one host: chosen where both sides can, and never by mistake."""

import asyncio
import os
import socket

import pytest

from fabric.errors import Refused, Unauthorized
from fabric.transport.greeting import Greeting
from fabric.transport.tcp import (
    Listener,
    ListenerIdentity,
    check_user,
    connect_locally,
    dial,
    listen_locally,
    local_name,
)

TOKEN = b"a-token"
NAME = local_name("job", "r0", 0, 3)


def greeting(to: str = "r0") -> Greeting:
    return Greeting(job="job", store_id="s", replica="r1", incarnation=1, kind="data", epoch=3, to=to)


class ListeningHost:
    """One listener and what arrived at it."""

    def __init__(self, replica: str = "r0") -> None:
        self.arrivals: asyncio.Queue = asyncio.Queue()
        identity = ListenerIdentity("job", replica)
        self.listener = Listener(identity, TOKEN, lambda g, s: self.arrivals.put_nowait((g, s)))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.address[1]}"


@pytest.mark.parametrize(
    ("listens", "dials", "family"),
    [
        (True, True, socket.AF_UNIX),
        (True, False, socket.AF_INET),
        (False, True, socket.AF_INET),
    ],
)
async def test_a_link_is_local_where_both_sides_want_it(listens, dials, family):
    host = ListeningHost()
    await host.listener.start("127.0.0.1", local=listens)
    sock = await dial(host.address, greeting(), TOKEN, 5.0, local=dials)
    said, theirs = await host.arrivals.get()
    assert said == greeting()
    assert sock.family == theirs.family == family
    sock.close()
    theirs.close()
    await host.listener.close()


async def test_another_member_behind_the_name_is_not_taken_for_the_one_that_is_meant():
    """As when the port in an address is another host's, and a member here has the same one."""
    host, impostor = ListeningHost("r0"), ListeningHost("r9")
    await host.listener.start("127.0.0.1")
    await impostor.listener.start("127.0.0.1")
    name = listen_locally(local_name("job", "r0", 0, host.listener.address[1]))
    assert name is not None
    impostor.listener._spawn(impostor.listener._accept_loop(name))
    sock = await dial(host.address, greeting("r0"), TOKEN, 5.0, local=True)
    _, theirs = await host.arrivals.get()
    assert sock.family == theirs.family == socket.AF_INET
    assert impostor.arrivals.empty()
    sock.close()
    theirs.close()
    await impostor.listener.close()
    await host.listener.close()
    name.close()


async def test_equal_ports_on_two_hosts_lead_no_process_to_itself(caplog):
    """The dialler listens at the port that the address of the other host has."""
    dialler, host = ListeningHost("r1"), ListeningHost("r0")
    await dialler.listener.start("127.0.0.1", local=True)
    port = dialler.listener.address[1]
    await host.listener.start("127.0.0.2", (port,))
    sock = await dial(f"127.0.0.2:{port}", greeting("r0"), TOKEN, 5.0, local=True)
    _, theirs = await host.arrivals.get()
    assert dialler.arrivals.empty() and not caplog.records, "nothing reached the dialler's own listener"
    sock.close()
    theirs.close()
    await dialler.listener.close()
    await host.listener.close()


async def test_a_wrong_token_is_refused_as_on_any_link():
    host = ListeningHost()
    await host.listener.start("127.0.0.1", local=True)
    with pytest.raises(Unauthorized):
        await dial(host.address, greeting(), b"another", 5.0, local=True)
    assert host.arrivals.empty()
    await host.listener.close()


def test_a_name_is_taken_once_and_free_when_its_listener_is_closed():
    one = listen_locally(NAME)
    assert one is not None
    assert listen_locally(NAME) is None
    sock = connect_locally(NAME)
    assert sock is not None
    sock.close()
    one.close()
    assert connect_locally(NAME) is None


def test_another_users_process_is_refused(monkeypatch):
    one, two = socket.socketpair()
    check_user(one)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(Refused, match="belongs to user"):
        check_user(one)
    one.close()
    two.close()
