"""The six verdicts follow from the leader's facts and the ranks' answers, and long answers are cut."""

import json

import pytest

from fabric.collectives.recording import Process, parse_recording
from fabric.lighthouse.diagnosis.verdict import (
    ABSENT,
    CUT_LINK,
    MISMATCH,
    SLOW_LINK,
    STOPPED,
    UNKNOWN,
    VERDICTS,
    RankProbe,
    Symptoms,
    diagnose,
)
from fabric.model import Fence
from fabric.protocol.messages.network import Aborted

FENCE = Fence("s", 1, 3)
NAMES = ("a", "b", "c")
RUN = dict.fromkeys(NAMES, "running")
AT = ("/job/train.py:12 forward", "/job/train.py:40 main")


def case(condemned=None, aborted=None, **processes):
    return Symptoms(condemned or {}, aborted or {}, NAMES, {**RUN, **processes})


def aborted(about="", waiting_for=(), stalled=False, mismatch=False, why="the round ended"):
    return Aborted(FENCE, 7, why, about, tuple(waiting_for), stalled, mismatch)


def cut(*unreachable):
    return Aborted(FENCE, 7, "timed out", unreachable[0], unreachable=unreachable)


def op(number, name="gloo:all_reduce", sizes=((4,),), done=False, **more):
    return {
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "profiling_name": name,
        "input_sizes": [list(size) for size in sizes],
        "input_dtypes": ["Float"],
        "state": "completed" if done else "scheduled",
        "retired": done,
        **more,
    }


def rank(number, *entries, main=()):
    """Return the probe of a running rank of replica b, with torch's recording."""
    recording = parse_recording({"entries": entries}, Process("b", number), f"rank {number}")
    return RankProbe("b", number, "running", recording=recording, main=main)


CIRCLE = {
    "a": aborted("c", ["c"], stalled=True),
    "b": aborted("a", ["a"], stalled=True),
    "c": aborted("b", ["b"], stalled=True),
}


@pytest.mark.parametrize(
    "about, known, seen, verdict, says",
    [
        (
            "b",
            case({"b": "stopped"}),
            [RankProbe("b", process="stopped", pid=9)],
            STOPPED,
            "process 9 of b is stop",
        ),
        (
            "b",
            case({"b": "stopped"}, b="stopped"),
            [RankProbe("b", problem="no answer")],
            STOPPED,
            "kernel says",
        ),
        (
            "b",
            case({"b": "gone"}, b="gone"),
            [RankProbe("b", process="gone")],
            ABSENT,
            "the process of b has ended",
        ),
        (
            "b",
            case({"b": "silent"}, b="silent"),
            [RankProbe("b", problem="none")],
            ABSENT,
            "nothing is heard of b",
        ),
        (
            "b",
            case({"b": "in user code"}),
            [RankProbe("b", process="running", how="interpreter", main=AT)],
            ABSENT,
            "b runs, and has not come: its main thread is at /job/train.py:12 forward",
        ),
        (
            "b",
            case({"b": "in user code"}),
            [RankProbe("b", process="running", how="signal", main=AT)],
            ABSENT,
            "holds the interpreter's lock: its main thread is at /job/train.py:12",
        ),
        (
            "b",
            case(aborted={"a": aborted("b", ["b"], True), "c": aborted("b", ["b"], True)}),
            [RankProbe("b", process="running", how="interpreter", main=AT)],
            ABSENT,
            "b runs, and has not come",
        ),
        ("a c", case(aborted={"a": aborted("c", mismatch=True, why="c has 5")}), [], MISMATCH, "c has 5"),
        (
            "b",
            case({"b": "in user code"}),
            [
                rank(0, op(1, done=True), op(2)),
                rank(1, op(1, done=True), op(2, sizes=((8,),))),
            ],
            MISMATCH,
            "b rank 0 is in all_reduce of 4 Float where b rank 1 is in all_reduce of 8 Float",
        ),
        (
            "b",
            case({"b": "in user code"}),
            [
                rank(0, op(1, done=True), op(2), main=AT),
                rank(1, op(1, done=True), main=AT),
            ],
            ABSENT,
            "b rank 1 has not come to all_reduce (number 2 of group 0 (default_pg)), in which b rank 0 waits:"
            " its main thread is at /job/train.py:12",
        ),
        (
            "a b c",
            case(aborted=CIRCLE),
            [],
            SLOW_LINK,
            "bytes are late on the way from c to a, a to b, b to c",
        ),
        (
            "a b c",
            case(aborted={"a": aborted("b", ["b"], True), "c": aborted("b", ["b"], True)}),
            [RankProbe("b", process="running", says={"round": {"contributed": True}}, main=AT)],
            SLOW_LINK,
            "bytes are late on the way from b to a, b to c",
        ),
        ("a b", case(aborted={"a": aborted("b")}), [], SLOW_LINK, "the link from b to a broke"),
        (
            "a b",
            case({"b": "it and a cannot reach each other"}, {"a": cut("b"), "c": aborted("b", ["b"])}),
            [RankProbe("b", process="running", how="interpreter", main=("patience.py:41 wait",))],
            CUT_LINK,
            "every process runs, and nothing gets through between a and b",
        ),
        (
            "b",
            case({"b": "its host has been silent"}, {"a": cut("b")}, b="silent"),
            [RankProbe("b", problem="none")],
            ABSENT,
            "nothing is heard of b",
        ),
        ("b", case({"b": "evicted by me: hot"}), [], UNKNOWN, "b: evicted by me: hot"),
        ("", case(), [], UNKNOWN, "nothing that was seen explains it"),
        ("", case(aborted={"a": aborted("nobody we know")}), [], UNKNOWN, "nothing that was seen"),
    ],
)
def test_each_state_of_a_job_leads_to_its_verdict(about, known, seen, verdict, says):
    found = diagnose(known, seen)
    assert found.verdict == verdict and verdict in VERDICTS
    assert found.about == tuple(about.split())
    assert says in found.why


def test_finished_or_uneven_operations_are_not_a_mismatch():
    known = case({"b": "in user code"})
    for one, other in (
        (op(1, done=True), op(1, sizes=((8,),), done=True)),
        (op(1, "gloo:all_to_all"), op(1, "gloo:all_to_all", sizes=((8,),))),
        (op(1, is_p2p=True, p2p_seq_id=1), op(1, "gloo:send", is_p2p=True, p2p_seq_id=1)),
    ):
        assert diagnose(known, [rank(0, one), rank(1, other)]).verdict != MISMATCH


def test_a_link_to_a_dead_process_is_not_called_slow():
    assert diagnose(case(aborted={"a": aborted("b")}, b="gone"), []).verdict == ABSENT
    assert diagnose(case(aborted={"a": aborted("b")}, b="silent"), []).verdict == ABSENT


def test_a_diagnosis_keeps_bounded_parts_of_every_probe():
    entries = [op(i, "x" * 9999, sizes=((4,) * 60,) * 50) for i in range(200)]
    recording = parse_recording({"entries": entries}, Process("b", 0), "b")
    says = {"phase": "x" * 10_000, "step": "no step", "ring_waits_for": ["?"] * 1000}
    loud = [
        RankProbe(
            "b", i, "running", 1, says, "signal", ("f" * 10_000,) * 50, "k" * 9999, recording, "p" * 99_999
        )
        for i in range(16)
    ]
    body = json.dumps(diagnose(case({"b": "w" * 100_000}), loud).to_json())
    assert len(body) < 48_000
