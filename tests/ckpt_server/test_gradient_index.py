"""A gradient published by the index in shared memory is served like one published by a request to the
server.
"""

import contextlib
import threading
from http.client import HTTPException

import pytest
from server_support import META, alive, connect, description, end, fetch, publish_gradient, wait_for

from fabric.ckpt_server.wire import gradient_index
from fabric.client.gradients.gradient_slots import GradientSlots
from fabric.errors import ServerLost
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.protocol.messages.member_events import PreparedRound

NBYTES = 2_000_000


def write(handle, slot: int, step: int, nbytes: int = NBYTES) -> None:
    """Withdraw the slot, fill it, and publish it by its entry."""
    handle.allocate_gradient_index()
    if not handle.withdraw_via_shm(slot):
        handle.begin("gradient", slot)
    handle.allocate("gradient", slot, nbytes)[:nbytes] = bytes([step % 251]) * nbytes
    assert handle.publish_via_shm(slot, description(step, nbytes), META)


def steps(handle) -> list[int]:
    return [row["step"] for row in fetch(handle.url, "/v1/gradients").json]


def test_an_entry_publishes_a_gradient_like_a_request(attach):
    handle = attach()
    write(handle, 0, 5)
    publish_gradient(handle, 1, bytes([5]) * NBYTES, 5, generation=2)
    mine, other = (fetch(handle.url, f"/v1/gradients/5?generation={g}") for g in (1, 2))
    assert mine.status == other.status == 200 and mine.body == other.body
    names = {name for name in other.headers if name.startswith("X-Fabric") or name == "ETag"}
    differ = {name for name in names if mine.headers[name] != other.headers[name]}
    assert differ == {name for name in names if "generation" in name.lower() or "seal" in name.lower()}
    assert steps(handle) == [5, 5]
    text = fetch(handle.url, "/metrics").body.decode()
    assert 'fabric_ckpt_gradients{rank="0"} 2.0' in text and 'fabric_ckpt_gradient_step{rank="0"} 5.0' in text


def test_a_withdrawn_entry_ends_the_serving_and_the_past_is_gone(attach):
    handle = attach()
    for slot, step in enumerate((3, 4)):
        write(handle, slot, step)
    assert steps(handle) == [3, 4]
    assert handle.withdraw_via_shm(0)
    assert steps(handle) == [4]
    answer = fetch(handle.url, "/v1/gradients/3?generation=1")
    assert answer.status == 409 and answer.json["gone"] is True
    assert fetch(handle.url, "/v1/gradients/5?generation=1").json["gone"] is False


def test_a_waiting_reader_gets_the_gradient_of_a_new_entry(attach):
    handle = attach()
    write(handle, 0, 1)
    found = []
    waiting = threading.Thread(target=lambda: found.append(fetch(handle.url, "/v1/gradients/2?wait_s=30")))
    waiting.start()
    write(handle, 1, 2)
    waiting.join(60)
    assert found[0].status == 200 and found[0].body == bytes([2]) * NBYTES


def test_a_slot_that_is_read_may_not_be_written_before_the_server_has_ended_that(attach):
    handle = attach()
    nbytes = 40_000_000  # more bytes than the sockets' buffers hold
    write(handle, 0, 1, nbytes)
    connection = connect(handle.url)
    connection.request("GET", "/v1/gradients/1")
    response = connection.getresponse()
    first = response.read(1000)
    assert not handle.withdraw_via_shm(0)
    handle.begin("gradient", 0)
    assert handle.withdraw_via_shm(0)
    handle.allocate("gradient", 0, nbytes)[:] = b"\xee" * nbytes
    rest = bytearray()
    with contextlib.suppress(HTTPException, OSError):
        while data := response.read(1 << 20):
            rest += data
    assert first + rest == bytes([1]) * (1000 + len(rest)) and len(rest) < nbytes - 1000
    connection.close()


def test_an_entry_outlives_its_trainer_and_the_successor_withdraws_it(attach):
    first = attach()
    write(first, 0, 8)
    first.close()
    second = attach()
    assert steps(second) == [8]
    second.allocate("gradient", 0, NBYTES)
    second.begin("gradient", 0)
    assert steps(second) == []
    write(second, 0, 9)
    assert steps(second) == [9]


def test_void_withdraws_the_entries(attach):
    handle = attach()
    write(handle, 0, 8)
    handle.void()
    assert steps(handle) == []
    write(handle, 0, 9)
    assert steps(handle) == [9]


def test_an_unusable_entry_publishes_nothing(attach):
    handle = attach()
    write(handle, 0, 1)
    write(handle, 1, 2)
    assert handle.withdraw_via_shm(1)
    assert handle.publish_via_shm(1, description(2, -1), META)
    assert steps(handle) == [1]
    assert not handle.publish_via_shm(1, description(2, NBYTES), {"x": "y" * gradient_index.MOST_BYTES})
    assert not handle.publish_via_shm(1, description(2, NBYTES, weight=float("nan")), META)
    assert not handle.publish_via_shm(gradient_index.COUNT, description(2, NBYTES), META)


def test_a_half_written_entry_is_ignored():
    memory = bytearray(gradient_index.TOTAL_BYTES)
    side = gradient_index.GradientIndex(memoryview(memory))
    assert gradient_index.read_entry(memory, 3) == (0, b"")
    assert side.write(3, b"said")
    number, body = gradient_index.read_entry(memory, 3)
    assert number == gradient_index.entry_number(memory, 3) > 0 and body == b"said"
    at = memory.index(b"said")
    memory[at] ^= 1
    assert gradient_index.read_entry(memory, 3) == (0, b"")
    memory[at] ^= 1
    assert side.write(3, b"more") and gradient_index.read_entry(memory, 3)[0] > number
    assert gradient_index.read_entry(memory[:100], 3) == (0, b"")


def test_a_trainer_that_publishes_notices_a_lost_server(attach):
    handle = attach()
    write(handle, 0, 1)
    end(handle.pid)
    wait_for(lambda: not alive(handle.pid), "the end of the server")
    with pytest.raises(ServerLost):
        handle.publish_via_shm(1, description(2, NBYTES), META)


def test_slots_publish_by_entry_except_during_a_catch_up(attach):
    ring = CpuRing()
    slots = GradientSlots(attach(), NBYTES, "layout", ring)
    quietly = []
    for step in range(8):
        slots.listening = step in (4, 5)
        slots.for_round(1, step).buffer[:] = step
        hold = PreparedRound(1, step, f"{step:032x}", 1.0, (("r0", (0,)),))
        quietly.append(slots.label(1, hold))
        if not quietly[-1]:
            slots.publish(1, hold)
            slots.prepare()
        assert steps(slots.handle)[-2:] == [step - 1, step][step == 0 :]
        newest = fetch(slots.handle.url, f"/v1/gradients/{step}")
        assert newest.body == bytes([step]) * NBYTES
    # The first rounds request their memory from the server; later rounds reuse it.
    assert quietly[:2] == [False, False] and quietly[3] and quietly[4:6] == [False, False] and quietly[-1]
    ring.close()
