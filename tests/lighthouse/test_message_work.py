"""No message of a tenant holds the loop of all jobs for long: the largest valid message of every kind.

A quiet machine decodes 2 MiB of JSON in some 30 milliseconds.
"""

import tracemalloc
import zlib
from typing import get_args

import pytest
from in_process import TroubledStore, lighthouse_on
from lighthouse_support import WireMember, WireStatus, close_all, closing, eventually, start_job
from memory_store import MemorySpace
from msgspec.structs import fields, replace
from turn_work import MOST_BYTECODES, counted

from fabric.errors import ProtocolError
from fabric.lighthouse.connections import validation as v
from fabric.model import (
    DataPlan,
    Death,
    EarlierStep,
    Fence,
    JobEnd,
    LaunchedLayouts,
    RankAddress,
    Sharing,
    SnapshotRef,
    StepTimes,
)
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire

STATE = SnapshotRef(1, 2, "d" * v.MAX_DIGEST)
NAMES = tuple(f"{i:064}" for i in range(v.MAX_UNREACHABLE))
LONG = "w" * 1_000_000
SESSION = m.OpenSession("r0", 1, 0, 0, "", 0, "127.0.0.1:1", "http://127.0.0.1:1", 6, roster="")


def largest(fence: Fence) -> dict[type, m.Message]:
    """Return the largest valid message of every kind that a tenant may send."""
    ranks = (RankAddress("127.0.0.1:1", "http://127.0.0.1:1"),) * 3_000
    times = StepTimes(work=dict.fromkeys(range(9_000), 0.125))
    earlier = tuple(EarlierStep(step, 0.5, 1.0, 1.0, 1.0, 1) for step in range(500))
    everybody = tuple(f"{i:020}" for i in range(v.MOST_REPLICAS))
    mine, layouts = tuple(range(v.MAX_MICRO_BATCHES)), ("l" * 100,) * (v.MAX_NAMES // 2)
    found: tuple[m.Message, ...] = (
        replace(
            SESSION,
            micro_batches=v.MAX_MICRO_BATCHES,
            ranks=ranks,
            tensors=("t" * 8,) * (v.MAX_DESCRIPTION // 8 // 2),
            snapshots=(STATE,) * v.MAX_SNAPSHOTS,
            durable=(STATE,) * v.MAX_SNAPSHOTS,
            predecessors=tuple(range(v.MAX_NAMES)),
            digest="d" * v.MAX_DIGEST,
            layout="l" * v.MAX_DIGEST,
            data="x" * v.MAX_SETTINGS,
            sharing=Sharing("shrink", v.MOST_REPLICAS, v.MOST_REPLICAS, "skip", "stop"),
            roster="o" * v.MAX_DIGEST,
            plane="p" * v.MAX_DIGEST,
            secret="s" * v.MAX_SECRET,
            ended=JobEnd(fence, 1, 1),
            rack="r" * v.MAX_NAME,
            adapt="a" * v.MAX_NAME,
            launched=LaunchedLayouts("l", layouts, layouts),
            store_id="i" * v.MAX_DIGEST,
            serves=("r" * v.MAX_NAME,) * v.MAX_NAMES,
        ),
        m.Heartbeat(
            *(7, 1, 1, 1, "d" * v.MAX_DIGEST, LONG[:10_000], NAMES, LONG[:10_000], times, earlier),
            unreachable=NAMES,
        ),
        m.Running(fence, 1),
        m.Aborted(fence, 1, LONG, "r" * v.MAX_ADDRESS, NAMES, unreachable=NAMES),
        m.Report(
            *(fence, 1, 0, "d" * v.MAX_DIGEST, 1, 1, everybody, True, "g" * v.MAX_DIGEST, mine),
            committed_digest="c" * v.MAX_DIGEST,
            parted=LONG[:10_000],
            plan=DataPlan(6, "x" * v.MAX_SETTINGS),
        ),
        m.RequestRoster(fence),
        m.RequestState(fence, LONG),
        m.SnapshotTaken(fence, "r" * v.MAX_ADDRESS, 1, "d" * v.MAX_DIGEST),
        m.Finished(fence, 1, LONG[:60_000]),
        m.CannotContinue(fence, LONG),
        m.LoopFailed(fence, 1, LONG),
        m.TrainerStatus(
            "r0",
            1,
            "running",
            1,
            "http://127.0.0.1:1",
            (STATE,) * v.MAX_SNAPSHOTS,
            (Death(1, 1, 1),) * v.MAX_DEATHS,
            durable=(STATE,) * v.MAX_SNAPSHOTS,
            durable_error=LONG[:30_000],
            ages_s=(0.5,) * v.MAX_SNAPSHOTS,
            parts=(1,) * v.MAX_SNAPSHOTS,
            ended=JobEnd(fence, 1, 1),
        ),
        m.ServerStatus(
            tuple(
                m.TrainerStatus(
                    "r0", 1, "running", 1, f"http://127.0.0.1:1/ranks/{k}#{k}", (STATE,) * 2, rank=k
                )
                for k in range(v.MAX_LOCAL_RANKS)
            )
        ),
        m.StatusUnchanged(1),
    )
    return {type(message): message for message in found}


KINDS = (*get_args(m.MemberMessage), *get_args(m.ServerMessage))


@pytest.fixture
async def instance():
    async with lighthouse_on(TroubledStore(MemorySpace()), lease_s=60) as found:

        async def leads() -> bool:
            return found.jobs.loaded.is_set()

        await eventually(leads, "it to lead")
        yield found


def test_the_table_has_every_kind_that_a_tenant_may_send():
    assert set(largest(Fence("s", 1, 1))) == set(KINDS)


# A name and an address are short, a status may name one state of its trainer, and tests/lighthouse/
# test_layout_gate.py has the layouts, which are read outside of the loop.
SMALL = {"replica", "link", "ckpt", "trainer", "cuts", "fence"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_largest_message_fills_every_field_that_can_be_long(kind):
    message = largest(Fence("s", 1, 1))[kind]
    for field in fields(kind):
        value = getattr(message, field.name)
        if field.name not in SMALL and not isinstance(value, int | float):
            empty = (None, "", (), field.default)
            assert value not in empty and (not isinstance(value, str | tuple) or len(value) > 8), field.name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_message_is_bounded_before_its_fields_are_decoded(kind, monkeypatch):
    """A message of 16 MiB held the loop for 2 seconds."""
    assert v.most_bytes(kind) <= v.MOST_BYTES
    decode = v.decode_statuses if kind in get_args(m.ServerMessage) else v.decode_member
    text = wire.encode(largest(Fence("s", 1, 1))[kind]).decode()
    assert isinstance(decode(text), (kind, tuple))
    decoded = []
    full = wire.decode_value
    monkeypatch.setattr(wire, "decode_value", lambda cls, *rest: decoded.append(cls) or full(cls, *rest))
    with pytest.raises(ProtocolError, match="over the limit"):
        decode(text + " " * v.MOST_BYTES)
    assert kind not in decoded


@pytest.mark.parametrize("field", ["kind", "version"])
def test_a_long_field_of_the_head_becomes_no_objects(field):
    """A list of 5 million lists as the kind of a message held the loop for 2 seconds."""
    sound = wire.encode(m.Running(Fence("s", 1, 1), 1)).decode()
    text = sound.replace(f'"{field}":', f'"{field}":[{",".join(["{}"] * 500_000)}],"x":', 1)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=f"{field}|version"):
            v.decode_member(text)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(text)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_the_largest_message_is_a_short_turn_of_the_loop(instance, http, kind):
    """A step of a million micro-batches was divided in one turn."""
    members = await start_job(http, instance.url, micro_batches=v.MAX_MICRO_BATCHES)
    message = largest(members[0].newest.fence)[kind]
    with counted() as count:
        if kind is m.TrainerStatus:
            status = await WireStatus(http, instance.url, "r0").open()
            socket = status.socket
            await socket.send_str(wire.encode(message).decode())
        elif kind is m.OpenSession:
            # It is refused, because this job has other ranks. In a job of its own it becomes a member.
            late = WireMember(http, instance.url, "r3", micro_batches=v.MAX_MICRO_BATCHES)
            late.session = replace(message, replica="r3")
            members.append(await late.open())
            assert "has other ranks" in (await late.next(m.Rejected)).reason
            own = WireMember(http, instance.url, "r0", job="own", replicas="1")
            own.session = replace(message, sharing=SESSION.sharing)
            members.append(await own.open())
            assert b'"kind":"Epoch"' in zlib.decompress((await own.socket.receive()).data)
            socket = own.socket
        else:
            socket = members[0].socket
            await members[0].say(message)
        # The end of this connection shows that the message before has been handled.
        await socket.send_str("this is no message")
        await closing(socket)
    assert 0 < count.most < MOST_BYTECODES
    await close_all(members)


async def test_a_step_of_the_most_micro_batches_is_divided_in_a_short_turn(instance, http):
    """A step of a million micro-batches was divided in one turn, after the report of the last member."""
    members = await start_job(http, instance.url, micro_batches=v.MAX_MICRO_BATCHES)
    await members[2].say(m.CannotContinue(members[2].newest.fence, "so that a step is divided anew"))
    fence = (await members[0].epoch(2)).fence
    plan = DataPlan(v.MAX_MICRO_BATCHES)
    with counted() as count:
        for member in members[:2]:
            await member.epoch(2)
            report = m.Report(fence, 1, 0, "", 1, 0, (), False, "", (), plan)
            await member.say(report)
        resume = await members[0].next(m.Resume)
    assert len(resume.table[0].micro_batches) >= v.MAX_MICRO_BATCHES // 3
    assert 0 < count.most < MOST_BYTECODES
    await close_all(members)
