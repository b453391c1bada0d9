"""Transfers over TLS, which has another transport: whole states, and slow readers that are cut off."""

import socket
import ssl
from urllib.parse import urlsplit

import pytest
from authority import Authority
from server_support import manifest_of, publish, snapshot_file

from fabric.ckpt_server.fetch.fetcher import StateFetcher
from fabric.ckpt_server.fetch.http_source import HttpAccess, HttpAddress, HttpConnection, read_exactly
from fabric.ckpt_server.wire.compression import SHUFFLE
from fabric.model import SnapshotRef
from fabric.runtime.http.tls import Tls
from fabric.runtime.http.token_file import TokenFile

FILE = snapshot_file(21_000_001)


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Tls:
    return Authority(tmp_path_factory.mktemp("tls") / "ca").tls("r0")


def test_a_state_arrives_whole(attach, tls):
    handle = attach(tls_folder=tls.folder)
    assert handle.url.startswith("https://")
    publish(handle, 0, FILE, 7)
    state, memory = SnapshotRef(1, 7, manifest_of(FILE, 7)["digest"]), bytearray(len(FILE))
    fetcher = StateFetcher(ssl_context=tls.client_context())
    fetched = fetcher.fetch_state([handle.url], state, lambda _: memoryview(memory))
    assert memory == FILE and not fetched.warnings
    line = HttpConnection(
        HttpAddress.parse(handle.url), HttpAccess(TokenFile.of(""), 30.0, tls.client_context())
    )
    for coding in ("zstd", SHUFFLE):
        response = line.get("/v1/snapshots/7/data", coding=coding)
        assert response.getheader("Content-Encoding") == coding
        assert len(response.read()) > len(FILE) // 2
    small = memoryview(bytearray(10))
    read_exactly(line.get("/v1/snapshots/7/data", (5, 15)), small)
    assert small == FILE[5:15]
    line.close()


def test_a_reader_that_stops_reading_does_not_keep_the_slot(attach, tls):
    handle = attach(tls_folder=tls.folder)
    publish(handle, 0, FILE, 8)
    place = urlsplit(handle.url)
    context = tls.client_context()
    assert context is not None
    with (
        socket.create_connection((place.hostname, place.port)) as plain,
        context.wrap_socket(plain, server_hostname=place.hostname) as reader,
    ):
        reader.sendall(b"GET /v1/snapshots/8/data HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert reader.recv(100).startswith(b"HTTP/1.1 200")
        assert handle.begin("snapshot", 0, unless_read=True) is False
        assert handle.begin("snapshot", 0) is True, "it was cut off"
        handle.allocate("snapshot", 0, len(FILE))[:] = b"\xee" * len(FILE)
        taken = b""
        try:
            while data := reader.recv(1 << 20):
                taken += data
        except (ssl.SSLError, OSError):
            assert len(taken) < len(FILE)
        assert b"\xee" * 1000 not in taken and len(taken) < len(FILE)
