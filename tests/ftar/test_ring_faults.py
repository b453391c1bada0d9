"""The ring's handling of old, altered, foreign and missing bytes, and of an abort.

A *script* plays the previous (and next) member on raw sockets: it writes exactly the bytes that a faulty
or late member would.
"""

import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ring_harness import WAIT_S, RingMembers, coded, names, same_bits, socket_ring, tcp_pair, wait_until

from fabric.errors import RoundAborted
from fabric.ftar.chunk_headers import (
    FOLLOWS,
    GATHER,
    HEADER_BYTES,
    REDUCE,
    ChunkHeader,
    ExchangeSpec,
    notice,
    pack,
)
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.ftar.host.piece_moves import DIGEST_BYTES, digest
from fabric.ftar.host.shm_segments import OwnSegments
from fabric.ftar.plane import Ring
from fabric.ftar.reduce_ops import EXCHANGE_FORMS, Reduction
from fabric.ftar.ring_schedule import DTYPE_CODES

FLOAT = DTYPE_CODES[torch.float32]
# A chunk of 16 float32 on the wire.
SMALL_CHUNK_BYTES = HEADER_BYTES + 64 + DIGEST_BYTES


class ScriptedNeighbour:
    """Plays all other members of a ring of two or three for one real plane at position 0."""

    def __init__(self, world: int = 2, epoch: int = 5, form: str = "float32", **options) -> None:
        self.world, self.epoch, self.form = world, epoch, form
        ours_next, self.reader = tcp_pair()
        ours_previous, self.writer = tcp_pair()
        self.plane = CpuRing(**{"exchange_s": 5.0, **options})
        self.plane.install(Ring(epoch, 0, names(world)), ours_next, ours_previous)

    def __enter__(self) -> "ScriptedNeighbour":
        return self

    def __exit__(self, *_error: object) -> None:
        self.plane.close()
        self.reader.close()
        self.writer.close()

    def chunk(self, sequence: int, values: torch.Tensor, **changes) -> bytes:
        """A chunk as the previous member would send it for 32 float32 in a ring of two."""
        payload = bytes(values.numpy().data) if self.form == "float32" else coded(values, self.form)
        epoch, step = changes.get("epoch", self.epoch), changes.get("step", 3)
        fields = {
            "spec": ExchangeSpec(
                epoch,
                step,
                changes.get("exchange", 0),
                self.world,
                FLOAT,
                changes.get("length", 32),
                form=changes.get("form", EXCHANGE_FORMS[self.form]),
            ),
            "kind": changes.get("kind", GATHER if sequence else REDUCE),
            "source": changes.get("source", self.world - 1),
            "sequence": sequence,
            "size": changes.get("size", len(payload)),
        }
        return pack(ChunkHeader(**fields), FOLLOWS) + payload + digest(payload)

    def good(self) -> bytes:
        """Return all bytes that member 1 sends if its buffer is all ones: its part, then the sum."""
        return self.chunk(0, torch.ones(16)) + self.chunk(1, torch.full((16,), 3.0))

    def reduce(self) -> torch.Tensor:
        buffer = torch.full((32,), 2.0)
        reduction = Reduction(exchange=self.form, coarse=32)
        self.plane.all_reduce(self.epoch, 3, buffer, reduction=reduction)
        return buffer


FORMS = pytest.mark.parametrize("form", EXCHANGE_FORMS)


def close(result: torch.Tensor, form: str) -> bool:
    """Whether ``result`` is the sum that ``good`` leads to, exactly or as the form rounds it."""
    expected = torch.full((32,), 3.0)
    return same_bits(result, expected) if form == "float32" else torch.allclose(result, expected, rtol=1e-4)


@FORMS
def test_the_scripted_neighbour_can_complete_an_exchange(form):
    with ScriptedNeighbour(form=form) as script:
        script.writer.sendall(script.good())
        assert close(script.reduce(), form)


@pytest.mark.parametrize(
    "old", [{"epoch": 4}, {"step": 2}, {"epoch": 4, "step": 9}, {"epoch": 1, "length": 7}]
)
@FORMS
def test_chunks_of_an_old_round_are_recognised_and_never_added(old, form):
    with ScriptedNeighbour(form=form) as script:
        stale = script.chunk(0, torch.full((16,), 1e9), **old)
        size = len(script.good()) // 2
        script.writer.sendall(stale + stale + script.good()[:size])
        script.writer.sendall(stale + script.good()[size:])
        assert close(script.reduce(), form)


def test_a_flood_of_old_chunks_does_not_hold_off_the_deadline():
    with ScriptedNeighbour(entry_s=0.1, exchange_s=0.1) as script:
        stale = script.chunk(0, torch.zeros(16), epoch=1)
        script.writer.setblocking(False)

        stop = threading.Event()

        def flood() -> None:
            while not stop.is_set():
                try:
                    script.writer.send(stale)
                except BlockingIOError:
                    continue
                except OSError:
                    return

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            with pytest.raises(RoundAborted):
                script.reduce()
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"epoch": 6}, "of epoch 6, we are in exchange"),
        ({"step": 4}, "step 4 of epoch 5, we are"),
        ({"exchange": 1}, "exchange 1 of step 3"),
        ({"length": 33}, "models differ"),
        ({"form": EXCHANGE_FORMS["int8"]}, "FABRIC_EXCHANGE differs"),
        ({"source": 0}, "rings differ"),
        ({"kind": GATHER}, "was due"),
        ({"size": 0}, "announces 0 bytes"),
        ({"size": 2**31}, "chunk sizes differ"),
    ],
)
def test_chunks_that_do_not_belong_here_abort_and_name_the_sender(changes, sentence):
    with ScriptedNeighbour() as script:
        script.writer.sendall(script.chunk(0, torch.ones(16), **changes))
        with pytest.raises(RoundAborted, match=sentence) as aborted:
            script.reduce()
        assert aborted.value.about == "m1"


def test_a_chunk_of_another_size_is_refused():
    with ScriptedNeighbour() as script:
        script.writer.sendall(script.chunk(0, torch.ones(15)))
        with pytest.raises(RoundAborted, match="60 bytes"):
            script.reduce()


@FORMS
def test_any_flipped_bit_aborts_and_names_the_sender(form):
    with ScriptedNeighbour(form=form) as probe:
        stream = probe.good()
    for bit in range(0, len(stream) // 2 * 8, 3):
        with ScriptedNeighbour(form=form) as script:
            bad = bytearray(stream)
            bad[bit // 8] ^= 1 << bit % 8
            script.writer.sendall(bad)
            script.writer.shutdown(socket.SHUT_WR)
            with pytest.raises(RoundAborted) as aborted:
                script.reduce()
            assert aborted.value.about == "m1", bit


@FORMS
def test_a_flipped_bit_of_the_gathered_result_is_noticed_too(form):
    with ScriptedNeighbour(form=form) as script:
        bad = bytearray(script.good())
        bad[-5 - DIGEST_BYTES] ^= 4
        script.writer.sendall(bad)
        with pytest.raises(RoundAborted, match="digest"):
            script.reduce()


def received(sock: socket.socket, count: int) -> bytes:
    """Return ``count`` bytes, fewer only at the stream's end."""
    came = b""
    while len(came) < count and (data := sock.recv(count - len(came))):
        came += data
    return came


@pytest.mark.parametrize("altered", [False, True])
def test_a_sum_goes_on_while_its_piece_comes_and_gets_its_digest_only_if_the_piece_was_whole(altered):
    with ScriptedNeighbour(world=3) as script, ThreadPoolExecutor(1) as threads:
        script.reader.settimeout(WAIT_S)
        stream = bytearray(script.chunk(0, torch.ones(4096), length=3 * 4096))
        stream[-DIGEST_BYTES - 5] ^= altered
        own = torch.full((3 * 4096,), 2.0)
        future = threads.submit(script.plane.all_reduce, 5, 3, own, torch.zeros(3 * 4096))
        script.writer.sendall(stream[:-4096])
        received(script.reader, len(stream))
        begun = received(script.reader, HEADER_BYTES + 8000)
        script.writer.sendall(stream[-4096:])
        if not altered:
            begun += received(script.reader, len(stream) - len(begun))
            script.plane.abort(5, "enough")
        with pytest.raises(RoundAborted, match="digest" if altered else "enough"):
            future.result(WAIT_S)
        script.plane.close()
        begun += received(script.reader, len(stream))
        total = bytes(torch.full((4096,), 3.0).numpy().data)
        assert begun[HEADER_BYTES:] == (
            total + digest(total) if not altered else total[: len(begun) - HEADER_BYTES]
        )


def test_random_bytes_on_the_ring_abort_in_every_case():
    rng = random.Random(3)
    for size in [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, 1000, 50_000]:
        with ScriptedNeighbour() as script:
            script.writer.sendall(rng.randbytes(size))
            script.writer.shutdown(socket.SHUT_WR)
            with pytest.raises(RoundAborted) as aborted:
                script.reduce()
            assert aborted.value.about == "m1"


def test_random_bytes_on_the_way_back_abort_and_name_the_next():
    with ScriptedNeighbour() as script:
        script.reader.sendall(random.Random(4).randbytes(200))
        with pytest.raises(RoundAborted, match="garbage") as aborted:
            script.reduce()
        assert aborted.value.about == "m1"


@pytest.mark.parametrize(("named", "about"), [("m2", "m2"), ("nobody", ""), ("", "")])
def test_a_notice_brings_its_cause_and_is_passed_on(named, about):
    with ScriptedNeighbour(world=3) as script:
        script.reader.sendall(notice(5, 1, "m2 was lost by m1", named))
        with pytest.raises(RoundAborted, match="m2 was lost by m1") as aborted:
            script.reduce()
        assert aborted.value.about == about
        script.writer.settimeout(WAIT_S)
        assert b"m2 was lost by m1" in script.writer.recv(4096)


def test_the_loss_of_either_neighbour_is_seen_and_named():
    for lost, about in (("writer", "m2"), ("reader", "m1")):
        with ScriptedNeighbour(world=3) as script:
            getattr(script, lost).close()
            with pytest.raises(RoundAborted, match="was lost") as aborted:
                script.reduce()
            assert aborted.value.about == about


def test_a_reset_in_the_middle_of_a_chunk_is_the_loss_of_its_sender():
    with ScriptedNeighbour() as script:
        script.writer.sendall(script.good()[:100])
        linger = struct.pack("ii", 1, 0)
        script.writer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        script.writer.close()
        with pytest.raises(RoundAborted, match="was lost") as aborted:
            script.reduce()
        assert aborted.value.about == "m1"


def test_a_member_that_is_late_for_the_exchange_has_the_long_bound():
    """Member 2's own part does not prove that member 1 has entered, and member 1 may be in user code for
    long.
    """
    with ScriptedNeighbour(world=3, entry_s=0.3, exchange_s=0.001) as script:
        script.writer.sendall(script.chunk(0, torch.ones(16), length=48))
        buffer = torch.zeros(48)
        started_s = time.monotonic()
        with pytest.raises(RoundAborted, match="stalled") as aborted:
            script.plane.all_reduce(5, 3, buffer)
        assert time.monotonic() - started_s >= 0.3
        assert aborted.value.about == "m2"


def test_once_all_members_are_in_the_exchange_the_short_bound_holds():
    with ScriptedNeighbour(entry_s=3600.0, exchange_s=0.05) as script:
        script.writer.sendall(script.good()[: SMALL_CHUNK_BYTES + HEADER_BYTES + 10])
        with pytest.raises(RoundAborted, match="stalled") as aborted:
            script.reduce()
        assert aborted.value.about == "m1"


def test_a_next_member_that_does_not_read_is_the_one_who_stalls():
    with ScriptedNeighbour(entry_s=3600.0, exchange_s=0.2, chunk_bytes=2**20) as script:
        elements = 8_000_000
        half = torch.ones(elements // 2)

        def member(sequence: int, values: torch.Tensor) -> bytes:
            kind = GATHER if sequence >= 16 else REDUCE
            return script.chunk(sequence, values, length=elements, kind=kind)

        pieces = [member(i, half[:262144]) for i in range(15)]
        thread = threading.Thread(target=script.writer.sendall, args=(b"".join(pieces),))
        thread.start()
        with pytest.raises(RoundAborted, match="stalled"):
            script.plane.all_reduce(5, 3, torch.zeros(elements), torch.zeros(elements))
        script.writer.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_abort_from_another_thread_wakes_a_blocked_exchange_and_is_final():
    with RingMembers(3) as members:
        members.install(1)
        futures = members.start(1, 1, {0: torch.ones(10)})
        wait_until(lambda: members.planes[0].waiting_for)
        members.planes[0].abort(1, "epoch 2 is forced")
        members.planes[0].abort(1, "a second reason is not kept")
        for _ in range(2):
            with pytest.raises(RoundAborted, match="epoch 2 is forced"):
                futures[0].result(WAIT_S)
            futures = members.start(1, 1, {0: torch.ones(10)})
        with pytest.raises(RoundAborted, match="epoch 2 is forced"):
            futures[0].result(WAIT_S)


def test_the_cause_of_an_abort_reaches_all_members_in_the_exchange():
    with RingMembers(6) as members:
        members.install(1)
        futures = members.start(1, 1, {i: torch.ones(1000) for i in range(6) if i != 3})
        for i in (0, 1, 2, 4, 5):
            wait_until(lambda i=i: members.planes[i].waiting_for)
        members.planes[2].abort(1, "m3 is evicted", about="m3")
        for i, future in futures.items():
            with pytest.raises(RoundAborted, match="m3 is evicted") as aborted:
                future.result(WAIT_S)
            assert aborted.value.about == "m3"
            # Every member names the member that it waited for, whichever member ended the exchange.
            assert aborted.value.waited_for == f"m{(i - 1) % 6}"


def test_a_late_member_passes_on_the_abort_that_it_finds():
    with RingMembers(5) as members:
        members.install(1)
        futures = members.start(1, 1, {i: torch.ones(1000) for i in range(5) if i != 3})
        for i in (0, 1, 2, 4):
            wait_until(lambda i=i: members.planes[i].waiting_for)
        members.planes[4].abort(1, "m4 lost its memory", about="m4")
        futures |= members.start(1, 1, {3: torch.ones(1000)})
        for future in futures.values():
            with pytest.raises(RoundAborted, match="m4 lost its memory") as aborted:
                future.result(WAIT_S)
            assert aborted.value.about == "m4"


def test_an_abort_before_the_links_are_installed_holds():
    with RingMembers(2) as members:
        members.planes[0].abort(1, "superseded while dialling")
        with pytest.raises(RoundAborted, match="superseded"):
            members.planes[0].all_reduce(1, 1, torch.ones(2), torch.zeros(2))
        members.install(1)
        for future in members.start(1, 1, {i: torch.ones(2) for i in range(2)}).values():
            with pytest.raises(RoundAborted, match="superseded"):
                future.result(WAIT_S)


def test_links_of_a_retired_epoch_are_closed_even_when_they_come_late():
    with RingMembers(2) as members:
        members.planes[0].retire(3)
        (ours, other), (next_, theirs) = socket_ring(2)
        members.planes[0].install(Ring(2, 0, names(2)), ours, other)
        assert ours.fileno() == other.fileno() == -1
        for sock in (next_, theirs):
            sock.close()
        with pytest.raises(RoundAborted, match="over"):
            members.planes[0].all_reduce(2, 1, torch.ones(2), torch.zeros(2))


@pytest.mark.parametrize("how", ["retire", "close"])
def test_descriptors_in_use_are_closed_only_after_the_exchange(how):
    with RingMembers(2) as members:
        pairs = socket_ring(2)
        members.install(1, pairs)
        futures = members.start(1, 1, {0: torch.ones(10)})
        wait_until(lambda: members.planes[0].waiting_for)
        getattr(members.planes[0], how)(*([2] if how == "retire" else []))
        with pytest.raises(RoundAborted):
            futures[0].result(WAIT_S)
        wait_until(lambda: pairs[0][0].fileno() == pairs[0][1].fileno() == -1)


def test_after_an_abort_the_next_epoch_works_on_fresh_links():
    with RingMembers(4) as members:
        members.install(1)
        futures = members.start(1, 1, {i: torch.ones(9999) for i in range(3)})
        wait_until(lambda: members.planes[2].waiting_for)
        members.planes[2].abort(1, "no")
        for future in futures.values():
            with pytest.raises(RoundAborted):
                future.result(WAIT_S)
        members.install(2)
        results = members.reduce(2, 1, [torch.ones(9999)] * 4)
        assert all(same_bits(r, torch.full((9999,), 4.0)) for r in results.values())


def test_a_plane_that_is_closed_in_the_midst_of_an_exchange_ends_it_as_aborted(monkeypatch):
    """The process ends and releases its memory just when the exchange thread looks for it."""
    find, looks = OwnSegments.find, []

    def closing_find(segments: OwnSegments, memory: torch.Tensor) -> object:
        looks.append(memory)
        if len(looks) == 20:
            for plane in members.planes.values():
                plane.close()
        return find(segments, memory)

    with RingMembers(2, plane="shm", chunk_bytes=4096) as members:
        members.install(1)
        buffers = {i: members.shared(i, torch.ones(100_000)) for i in range(2)}
        results = {i: members.shared(i, torch.zeros(100_000)) for i in range(2)}
        monkeypatch.setattr(OwnSegments, "find", closing_find)
        for future in members.start(1, 1, buffers, results).values():
            with pytest.raises(RoundAborted):
                future.result(WAIT_S)
