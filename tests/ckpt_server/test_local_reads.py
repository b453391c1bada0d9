"""A fetch reads the memory of a checkpoint server on the same host: verified, for the same user only, with
the token.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from etcd_process import wait_until
from server_support import (
    DEADLINE_S,
    ROOT,
    TOKEN,
    end,
    fetch,
    held_ranks,
    manifest_of,
    publish,
    snapshot_file,
    start_server,
    wait_for,
)

from fabric.ckpt_server.fetch import multi_source
from fabric.ckpt_server.fetch.fetcher import StateFetcher
from fabric.ckpt_server.fetch.http_source import HttpAddress
from fabric.ckpt_server.fetch.multi_source import HostMemory
from fabric.ckpt_server.server.slots import SNAPSHOT, snapshot_content
from fabric.ckpt_server.server.unix_sockets import LocalReadServer
from fabric.ckpt_server.wire.channel_protocol import LOG_NAME, local_socket_name
from fabric.errors import Gone, IntegrityError, StateError
from fabric.model import SnapshotRef

NBYTES = 30_000_000
FILE = snapshot_file(NBYTES)
STATE = SnapshotRef(1, 40, manifest_of(FILE, 40)["digest"])


def fetched(fetcher, urls, target):
    return fetcher.fetch_state(urls, STATE, lambda _: memoryview(target))


def serves(url, nbytes):
    """Wait until the server has counted ``nbytes`` as served, just after a reader has them."""
    wait_until(lambda: served_bytes(url) == nbytes, f"{nbytes} served bytes")


def served_bytes(url):
    found = re.search(rb'served_bytes_total\{kind="snapshot"\} (\S+)', fetch(url, "/metrics").body)
    assert found
    return float(found[1])


def readers(url):
    return sum(slot["readers"] for slot in fetch(url, "/debug/state").json["slots"])


def place(handle):
    return HttpAddress.parse(handle.url).place


@pytest.fixture
def holder(attach):
    handle = attach()
    publish(handle, 0, FILE, 40)
    return handle


def test_a_state_on_this_host_is_read_without_the_network_unless_that_is_switched_off(holder):
    target, fetcher = bytearray(len(FILE)), StateFetcher()
    found = fetched(fetcher, [holder.url], target)
    assert bytes(target) == FILE
    assert found.sources == {holder.url: len(FILE)}
    assert found.compression == "plain: read from shared memory, over this host's socket"
    assert served_bytes(holder.url) == 0
    wait_for(lambda: readers(holder.url) == 0, "the end of the reading")
    fetcher.same_host = False
    again = bytearray(len(FILE))
    assert "shared memory" not in fetched(fetcher, [holder.url], again).compression
    assert bytes(again) == FILE
    serves(holder.url, len(FILE))
    fetcher.close()


@pytest.mark.parametrize("over_the_network", [False, True])
def test_a_state_fetched_from_this_host_is_held_in_memory_once(holder, over_the_network):
    target, fetcher = memoryview(bytearray(len(FILE))), StateFetcher()
    fetcher.same_host = not over_the_network
    tracemalloc.start()
    fetcher.fetch_state([holder.url], STATE, lambda _: target)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20, "of 30 MB"
    fetcher.close()


def test_a_source_on_this_host_is_asked_first_and_the_other_sources_when_it_fails(
    holder, tmp_path, monkeypatch
):
    other = start_server(tmp_path / "other", replica="r1")
    publish(other, 0, FILE, 40)
    monkeypatch.setattr(
        HostMemory,
        "find",
        classmethod(lambda cls, at, *a, find=HostMemory.find: find(at, *a) if at == here else None),
    )
    here = place(holder)
    target = bytearray(len(FILE))
    found = fetched(StateFetcher(), [other.url, holder.url], target)
    assert found.sources == {other.url: 0, holder.url: len(FILE)}
    # The source on the same host is damaged: its memory no longer matches its manifest.
    holder.allocate("snapshot", 0, len(FILE))[20_000_000] ^= 1
    target = bytearray(len(FILE))
    found = fetched(StateFetcher(), [other.url, holder.url], target)
    assert bytes(target) == FILE
    assert found.sources[other.url] > 0
    assert any("wrong bytes" in warning and holder.url in warning for warning in found.warnings)
    other.close()
    end(other.pid)


def test_wrong_bytes_in_shared_memory_are_refused(holder):
    holder.allocate("snapshot", 0, len(FILE))[-1] ^= 1
    with pytest.raises(IntegrityError, match="wrong bytes"):
        fetched(StateFetcher(), [holder.url], bytearray(len(FILE)))


def test_a_slot_that_is_withdrawn_and_written_while_it_is_read(holder, monkeypatch):
    """The trainer rewrites the slot in the middle of a block, so the reader has half of each state and must
    refuse it.
    """
    pieces = []

    def read(memory, into, at, read=HostMemory.read):
        read(memory, into, at)
        pieces.append(len(into))
        if len(pieces) == 3:
            holder.begin("snapshot", 0)
            holder.allocate("snapshot", 0, len(FILE))[:] = b"\xee" * len(FILE)

    monkeypatch.setattr(HostMemory, "read", read)
    target = bytearray(len(FILE))
    with pytest.raises(Gone, match="409"):
        fetched(StateFetcher(streams_per_source=1), [holder.url], target)
    assert len(pieces) >= 3


def test_the_slot_counts_as_read_until_the_reader_ends(holder):
    memory = HostMemory.find(place(holder), STATE, "", len(FILE))
    assert memory is not None and memory.still_there()
    assert readers(holder.url) == 1
    assert holder.begin("snapshot", 0, unless_read=True) is False
    assert memory.still_there()
    memory.close()
    wait_for(lambda: holder.begin("snapshot", 0, unless_read=True), "the reader's end")


def test_a_reader_cannot_write(holder):
    memory = HostMemory.find(place(holder), STATE, "", len(FILE))
    assert memory is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(memory._descriptors[0], b"x", 0)
    memory.close()


def test_a_reader_keeps_the_memory_of_a_server_that_is_killed_during_the_read(holder, monkeypatch):
    def read(memory, into, at, read=HostMemory.read):
        if holder.pid:
            end(holder.pid)
            holder.pid = 0
        read(memory, into, at)

    monkeypatch.setattr(HostMemory, "read", read)
    monkeypatch.setattr(multi_source, "streams_per_source", lambda *_: 1)
    target = bytearray(len(FILE))
    with pytest.raises(
        StateError
    ):  # after the first range the source is gone, so the remaining ranges have no source
        StateFetcher(range_bytes=8 << 20).fetch_state([holder.url], STATE, lambda _: memoryview(target))
    assert target[: 8 << 20] == FILE[: 8 << 20]


@pytest.mark.parametrize("state", [SnapshotRef(1, 41, STATE.digest), SnapshotRef(1, 40, "0" * 32)])
def test_a_request_for_another_state_gets_no_memory(holder, state):
    assert HostMemory.find(place(holder), state, "", len(FILE)) is None
    assert HostMemory.find(place(holder), STATE, "", len(FILE) * 2) is None


def test_a_local_read_needs_the_token(attach, tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    handle = attach(token_file=token)
    publish(handle, 0, FILE, 40)
    assert HostMemory.find(place(handle), STATE, "wrong", len(FILE)) is None
    assert HostMemory.find(place(handle), STATE, "", len(FILE)) is None
    memory = HostMemory.find(place(handle), STATE, TOKEN, len(FILE))
    assert memory is not None
    memory.close()


_ASK = """
import os, sys
sys.path.insert(0, sys.argv[1])
from fabric.ckpt_server.fetch.multi_source import HostMemory
from fabric.model import SnapshotRef
os.setresuid(65534, 65534, 65534)
kernel_says, os.geteuid = os.geteuid(), lambda: 0  # it would not even ask as somebody else
found = HostMemory.find(sys.argv[2], SnapshotRef(1, 40, sys.argv[3]), "", 1)
print(kernel_says, found)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_is_shown_nothing(holder):
    arguments = [str(ROOT), place(holder), STATE.digest]
    done = subprocess.run(
        [sys.executable, "-c", _ASK, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "65534 None\n"
    assert HostMemory.find(place(holder), STATE, "", len(FILE)) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_token_is_not_shown_to_another_users_process():
    listener = "127.0.0.1:1"
    script = (
        "import os, socket, sys; os.setresuid(65534, 65534, 65534); s = socket.socket(socket.AF_UNIX);"
        "s.bind(sys.argv[1].replace('@', chr(0))); s.listen(); print('ready', flush=True);"
        "print(s.accept()[0].recv(1000))"
    )
    name = local_socket_name(listener).replace("\0", "@")
    process = subprocess.Popen([sys.executable, "-c", script, name], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert HostMemory.find(listener, STATE, "secret", 1) is None
        assert process.stdout.readline() == "b''\n"


def test_a_socket_name_taken_by_another_process_disables_local_reads_alone(attach, run_dir):
    ports = range(28700, 28740)
    with contextlib.ExitStack() as stack:
        for port in ports:
            taker = stack.enter_context(socket.socket(socket.AF_UNIX))
            taker.bind(local_socket_name(f"127.0.0.1:{port}"))
        handle = attach(port=f"{ports[0]}-{ports[-1]}")
        publish(handle, 0, FILE, 40)
        target = bytearray(len(FILE))
        fetched(StateFetcher(), [handle.url], target)
        assert bytes(target) == FILE
        serves(handle.url, len(FILE))
    log = (run_dir / LOG_NAME).read_text()
    assert log.count("they read over HTTP") == 1 and "Traceback" not in log


@pytest.mark.parametrize(
    "asked", [b"no JSON\n", b"{}\n", b'{"generation":1,"step":-1,"digest":1,"token":""}\n', b"x" * 100_000]
)
def test_a_malformed_local_request_is_refused_and_the_next_request_is_served(holder, asked):
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(20)
        line.connect(local_socket_name(place(holder)))
        try:
            line.sendall(asked)
            answer = line.recv(65536)
        except ConnectionError:
            answer = b""
        assert answer == b"" or b'"ok":false' in answer
    memory = HostMemory.find(place(holder), STATE, "", len(FILE))
    assert memory is not None
    memory.close()


def test_a_stopped_reader_does_not_keep_a_slot_that_is_needed(holder):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from fabric.ckpt_server.fetch.multi_source import HostMemory\n"
        "from fabric.model import SnapshotRef\n"
        "found = HostMemory.find(sys.argv[2], SnapshotRef(1, 40, sys.argv[3]), '', 1)\n"
        "print('reads', flush=True); sys.stdin.read(); print(found.still_there(), flush=True)\n"
    )
    arguments = [str(ROOT), place(holder), STATE.digest]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "reads\n"
        process.send_signal(signal.SIGSTOP)
        assert holder.begin("snapshot", 0) is True
        process.send_signal(signal.SIGCONT)
        process.stdin.close()
        assert process.stdout.readline() == "False\n"


def test_a_server_without_local_reads_is_asked_over_http(holder, monkeypatch):
    monkeypatch.setattr(multi_source, "local_socket_name", lambda where: f"\0fabric-no-such-name-{where}")
    target = bytearray(len(FILE))
    fetched(StateFetcher(), [holder.url], target)
    assert bytes(target) == FILE
    serves(holder.url, len(FILE))


def test_a_reader_that_says_nothing_is_cut_off(tmp_path):
    async def scene():
        ranks = held_ranks(tmp_path)
        memory = ranks.held[0].slots
        slot = memory.slot(SNAPSHOT, 0)
        region = await memory.allocate(slot, len(FILE))
        os.pwrite(region.fd, FILE, 0)
        memory.publish(slot, snapshot_content(manifest_of(FILE, 40), region.view, "job", "http://x:1"))
        async with LocalReadServer(ranks.held, None, stall_s=0.1).open("x:1"):
            found = await asyncio.to_thread(HostMemory.find, "x:1", STATE, "", len(FILE))
            assert found is not None
            async with asyncio.timeout(DEADLINE_S):
                await slot.released.wait()
            assert not slot.readers and not found.still_there()
            found.close()
        memory.close()

    asyncio.run(scene())


def memory_files():
    """Return this process's open descriptors of shared memory; other tests may close theirs at any moment."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "memfd:fabric" in str(link.readlink()):
                found.add((link.name, link.stat().st_ino))
    return found


def test_fetches_and_refusals_leave_no_memory_file_open(holder):
    before = memory_files()
    fetcher = StateFetcher()
    for _ in range(3):
        fetched(fetcher, [holder.url], bytearray(len(FILE)))
        assert HostMemory.find(place(holder), SnapshotRef(1, 41, ""), "", 1) is None
        assert HostMemory.find(place(holder), STATE, "", len(FILE) * 2) is None
    assert memory_files() <= before
    fetcher.close()
