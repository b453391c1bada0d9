"""Every list, text and number of a message to the lighthouse has a bound."""

import pytest
from msgspec.structs import replace

from fabric.errors import ConfigError, ProtocolError
from fabric.lighthouse.connections import validation
from fabric.lighthouse.connections.validation import (
    decode_member,
    decode_session,
    decode_statuses,
    parse_policy,
)
from fabric.model import DataPlan, Fence, RankAddress, SnapshotRef, StepTimes
from fabric.protocol.member.session import MAX_NAMED
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire
from fabric.protocol.rules.lanes import HeldParameter, ReplicaLayout, TensorRegion
from fabric.protocol.rules.layout_text import layout_summary, layout_text

SESSION = m.OpenSession("r0", 1, 0, 0, "", 0, "127.0.0.1:1", "http://127.0.0.1:1", 6, roster="")
STATUS = m.TrainerStatus("r0", 1, "running", 1, "http://127.0.0.1:1")
BEAT = m.Heartbeat(1, 1, 1, 1)
FENCE = Fence("store", 1, 1)
STATE = SnapshotRef(1, 2, "d")


def text(message: m.Message) -> str:
    return wire.encode(message).decode()


@pytest.mark.parametrize(
    "change",
    [
        {"durable": (STATE,) * (validation.MAX_SNAPSHOTS + 1)},
        {"durable": (SnapshotRef(1, 2, "d" * 1000),)},
        {"snapshots": (STATE,) * (validation.MAX_SNAPSHOTS + 1)},
        {"plane": "p" * 1000},
        {"plane": "host\n"},
        {"secret": "s" * 1000},
        {"predecessors": tuple(range(1000))},
        {"exchange_s": -1.0},
        {"exchange_s": 0.0},
        {"exchange_s": 1e308},
        {"user_code_s": 0.0},
        {"autonomy_s": -1.0},
        {"tensors": ("t" * 1000,) * 1000},
        {"ranks": (RankAddress("127.0.0.1:1", "http://127.0.0.1:1/x?y="),)},
        {"ranks": (RankAddress("127.0.0.1:1", "http://127.0.0.1:1"),) * 20_000},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_session_is_bounded(change):
    decode_session(text(SESSION))
    with pytest.raises(ProtocolError):
        decode_session(text(replace(SESSION, **change)))


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1:1/any/path?x=",
        "http://10.0.0.1:1?x=",
        "http://user:word@10.0.0.1:1",
        "http://10.0.0.1",
        "ftp://10.0.0.1:1",
        "http://10.0.0.1:1#x",
        "http://10.0.0.1:1\n",
        "http://h\u00f6st:1",
        "http://:1",
        "10.0.0.1:1",
        "http://10.0.0.1:1/ranks/7/debug",
        "http://10.0.0.1:1/ranks/../1",
    ],
)
def test_the_address_of_a_checkpoint_server_is_a_scheme_a_host_and_a_port(url):
    """With any path or query in the address, a tenant could choose the request that the lighthouse sends with
    the token.
    """
    rank = "http://10.0.0.1:1/ranks/7#7"
    for good in ("http://10.0.0.1:1", "https://[fd00::1]:65535#3", "http://a-b.example:1/", rank, ""):
        assert decode_session(text(replace(SESSION, ckpt=good))).ckpt == good
        assert decode_statuses(text(replace(STATUS, ckpt=good)))[0].ckpt == good
    for decode, message in ((decode_session, SESSION), (decode_statuses, STATUS)):
        with pytest.raises(ProtocolError, match="ckpt"):
            decode(text(replace(message, ckpt=url)))


@pytest.mark.parametrize("rack", ["r" * (validation.MAX_NAME + 1), "a\x1b[2J"])
def test_a_rack_is_a_short_name_that_can_be_printed(rack):
    assert decode_session(text(replace(SESSION, rack="row7.rack12"))).rack == "row7.rack12"
    with pytest.raises(ProtocolError, match="rack must be at most 64 printable characters"):
        decode_session(text(replace(SESSION, rack=rack)))


@pytest.mark.parametrize(
    "change",
    [
        {"waiting_for": tuple(f"r{i}" for i in range(validation.MAX_NAMES + 1))},
        {"waiting_for": ("r" * 1000,)},
        {"digest": "d" * 1000},
        {"unreachable": ("r",) * (validation.MAX_UNREACHABLE + 1)},
        {"unreachable": ("r" * (validation.MAX_NAME + 1),)},
        {"unreachable": ("r\n",)},
        {"times": StepTimes(work=dict.fromkeys(range(20_000), 0.125))},
        {"times": StepTimes(loss="1" * 1000)},
        {"times": StepTimes(loss="\x1b[2J")},
    ],
    ids=str,
)
def test_a_heartbeat_is_bounded(change):
    """A heartbeat with 2.7 million names once cost the lighthouse 50 MiB."""
    assert decode_member(text(BEAT)) == BEAT
    with pytest.raises(ProtocolError):
        decode_member(text(replace(BEAT, **change)))


def test_a_member_may_name_as_many_unreachable_members_as_it_finds():
    names = tuple(f"{i:064}" for i in range(MAX_NAMED))
    for message in (replace(BEAT, unreachable=names), m.Aborted(FENCE, 1, "why", unreachable=names)):
        assert decode_member(text(message)) == message


def test_sentences_are_cut_and_cleaned_and_not_refused():
    forged = "x\n2026-11-22 10:00:00 INFO fabric: forged \x1b[2J" + "y" * 1000
    [status] = decode_statuses(text(replace(STATUS, durable_error=forged)))
    beat = decode_member(text(replace(BEAT, phase=forged, busy=forged)))
    for sentence in (status.durable_error, beat.phase, beat.busy):
        assert sentence.isprintable() and len(sentence) == validation.MAX_SENTENCE and "forged" in sentence


@pytest.mark.parametrize(
    "change",
    [
        {"durable": (STATE,) * (validation.MAX_SNAPSHOTS + 1)},
        {"durable": (SnapshotRef(1, 2, "d" * 1000),)},
        {"parts": (1,) * 1000},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_trainer_status_is_bounded(change):
    decode_statuses(text(STATUS))
    with pytest.raises(ProtocolError):
        decode_statuses(text(replace(STATUS, **change)))


@pytest.mark.parametrize(
    "statuses",
    [
        (STATUS, STATUS),
        tuple(replace(STATUS, rank=k) for k in range(validation.MAX_LOCAL_RANKS + 1)),
        (STATUS, replace(STATUS, rank=1, ckpt="http://h:1/?x")),
    ],
    ids=["a rank twice", "too many ranks", "a bad status"],
)
def test_the_statuses_of_a_server_are_bounded(statuses):
    good = (STATUS, replace(STATUS, rank=3, ckpt="http://h:1/ranks/3#3"))
    assert decode_statuses(text(m.ServerStatus(good))) == good
    with pytest.raises(ProtocolError):
        decode_statuses(text(m.ServerStatus(statuses)))


def test_only_a_report_may_be_long():
    padding = " " * validation.MAX_MESSAGE_BYTES
    for message in (m.Running(FENCE), m.Finished(FENCE, 1), m.SnapshotTaken(FENCE, "r1", 1, "")):
        assert decode_member(text(message)) == message
        with pytest.raises(ProtocolError, match="over the limit"):
            decode_member(text(message) + padding)
    report = m.Report(FENCE, 1, 1, "d", 1, 1, ("r0",), True, "g", tuple(range(50_000)), DataPlan(50_000))
    assert len(text(report)) > validation.MAX_MESSAGE_BYTES and decode_member(text(report)) == report
    for change in ({"digest": "d" * 1000}, {"round_lacked": ("r" * 1000,)}, {"round_lacked": ("r\n",)}):
        with pytest.raises(ProtocolError):
            decode_member(text(replace(report, **change)))
    aborted = m.Aborted(FENCE, 1, "why")
    changes = [{"unreachable": ("r",) * 65}, {"unreachable": ("r" * 65,)}, {"unreachable": ("r\x1b",)}]
    for change in ({"waiting_for": ("r",) * 1000}, {"about": "r" * 1000}, *changes):
        with pytest.raises(ProtocolError):
            decode_member(text(replace(aborted, **change)))


@pytest.mark.parametrize("digits", ["9" * 5000, "2:" + "9" * 5000, "\u0663", "1_0", " 3"])
def test_a_count_of_replicas_is_bounded_before_it_is_read(digits):
    with pytest.raises(ConfigError, match="give a count"):
        parse_policy(digits, 1.0)


def test_a_layout_is_that_of_the_ranks_which_announce_it():
    whole = HeldParameter("w", "float32", (4,), TensorRegion.whole((4,)))
    half = replace(whole, region=TensorRegion((0,), (2,)))
    good = replace(SESSION, ranks=(), cuts=layout_text(ReplicaLayout(((whole,),))))
    assert decode_session(text(good)).cuts == good.cuts
    for cuts, why in (
        (layout_text(ReplicaLayout(((whole,), (whole,)))), "has 1 ranks and announced the layout of 2"),
        (layout_text(ReplicaLayout(((half,),))), "hold 2 of the 4 elements of w"),
        ("not packed", "announced a layout that cannot be read"),
        ("A" * 70_000, "cuts must be at most"),
    ):
        with pytest.raises(ProtocolError, match=why):
            if len(cuts) < 70_000:
                layout_summary(cuts)  # as the thread does, before the session is taken
            decode_session(text(replace(good, cuts=cuts)))
