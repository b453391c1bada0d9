"""A message for many members becomes one frame, which every WebSocket library can read."""

import asyncio
import time

import pytest
from aiohttp import WSMsgType
from aiohttp._websocket.reader import WebSocketDataQueue
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_websocket import WebSocketReader

from fabric.lighthouse.connections.connection import _PER_S_BYTES, FrameCache, WorkQueue
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire


async def read(data):
    """Return the message in the frame, read by the members' library."""
    loop = asyncio.get_running_loop()
    queue = WebSocketDataQueue(BaseProtocol(loop), 1 << 30, loop=loop)
    WebSocketReader(queue, 1 << 30, False, True).feed_data(data)
    return await queue.read()


@pytest.mark.parametrize("size", [0, 50, 60, 125, 126, 65_400, 65_535, 65_536, 200_000])
async def test_frames_of_every_length_are_read_again(size):
    message = m.Rejected("x" * size)
    found = await read(FrameCache().of(message, accepts_compression=False))
    assert found.type is WSMsgType.TEXT and wire.decode(found.data) == message


async def test_a_long_message_is_compressed_where_the_receiver_accepts_it():
    message = m.Rejected("x" * 200_000)
    frame = FrameCache().of(message, accepts_compression=True)
    found = await read(frame)
    assert found.type is WSMsgType.BINARY and len(frame) < 2000
    assert wire.decode(found.data) == message


def test_a_message_to_many_is_made_once_and_replies_do_not_push_it_out():
    frames, message = FrameCache(), m.Rejected("to many")
    first = frames.of(message, accepts_compression=True)
    for number in range(1000):
        assert str(number).encode() in frames.of(m.HeartbeatAck(number), accepts_compression=True)
    assert frames.of(message, accepts_compression=True) is first
    for number in range(1000):
        frames.of(m.Rejected(str(number)), accepts_compression=True)
    assert frames.of(message, accepts_compression=True) == first and len(frames._made) < 100


async def test_large_frames_leave_turns_to_others_and_all_are_sent():
    class Wire:
        def send(self, frame):
            sent.append(len(frame))
            turns.append(turn)

    sent, turns, turn = [], [], 0
    pacer, wires = WorkQueue(), [Wire() for _ in range(100)]
    for wire_ in wires:
        pacer.send(wire_, bytes(1 << 20))
    pacer.send(wires[0], b"small")
    assert sent == [5], "it overtakes"
    began = time.monotonic()
    while len(sent) <= 100:
        turn += 1
        assert time.monotonic() < began + 60.0
        await asyncio.sleep(0)
    assert time.monotonic() - began >= 0.9 * (100 << 20) / _PER_S_BYTES, "and the network to beats"
    assert sent == [5, *[1 << 20] * 100]
    assert max(turns.count(x) for x in set(turns)) <= 3
    pacer.send(wires[0], bytes(1 << 20))
    await asyncio.sleep(0)
    assert len(sent) == 102


def test_an_epoch_change_goes_to_all_before_any_of_them_can_answer():
    class Wire:
        def send(self, frame):
            sent.append(frame)

    sent, pacer = [], WorkQueue()
    for frame in (b"change", b"resume"):
        for _ in range(12_000):
            pacer.send(Wire(), frame)
    assert sent == [b"change"] * 12_000 + [b"resume"] * 12_000, "without a turn of any loop"


async def test_queued_work_is_done_in_order_and_may_queue_more_work():
    done, turns = [], WorkQueue()

    def work(number):
        done.append(number)
        if number < 3:
            turns.add(lambda: work(number + 10))

    for number in range(5):
        turns.add(lambda number=number: work(number))
    for _ in range(10):
        await asyncio.sleep(0)
    assert done == [0, 1, 2, 3, 4, 10, 11, 12]


async def test_a_failed_piece_of_work_is_logged_and_the_others_go_on():
    done, told, turns = [], [], WorkQueue()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    turns.add(lambda: done.append(1))
    turns.add(lambda: 1 // 0)
    turns.add(lambda: done.append(2))
    for _ in range(4):
        await asyncio.sleep(0)
    turns.add(lambda: done.append(3))
    await asyncio.sleep(0)
    assert done == [1, 2, 3] and [type(x) for x in told] == [ZeroDivisionError]
