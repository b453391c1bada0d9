"""Messages as frames: made once for many, and what any WebSocket reads."""

import asyncio

import pytest
from aiohttp import WSMsgType
from aiohttp._websocket.reader import WebSocketDataQueue
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_websocket import WebSocketReader

from fabric.lighthouse.connection import Frames
from fabric.protocol import messages as m
from fabric.protocol import wire


async def read(data):
    """The one message in it, as the library that members use reads it."""
    loop = asyncio.get_running_loop()
    queue = WebSocketDataQueue(BaseProtocol(loop), 1 << 30, loop=loop)
    WebSocketReader(queue, 1 << 30, False, True).feed_data(data)
    return await queue.read()


@pytest.mark.parametrize("size", [0, 50, 60, 125, 126, 65_400, 65_535, 65_536, 200_000])
async def test_frames_of_every_length_are_read_again(size):
    message = m.Rejected("x" * size)
    found = await read(Frames().of(message, packs=False))
    assert found.type is WSMsgType.TEXT and wire.decode(found.data) == message


async def test_a_long_message_is_packed_for_who_understands_that():
    message = m.Rejected("x" * 200_000)
    frame = Frames().of(message, packs=True)
    found = await read(frame)
    assert found.type is WSMsgType.BINARY and len(frame) < 2000
    assert wire.decode(found.data) == message


def test_a_message_to_many_is_made_once_and_replies_do_not_push_it_out():
    frames, message = Frames(), m.Rejected("to many")
    first = frames.of(message, packs=True)
    for number in range(1000):
        assert str(number).encode() in frames.of(m.BeatReply(number), packs=True)
    assert frames.of(message, packs=True) is first
    for number in range(1000):
        frames.of(m.Rejected(str(number)), packs=True)
    assert frames.of(message, packs=True) == first and len(frames._made) < 100
