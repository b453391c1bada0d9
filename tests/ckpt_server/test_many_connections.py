"""Hundreds of connections from a client without a token block no request to a checkpoint server."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from server_support import ROOT, TOKEN, fetch, publish, snapshot_file, wait_for

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.wire.channel_protocol import SOCKET_NAME

NBYTES = 300_000
# The server may raise its limit of descriptors from HAS to MAY.
MAY, HAS = 256, 128


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    return file


@pytest.fixture
def narrow_server(run_dir: Path, token_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server with few descriptors, which the trainer finds by the run folder."""
    command = [sys.executable, "-m", "fabric.ckpt_server", "--job=job", "--replica=r0", "--orphan-s=60"]
    command += [f"--run-dir={run_dir}", f"--token-file={token_file}"]
    limited = ["sh", "-c", f'ulimit -Sn {HAS} && ulimit -Hn {MAY} && exec "$@"', "sh", *command]
    server = subprocess.Popen(limited, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: (run_dir / SOCKET_NAME).exists(), "the server")
        yield server
    finally:
        server.kill()
        server.wait()


def stand_idle(url: str, says: bytes, stack: ExitStack, count: int = 600) -> None:
    """Open more connections than the server has descriptors, and send no request on them."""
    place = urlsplit(url)
    assert place.hostname and place.port
    for number in range(count):
        # Connect from several addresses: the share of one address alone does not protect the server.
        one = socket.create_connection((place.hostname, place.port), 30, (f"127.0.0.{number % 8 + 2}", 0))
        stack.callback(one.close)
        one.sendall(says)


def test_a_thousand_idle_connections_cut_off_no_request(narrow_server, run_dir, token_file, attach):
    handle: ServerHandle = attach(token_file=token_file)
    publish(handle, 0, snapshot_file(NBYTES), 1)
    asked = {"Authorization": f"Bearer {TOKEN}"}
    with ExitStack() as stack:
        for says in (b"", b"GET /healthz HT"):
            stand_idle(handle.url, says, stack)
            assert fetch(handle.url, "/healthz").json == {"ok": True}
            assert fetch(handle.url, "/v1/snapshots/latest/data", **asked).body == snapshot_file(NBYTES)
        # The trainer can still publish, and so can the next trainer.
        publish(handle, 1, snapshot_file(NBYTES, 2), 2)
        handle.close()
        second = attach(token_file=token_file, incarnation=2)
        assert [state.step for state in second.snapshots] == [1, 2]
        text = fetch(handle.url, "/metrics").body.decode()
    numbers = {name: float(value) for name, value in re.findall(r"^(\S+) (\S+)$", text, re.MULTILINE)}
    assert numbers["fabric_ckpt_http_connections_limit"] < MAY
    assert numbers['fabric_ckpt_http_connections_refused_total{why="idle"}'] > 1000
    assert numbers['fabric_ckpt_http_connections_refused_total{why="full"}'] == 0
