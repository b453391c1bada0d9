"""A service's messages to systemd: ready, alive, and none where systemd wants none."""

import asyncio
import socket
from pathlib import Path

import pytest

from fabric.runtime.config import Supervisor, supervisor

DEADLINE_S = 60


@pytest.fixture
def systemd(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "notify"))
        line.settimeout(DEADLINE_S)
        yield line


@pytest.mark.parametrize("name", ["", "@"], ids=["a path", "an abstract name"])
def test_systemd_receives_a_state(tmp_path, name):
    place = f"@fabric-test-{tmp_path}" if name else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(place.replace("@", "\0"))
        line.settimeout(DEADLINE_S)
        Supervisor(place).tell("READY=1")
        assert line.recv(100) == b"READY=1"


async def test_the_watchdog_message_is_repeated(systemd):
    showing = asyncio.create_task(Supervisor(systemd.getsockname(), watchdog_s=0.03).show_life())
    for _ in range(3):
        assert await asyncio.to_thread(systemd.recv, 100) == b"WATCHDOG=1"
    showing.cancel()


async def test_without_a_watchdog_nothing_is_sent():
    await Supervisor("/nowhere", 0.0).show_life()
    await Supervisor("", 30.0).show_life()


def test_a_supervisor_that_is_gone_is_a_line_in_the_log(tmp_path, caplog):
    Supervisor(str(tmp_path / "gone")).tell("READY=1")
    assert "did not receive READY=1" in caplog.text


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, Supervisor()),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "30000000"}, Supervisor("/n", 30.0)),
        ({"NOTIFY_SOCKET": "/n"}, Supervisor("/n")),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "soon"}, Supervisor("/n")),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "9" * 5000}, Supervisor("/n")),
    ],
)
def test_the_supervisor_is_configured_from_the_environment(environment, found):
    assert supervisor(environment) == found
