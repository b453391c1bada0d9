"""Random bytes, frames, wrong fields and valid messages in any order, on the WebSockets of a real lighthouse.
The lighthouse and the job's record stay unharmed, and a refused peer gets the reason. ``FABRIC_FUZZ=5000``
tries 5000 new examples; by default the examples are the same every time.
"""

import asyncio
import json
import os
import struct
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import get_args

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import Instance, TroubledStore, lighthouse_on
from lighthouse_support import DEADLINE_S, WireMember, start_job
from memory_store import MemorySpace
from msgspec.structs import fields, replace

from fabric.lighthouse.connections.validation import MOST_BYTES
from fabric.model import StepTimes
from fabric.protocol.leader.liveness import LivenessConfig
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire

HUNT = int(os.environ.get("FABRIC_FUZZ", "0"))
FUZZ = settings(
    max_examples=HUNT or 80,
    derandomize=not HUNT,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
INTRUDER = "intruder"
KINDS = list(get_args(m.Message))

# Hypothesis takes a field's default from its signature, and a factory has none.
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(int, st.integers(-(2**63) + 1, 2**63 - 1))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


class World:
    """A job of two members that admits no other, and the event loop of all examples."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.runner.run(self._begin())

    async def _begin(self) -> None:
        self.instance: Instance = await self.stack.enter_async_context(
            lighthouse_on(TroubledStore(MemorySpace()), liveness=LivenessConfig(silence_s=3600.0))
        )
        self.http = await self.stack.enter_async_context(aiohttp.ClientSession())
        self.members: list[WireMember] = await start_job(
            self.http, self.instance.url, count=2, exchange_s=86400.0, user_code_s=86400.0
        )
        self.record = self.job.core.state.record
        self.beats = 1

    @property
    def job(self):
        return self.instance.jobs.by_name["job"]

    def end(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()

    def attack(self, path: str, frames: list[tuple[str, bytes]]) -> tuple[int | None, str, list[m.Message]]:
        """Send these frames; return the close code and reason (None if the connection stays open), and the
        answers.
        """
        return self.runner.run(self._attack(path, frames))

    async def _attack(self, path, frames):
        socket = await self.http.ws_connect(
            f"{self.instance.url}/v1/jobs/job/{path}?replicas=2:2&replica={INTRUDER}", autoping=False
        )
        transport = socket._response.connection.transport
        for how, data in frames:
            if not transport.is_closing():
                transport.write(data if how in ("raw", "whole") else _frame(how, data))
        if any(how == "raw" for how, _ in frames) and not transport.is_closing():
            transport.write_eof()  # end the stream, or the lighthouse would wait for the rest of a frame
        elif not transport.is_closing():
            transport.write(_frame("ping", b"all read"))
        answered = await self._answers(socket)
        await self._is_unharmed()
        await socket.close()
        return answered

    async def _answers(self, socket):
        """Return all answers up to the close, or up to the pong which proves that the lighthouse has read
        everything.
        """
        said = []
        async with asyncio.timeout(DEADLINE_S):
            while True:
                frame = await socket.receive()
                if frame.type is aiohttp.WSMsgType.TEXT:
                    said.append(wire.decode(frame.data))
                elif frame.type is aiohttp.WSMsgType.CLOSE:
                    return frame.data, frame.extra or "", said
                elif frame.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR):
                    return socket.close_code, "", said
                elif frame.type is aiohttp.WSMsgType.PONG and frame.data == b"all read":
                    return None, "", said

    async def _is_unharmed(self):
        """Check that the members are served, the record is unchanged, and the log shows no defect."""
        for member in self.members:
            self.beats += 1
            fence = self.record.fence
            await member.say(m.Heartbeat(self.beats, fence.epoch, fence.generation, 0, phase="run"))
            assert (await member.next(m.HeartbeatAck)).number == self.beats
        assert self.job.core.state.record is self.record, self.job.core.state.record.reason
        assert not self.instance.deaths
        kinds = {event.kind for event in self.job.events.after(0)}
        assert not kinds & {"defect", "evicting", "stopped", "write failed"}


def _frame(how: str, data: bytes) -> bytes:
    """A client's frame, masked with zeros."""
    head = bytes([{"text": 0x81, "binary": 0x82, "ping": 0x89, "part": 0x01}[how]])
    if len(data) < 126:
        return head + bytes([0x80 | len(data)]) + bytes(4) + data
    return head + b"\xff" + struct.pack(">QI", len(data), 0) + data


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    found = World()
    yield found
    found.end()


@pytest.fixture
def own_world() -> Iterator[World]:
    """A fresh world, without traces of earlier random sessions."""
    made = World()
    yield made
    made.end()


def texts(message: m.Message) -> tuple[str, bytes]:
    return "text", wire.encode(message)


st.register_type_strategy(StepTimes, st.builds(StepTimes, waiting_s=..., work=..., sending_s=...))


@st.composite
def valid(draw):
    """Any valid message, with the intruder's name where it names its sender."""
    message = draw(st.sampled_from(KINDS).flatmap(st.from_type))
    if isinstance(message, m.OpenSession | m.TrainerStatus):
        message = replace(message, replica=INTRUDER)
    return message


@st.composite
def damaged(draw):
    """A message with a field of another type, a missing field, or an additional field."""
    body = json.loads(wire.encode(draw(valid())))
    name = draw(st.sampled_from(sorted(body)))
    if draw(st.booleans()):
        body[name] = draw(JSON)
    else:
        del body[name]
    return "text", json.dumps(body).encode()


SESSION = m.OpenSession(INTRUDER, 7, 0, 0, "", 0, "127.0.0.1:1", "http://127.0.0.1:1", 6, roster="")
INTRODUCTION = texts(SESSION)
NOISE = st.one_of(
    st.tuples(st.sampled_from(["text", "binary", "part"]), st.binary(max_size=60)),
    st.tuples(st.just("text"), JSON.map(lambda value: json.dumps(value).encode())),
    st.tuples(st.just("raw"), st.binary(min_size=1, max_size=60)),
    damaged(),
)


def judge(code, reason, said):
    """Check that a refused peer gets a reason in words."""
    refusals = [x.reason for x in said if isinstance(x, m.Rejected)]
    for sentence in refusals:
        assert len(sentence) > 15 and "Traceback" not in sentence and "Error(" not in sentence
    if code is not None and code not in (1000, 1001, 1005, 1006):
        assert reason, f"closed with {code} and not a word"


@FUZZ
@given(st.sampled_from(["session", "introduced", "trainer-status"]), st.lists(NOISE, min_size=1, max_size=5))
def test_random_bytes_are_refused_with_a_sentence_and_harm_no_job(world, how, frames):
    if how == "introduced":
        judge(*world.attack("session", [INTRODUCTION, *frames]))
    else:
        judge(*world.attack(how, frames))


@FUZZ
@given(st.lists(valid(), min_size=1, max_size=8), st.booleans())
def test_valid_messages_in_any_order_harm_no_job(world, messages, introduced):
    fence = world.record.fence
    frames = []
    for number, message in enumerate(messages):
        has_fence = "fence" in {f.name for f in fields(message)}
        frames.append(texts(replace(message, fence=fence) if has_fence and number % 2 else message))
    judge(*world.attack("session", [INTRODUCTION, *frames] if introduced else frames))


@FUZZ
@given(st.lists(st.from_type(m.TrainerStatus), min_size=1, max_size=5))
def test_a_status_about_another_replica_harms_no_job(world, statuses):
    judge(*world.attack("trainer-status", [texts(replace(p, replica=INTRUDER)) for p in statuses]))


@pytest.mark.parametrize("path", ["session", "trainer-status"])
@pytest.mark.parametrize(
    ("frame", "code", "words"),
    [
        (b"\x81\xff" + struct.pack(">QI", MOST_BYTES + 1, 0), 1009, "over"),
        (b"\x81\xff" + struct.pack(">QI", 2**62, 0), 1009, "over"),
        (b"\xf1\x80\0\0\0\0", 1002, "no frame of a WebSocket"),
        (_frame("text", b"\xff\xfe"), 1007, "not UTF-8"),
        (_frame("binary", b"x\x9c\0"), 1008, "not binary"),
        (_frame("text", b"{"), 1008, "not a JSON message"),
        (_frame("text", b"["), 1008, "must be an object, not a list"),
        (_frame("text", b'{"kind": "Sesame"}'), 1008, "upgrade the older side"),
    ],
)
def test_a_wrong_message_is_named_with_a_remedy(world, path, frame, code, words):
    closed, reason, _ = world.attack(path, [("whole", frame)])
    assert closed == code and words in reason


def test_a_member_that_sends_a_malformed_message_is_named_in_the_refusal_and_may_reconnect(own_world):
    wrong = ("text", b'{"kind": "Heartbeat", "version": 3, "number": "seven"}')
    code, reason, said = own_world.attack("session", [INTRODUCTION, wrong])
    assert code == 1008 and "Heartbeat.number must be an integer" in reason
    assert [x for x in said if isinstance(x, m.Rejected)]
    code, _, said = own_world.attack("session", [INTRODUCTION, texts(m.Heartbeat(1, 0, 0, 0))])
    assert code is None and [x.number for x in said if isinstance(x, m.HeartbeatAck)] == [1]
