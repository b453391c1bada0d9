"""A drill makes the kernel drop packets to this process's links, which work again when it ends."""

import socket
import threading
from contextlib import closing

import pytest

from fabric.client.process.drill_endpoint import DrillEndpoint, LinkDamage
from fabric.drill.injection.played_faults import SentOrder
from fabric.errors import Refused
from fabric.runtime.drill_orders import PointOrder
from fabric.transport import tcp

LIMIT_S = 30.0


@pytest.fixture
def pair(monkeypatch):
    """A TCP connection whose second end is this process's only link."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        near.settimeout(LIMIT_S)
        monkeypatch.setattr("fabric.client.process.drill_endpoint.open_links", lambda: [far])
        yield near, far


def test_a_cut_link_gets_nothing_until_the_end_and_then_all_that_was_sent(pair):
    near, far = pair
    damage, told, seen = LinkDamage(lost=1.0), [], threading.Event()
    near.sendall(b"while cut")
    damage.tell(lambda **body: (told.append(body), seen.set()))
    assert seen.wait(LIMIT_S), "the kernel counts what it drops"
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(100)
    damage.end()
    far.settimeout(LIMIT_S)
    assert far.recv(100) == b"while cut"
    assert told == [{"hit": "links", "step": 0, "about": "the kernel has dropped packets to its 1 links"}]


def test_a_lossy_link_delivers_everything_in_order(pair):
    near, far = pair
    far.settimeout(LIMIT_S)
    damage, seen = LinkDamage(lost=0.2), threading.Event()
    damage.tell(lambda **_: seen.set())
    number = 0
    while not seen.is_set():
        near.sendall(number.to_bytes(4, "big"))
        assert far.recv(4, socket.MSG_WAITALL) == number.to_bytes(4, "big")
        number += 1
    damage.end()


def test_a_trainer_without_tcp_links_refuses_with_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("fabric.client.process.drill_endpoint.open_links", list)
    tmp_path.chmod(0o700)
    with closing(DrillEndpoint(tmp_path)), pytest.raises(Refused, match="no TCP link to a peer"):
        SentOrder(tmp_path, PointOrder("drill", "links", "cut", 1.0))


def test_an_order_ends_with_its_drill(pair, tmp_path):
    near, far = pair
    tmp_path.chmod(0o700)
    with closing(DrillEndpoint(tmp_path)):
        sent = SentOrder(tmp_path, PointOrder("drill", "links", "cut", 60.0))
        near.sendall(b"while cut")
        sent.close()
        far.settimeout(LIMIT_S)
        assert far.recv(100) == b"while cut"


def test_a_link_is_known_to_drills_and_a_link_inside_the_host_is_not(pair):
    near, _ = pair
    inside, other = socket.socketpair()
    with inside, other:
        for link in (near, inside):
            tcp.tune(link, "data")
        assert near in tcp.open_links() and inside not in tcp.open_links()
