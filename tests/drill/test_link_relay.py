"""The relay forwards bytes, and plays a cut, a delay, a flipped bit and a lost connection."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest

from fabric.drill.injection.link_relay import LinkRelay, LinkWeather
from fabric.drill.injection.played_faults import PlayedFault
from fabric.drill.run.started_faults import SCRIPTS
from fabric.drill.schedule.drill_schedule import ScheduledFault
from fabric.errors import ConfigError

HOST = "127.77.99.1"
LARGE = bytes(range(256)) * 16
GREETING = b'....{"job":"j","replica":"r0","incarnation":1}'


class Echo:
    """A server that sends back all that it gets."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(sock,), daemon=True).start()

    @staticmethod
    def _echo(sock: socket.socket) -> None:
        with sock:
            try:
                while data := sock.recv(1 << 16):
                    sock.sendall(data)
            except OSError:
                return

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def weathers() -> dict[str, LinkWeather]:
    return {"r0": LinkWeather(), "r1": LinkWeather()}


@pytest.fixture
def relay(weathers: dict[str, LinkWeather]) -> Iterator[LinkRelay]:
    """The relay in front of r1."""
    with closing(Echo()) as echo, closing(LinkRelay(HOST, {0: echo.port}, "r1", weathers)) as relay:
        yield relay


def dial(relay: LinkRelay) -> socket.socket:
    sock = socket.create_connection((HOST, relay.ports[0]), timeout=20)
    sock.settimeout(20)
    return sock


def receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := sock.recv(count - len(data))):
        data += more
    return data


def is_silent(sock: socket.socket) -> bool:
    sock.settimeout(0.2)
    try:
        return not sock.recv(1)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(20)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_a_fault_every_byte_passes_both_ways(relay: LinkRelay):
    with dial(relay) as sock:
        sock.sendall(LARGE * 8)
        assert receive(sock, len(LARGE) * 8) == LARGE * 8
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""


@pytest.mark.parametrize("direction", ["holds_to", "holds_from"])
def test_a_cut_holds_bytes_back_and_loses_none(relay: LinkRelay, direction: str):
    with dial(relay) as sock:
        setattr(relay.weather, direction, True)
        sock.sendall(LARGE)
        until(lambda: relay.weather.held)
        assert is_silent(sock)
        relay.weather.clear()
        assert receive(sock, len(LARGE)) == LARGE


@pytest.mark.parametrize("direction", ["holds_to", "holds_from"])
def test_a_cut_of_the_dialler_holds_the_connection_that_its_greeting_names(
    relay: LinkRelay, weathers: dict[str, LinkWeather], direction: str
):
    with dial(relay) as named, dial(relay) as other:
        named.sendall(GREETING)
        assert receive(named, len(GREETING)) == GREETING
        setattr(weathers["r0"], direction, True)
        named.sendall(LARGE)
        until(lambda: weathers["r0"].held)
        assert is_silent(named)
        other.sendall(LARGE)
        assert receive(other, len(LARGE)) == LARGE
        weathers["r0"].clear()
        assert receive(named, len(LARGE)) == LARGE


def test_a_slow_link_delays_each_piece(relay: LinkRelay):
    with dial(relay) as sock:
        relay.weather.delay_s = 0.1
        begun = time.monotonic()
        sock.sendall(b"one")
        assert receive(sock, 3) == b"one"
        assert time.monotonic() - begun >= 0.1
        assert relay.weather.delayed == 1


def test_one_bit_of_one_large_piece_is_flipped(relay: LinkRelay):
    with dial(relay) as sock:
        relay.weather.flips = True
        sock.sendall(b"short")
        assert receive(sock, 5) == b"short"
        sock.sendall(LARGE)
        changed = receive(sock, len(LARGE))
        assert sum((a ^ b).bit_count() for a, b in zip(changed, LARGE, strict=True)) == 1
        sock.sendall(LARGE)
        assert receive(sock, len(LARGE)) == LARGE
        assert relay.weather.flipped == 1


def test_a_lossy_link_ends_the_oldest_connection(relay: LinkRelay):
    assert not relay.reset_one()
    with dial(relay) as first, dial(relay) as second:
        for sock in (first, second):
            sock.sendall(b"x")
            assert receive(sock, 1) == b"x"
        assert relay.reset_one()
        assert first.recv(1) == b""
        second.sendall(b"y")
        assert receive(second, 1) == b"y"


def test_a_relay_without_a_server_behind_it_closes_the_connection(weathers: dict[str, LinkWeather]):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with closing(LinkRelay(HOST, {0: port}, "r1", weathers)) as relay, dial(relay) as sock:
        assert sock.recv(1) == b""


def test_a_taken_address_is_one_sentence(relay: LinkRelay, weathers: dict[str, LinkWeather]):
    with pytest.raises(ConfigError, match=f"cannot listen at {HOST}"):
        LinkRelay(HOST, {relay.ports[0]: 1}, "r1", weathers)


def test_closing_ends_every_connection(relay: LinkRelay, caplog: pytest.LogCaptureFixture):
    with dial(relay) as sock:
        sock.sendall(b"x")
        assert receive(sock, 1) == b"x"
        relay.close()
        assert sock.recv(1) == b""
    assert not caplog.records


class Relay:
    """Stands for a relay: counts the connections that it is told to reset."""

    def __init__(self) -> None:
        self.weather = LinkWeather()

    def reset_one(self) -> None:
        self.weather.reset += 1


@pytest.mark.parametrize(
    ("name", "changes", "count", "evidence"),
    [
        ("cut-peers", {"holds_to": True, "holds_from": True}, "held", "the relay held 2 pieces"),
        ("cut-in", {"holds_to": True}, "held", "the relay held 2 pieces"),
        ("cut-lighthouse", {"holds_to": True, "holds_from": True}, "held", "the relay held 2 pieces"),
        ("slow-link", {"delay_s": 0.05}, "delayed", "the relay delayed 2 pieces"),
        ("flip-payload", {"flips": True}, "flipped", "the relay flipped 2 bits"),
        ("lossy-link", {}, "", "the relay reset 1 connections"),
    ],
)
def test_a_fault_of_a_link_changes_the_weather_until_its_end(name, changes, count, evidence):
    here, other = Relay(), Relay()
    relays = {"relays": {"r1": here}, "lighthouse_relays": {"r1": other}}
    if name == "cut-lighthouse":
        here, other = other, here
    here.weather.held = here.weather.delayed = here.weather.flipped = here.weather.reset = 5
    calm = LinkWeather()
    fault = PlayedFault(name)
    scene = SimpleNamespace(job=SimpleNamespace(**relays))
    fault.script = SCRIPTS[name](scene, fault, ScheduledFault(name, "r1"))
    fault.look()
    if count:
        assert not fault.observed
        setattr(here.weather, count, 7)
        fault.look()
    assert fault.observed == evidence and fault.targets == ("r1",)
    faults = ("holds_to", "holds_from", "delay_s", "flips")
    assert {x: getattr(here.weather, x) for x in faults} == {x: getattr(calm, x) for x in faults} | changes
    assert {x: getattr(other.weather, x) for x in faults} == {x: getattr(calm, x) for x in faults}
    fault.end()
    assert {x: getattr(here.weather, x) for x in faults} == {x: getattr(calm, x) for x in faults}
    assert fault.undone == "the relay forwards again"
