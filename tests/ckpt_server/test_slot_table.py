"""A slot is published or withdrawn, never half-written; readers cost no memory; errors name the limits."""

import contextlib
import http.client
import re
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from server_support import (
    connect,
    fetch,
    manifest_of,
    publish,
    publish_gradient,
    snapshot_file,
    wait_for,
)

from fabric.ckpt_server.fetch.multi_source import HostMemory
from fabric.ckpt_server.wire.gradient_index import PublishedGradient
from fabric.errors import FabricError, ProtocolError, Refused
from fabric.model import SnapshotRef
from fabric.runtime.system_calls import available_bytes

NBYTES = 40_000_000


class SlowReader:
    """A client that requests the data and reads only when the test says so."""

    def __init__(self, url: str, path: str, buffer_bytes: int = 65536) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self._socket.settimeout(20)
        self._socket.connect((host, int(port)))
        self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        self.body = b""
        while b"\r\n\r\n" not in self.body:
            self.body += self._socket.recv(4096)
        head, _, self.body = self.body.partition(b"\r\n\r\n")
        found = re.search(rb"Content-Length: (\d+)", head)
        assert found
        self.promised = int(found[1])

    def read_rest(self) -> bytes:
        """Read until the connection ends, in whatever way."""
        parts = [self.body]
        with contextlib.suppress(ConnectionError):
            while sum(map(len, parts)) < self.promised and (data := self._socket.recv(1 << 20)):
                parts.append(data)
        self._socket.close()
        return b"".join(parts)


def active(url: str) -> int:
    return sum(slot["readers"] for slot in fetch(url, "/debug/state").json["slots"])


def test_a_withdrawn_slot_ends_its_readers_and_they_never_see_what_is_written_next(attach):
    handle = attach()
    file = snapshot_file(NBYTES)
    publish(handle, 0, file, 1)
    readers = [SlowReader(handle.url, "/v1/snapshots/1/data") for _ in range(3)]
    assert active(handle.url) == 3
    assert handle.begin("snapshot", 0) is True
    handle.allocate("snapshot", 0, len(file))[:] = b"\xee" * len(file)
    assert active(handle.url) == 0
    for reader in readers:
        got = reader.read_rest()
        assert len(got) < reader.promised
        assert got == file[: len(got)]
    assert fetch(handle.url, "/v1/snapshots/1/data").status == 409
    text = fetch(handle.url, "/metrics").body.decode()
    assert 'fabric_ckpt_aborted_transfers_total{kind="snapshot"} 3.0' in text


def test_a_reader_of_a_withdrawn_snapshot_is_refused_and_does_not_get_the_older_one(attach):
    handle = attach()
    for slot, step in ((0, 1), (1, 2)):
        publish(handle, slot, snapshot_file(1 << 20, step), step)
    told = fetch(handle.url, "/v1/snapshots/latest/manifest").json
    tag = fetch(handle.url, "/v1/snapshots/latest/data").headers["ETag"]
    place, state = urlsplit(handle.url).netloc, SnapshotRef(told["generation"], 2, told["digest"])
    near = HostMemory.find(place, state, "", told["nbytes"])
    assert near is not None
    near.close()
    handle.begin("snapshot", 1)
    path = told["url"].removeprefix(handle.url)
    for answer in (fetch(handle.url, path), fetch(handle.url, "/v1/snapshots/2/manifest")):
        assert (answer.status, answer.json["gone"], answer.json["available"]) == (409, True, [1])
    # A reader of "latest" sends the snapshot's tag; the server refuses to send the older snapshot instead.
    assert fetch(handle.url, "/v1/snapshots/latest/data", If_Match=tag).status == 412
    assert HostMemory.find(place, state, "", told["nbytes"]) is None


def test_a_reader_sees_one_step_whole_or_less_while_the_slot_is_rewritten_all_the_time(attach):
    """Every byte of step n is n, so a mixture of two steps would show. Small answers fit into the transport's
    buffers.
    """
    handle = attach()
    size = 200_000
    memory = handle.allocate("gradient", 0, size)
    stop = threading.Event()
    whole: list[int] = []
    torn: list[bytes] = []

    def read() -> None:
        connection = connect(handle.url)
        while not stop.is_set():
            try:
                connection.request("GET", f"/v1/gradients/{len(whole) % 2}")
                response = connection.getresponse()
                body = response.read()
            except (http.client.HTTPException, OSError):
                connection.close()
                continue
            if response.status == 200:
                whole.append(body[0])
                if body != body[:1] * size:
                    torn.append(body)
        connection.close()

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    written = 0
    try:
        while (written < 200 or len(whole) < 100) and not torn:
            written += 1
            handle.begin("gradient", 0)
            memory[:] = bytes([written % 251]) * size
            handle.publish_gradient(0, PublishedGradient(1, written % 2, 1, size, "", 1.0, ""), {})
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not torn


def test_an_answer_that_counts_as_sent_refers_to_the_memory_no_more(attach):
    """The end of an answer that does not fit into the kernel's buffers could still wait in the server's
    buffer. The test scans the size that fits by changing the reader's buffer.
    """
    handle = attach()
    size = (4 << 20) + 131071  # the last piece is small, and the server sends small pieces in another way
    memory = handle.allocate("gradient", 0, size)
    for received in range(16, 160, 4):
        handle.begin("gradient", 0)
        memory[:] = b"\x01" * size
        handle.publish_gradient(0, PublishedGradient(1, 1, 1, size, "", 1.0, ""), {})
        reader = SlowReader(handle.url, "/v1/gradients/1", received * 1024)
        sent = active(handle.url) == 0
        handle.begin("gradient", 0)
        memory[:] = b"\x02" * size
        got = reader.read_rest()
        assert got == b"\x01" * len(got), f"torn with a buffer of {received} KiB"
        assert len(got) == size or not sent


def test_begin_unless_read_leaves_a_slot_that_has_readers(attach):
    handle = attach()
    file = snapshot_file(NBYTES)
    publish(handle, 0, file, 1)
    publish(handle, 1, snapshot_file(1000), 2)
    reader = SlowReader(handle.url, "/v1/snapshots/1/data")
    assert handle.begin("snapshot", 0, unless_read=True) is False
    assert handle.begin("snapshot", 1, unless_read=True) is True
    assert reader.read_rest() == file
    # A fetch pauses between two ranges; when the pause is too long, the slot is free again.
    wait_for(lambda: handle.begin("snapshot", 0, unless_read=True), "the reader's end")
    assert fetch(handle.url, "/v1/snapshots").json == []


def resident_anonymous(pid: int) -> int:
    """Return the KiB of a process's own memory, without shared memory."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    assert found
    return int(found[1])


def test_a_server_sends_a_slots_descriptor_only_after_allocating_its_memory(attach):
    handle = attach()

    def resident_shared():
        found = re.search(r"RssShmem:\s+(\d+) kB", Path(f"/proc/{handle.pid}/status").read_text())
        assert found
        return int(found[1]) * 1024

    before = resident_shared()
    lag = 1_000_000  # Linux counts pages for each processor and sums them up late
    handle.allocate("snapshot", 0, NBYTES)
    assert resident_shared() - before >= NBYTES - lag
    handle.allocate("snapshot", 0, 2 * NBYTES)
    assert resident_shared() - before >= 2 * NBYTES - lag


def test_slow_readers_cost_the_server_no_memory(attach):
    handle = attach()
    file = snapshot_file(NBYTES)
    publish(handle, 0, file, 1)
    assert fetch(handle.url, "/v1/snapshots/1/data").body == file
    before = resident_anonymous(handle.pid)
    readers = [SlowReader(handle.url, "/v1/snapshots/1/data") for _ in range(20)]
    assert active(handle.url) == 20
    assert resident_anonymous(handle.pid) - before < 10_000
    handle.begin("snapshot", 0)
    for reader in readers:
        reader.read_rest()


def test_void_withdraws_everything(attach):
    handle = attach()
    file = snapshot_file(NBYTES)
    publish(handle, 0, file, 5)
    publish_gradient(handle, 0, b"x", 5)
    reader = SlowReader(handle.url, "/v1/snapshots/latest/data")
    handle.void()
    assert len(reader.read_rest()) < len(file)
    assert fetch(handle.url, "/v1/snapshots").json == fetch(handle.url, "/v1/gradients").json == []
    # Members may redo a step, so the server must not call a withdrawn gradient "gone".
    assert fetch(handle.url, "/v1/gradients/4").json["gone"] is False
    publish_gradient(handle, 0, b"y", 4)
    assert fetch(handle.url, "/v1/gradients/4").body == b"y"


def test_a_published_slot_must_be_begun_before_it_is_published_again(attach):
    handle = attach()
    file = snapshot_file(1000)
    publish(handle, 0, file, 5)
    with pytest.raises(Refused, match="begin the slot before writing to it"):
        handle.publish_snapshot(0, manifest_of(file, 6))
    assert [s["step"] for s in fetch(handle.url, "/v1/snapshots").json] == [5]


def test_content_that_a_slot_cannot_hold_is_refused(attach):
    handle = attach()
    file = snapshot_file(100_000)
    manifest = manifest_of(file, 5)
    with pytest.raises(Refused, match="has no memory: allocate it first"):
        handle.publish_snapshot(0, manifest)
    handle.allocate("snapshot", 0, 1000)[:] = file[:1000]
    with pytest.raises(Refused, match="allocate it larger"):
        handle.publish_snapshot(0, manifest)
    memory = handle.allocate("snapshot", 0, len(file))
    with pytest.raises(Refused, match="damaged"):
        memory[:8] = bytes(8)
        handle.publish_snapshot(0, manifest)
    memory[:] = file
    with pytest.raises(Refused, match="of job 'other'"):
        handle.publish_snapshot(0, {**manifest, "job": "other"})
    with pytest.raises(Refused, match="blocks"):
        handle.publish_snapshot(0, {**manifest, "blocks": []})
    with pytest.raises(Refused, match="created"):
        handle.publish_snapshot(0, {**manifest, "created": "today"})
    with pytest.raises(ProtocolError, match="cannot be sent as JSON"):
        handle.publish_snapshot(0, {**manifest, "created": float("nan")})
    assert fetch(handle.url, "/v1/snapshots").json == []
    handle.publish_snapshot(0, manifest)
    assert fetch(handle.url, "/v1/snapshots/5/data").body == file


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"layout": "a\r\nX-Evil: 1"}, "layout is not one printable word"),
        ({"meta": {"long": "x" * 70_000}}, "at most 60000 are served"),
        ({"epoch": -1}, "epoch is negative"),
        ({"weight": "1"}, "weight must be a number"),
    ],
)
def test_gradients_that_do_not_fit_into_headers_are_refused(served, others, sentence):
    handle = served
    handle.void()
    with pytest.raises(Refused, match=sentence):
        publish_gradient(handle, 0, b"abc", 1, **others)
    assert fetch(handle.url, "/v1/gradients").json == []
    publish_gradient(handle, 0, b"", 1, meta={"line": "a\nb\u00e9"})
    assert fetch(handle.url, "/v1/gradients/1").body == b""


def test_a_gradient_may_be_published_and_the_slot_of_the_next_begun_in_one_request(attach):
    handle = attach()
    for slot in (0, 1):
        publish_gradient(handle, slot, b"abc", slot)
    publish_gradient(handle, 2, b"abc", 2, then_begin=0)
    assert [row["step"] for row in fetch(handle.url, "/v1/gradients").json] == [1, 2]
    with pytest.raises(Refused, match="begin the slot before writing to it"):
        handle.publish_gradient(1, PublishedGradient(1, 3, 1, 1, "d", 1, "l"), {}, then_begin=2)
    assert [row["step"] for row in fetch(handle.url, "/v1/gradients").json] == [1, 2]


def test_a_waiting_reader_gets_the_gradient_when_it_is_published(attach):
    handle = attach()
    publish_gradient(handle, 0, b"one", 1)
    answers = {}

    def wait(step: int) -> None:
        answers[step] = fetch(handle.url, f"/v1/gradients/{step}?generation=1&wait_s=30")

    threads = [threading.Thread(target=wait, args=(step,)) for step in (2, 3)]
    for thread in threads:
        thread.start()
    publish_gradient(handle, 1, b"two", 2)
    threads[0].join()
    assert answers[2].body == b"two"
    # After this gradient, step 3 cannot come in this generation any more.
    publish_gradient(handle, 2, b"four", 4)
    threads[1].join()
    assert (answers[3].status, answers[3].json["gone"]) == (409, True)


def test_slots_keep_their_memory_and_grow_in_place(attach):
    handle = attach()
    file = snapshot_file(50_000)
    publish(handle, 0, file, 5)
    first = handle.allocate("snapshot", 0, 10)
    again = attach()
    larger = again.allocate("snapshot", 0, 3_000_000)
    assert len(larger) == 3_000_000
    assert bytes(larger[: len(file)]) == file
    assert fetch(handle.url, "/v1/snapshots/5/data").body == file
    again.begin("snapshot", 0)
    larger[0] = 77
    assert first[0] == 77


def test_memory_that_is_not_there_is_refused_with_the_sizes(attach):
    handle = attach()
    with pytest.raises(
        Refused,
        match=r"snapshot slot 0 needs 4,194,304.0 MiB more .* and [\d,.]+ MiB are available on this host",
    ):
        handle.allocate("snapshot", 0, 1 << 42)
    assert len(handle.allocate("snapshot", 0, 1000)) == 1000


@pytest.mark.parametrize(
    ("kind", "slot", "nbytes"),
    [("snapshot", 8, 1), ("snapshot", -1, 1), ("gradient", 256, 1), ("other", 0, 1), ("snapshot", 0, 0)],
)
def test_impossible_slots_and_sizes_are_refused(served, kind, slot, nbytes):
    handle = served
    with pytest.raises(FabricError, match=r"slot|allocated"):
        handle.allocate(kind, slot, nbytes)


def test_no_memory_is_left_behind_under_a_name(attach):
    def named() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir() if "fabric" in path.name}

    before = named()
    handle = attach()
    publish(handle, 0, snapshot_file(1000), 5)
    assert named() == before


def test_available_memory_is_the_least_of_machine_and_cgroups(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:  8000 kB\n")
    inner = groups / "a/b"
    inner.mkdir(parents=True)
    assert available_bytes(proc, groups) == 8000 * 1024
    (proc / "self/cgroup").write_text("0::/a/b\n")
    for group, limit, used in ((groups / "a", "5000000", 1_000_000), (inner, "max", 900_000)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    assert available_bytes(proc, groups) == 5_000_000 - 1_000_000 + 200_000
    (inner / "memory.max").write_text("800000\n")
    assert available_bytes(proc, groups) == 800_000 - 900_000 + 200_000
    (inner / "memory.stat").write_text("")
    assert available_bytes(proc, groups) == 0
