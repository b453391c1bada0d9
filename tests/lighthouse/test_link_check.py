"""A slow link between replicas is compared with one other link of the ring."""

import math

import pytest

from fabric.lighthouse.diagnosis.speed_checks import LinkEcho, judge_link, witness_link
from fabric.model import SpeedMeasurement

GOOD = (0.0004, 900e6)


def judged(own: tuple[float, float], reference: tuple[float, float] = GOOD) -> tuple[bool | None, str]:
    suspect = LinkEcho("r0", "r1", SpeedMeasurement(7, 0, 0.0, 0.0, *own))
    witness = LinkEcho("r2", "r0", SpeedMeasurement(7, 0, 0.0, 0.0, *reference))
    return judge_link(suspect, witness)


@pytest.mark.parametrize("own", [(0.0004, 3e6), (0.06, 900e6), (0.4, 0.0)])
def test_a_link_with_few_bytes_or_long_round_trips_is_confirmed(own):
    is_slow, why = judged(own)
    assert is_slow and why.endswith("the network from r0 to r1 is slow")


def test_the_sentence_has_both_links_with_their_figures():
    assert judged((0.06, 3e6))[1].startswith(
        "the link from r0 to r1 has a round trip of 60 ms and 3 MB/s; "
        "from r2 to r0: a round trip of 0.4 ms and 900 MB/s"
    )
    assert "a round trip of 400 ms and no byte of a transfer in time" in judged((0.4, 0.0))[1]
    assert "20 kB/s" in judged((0.06, 2e4))[1] and "2.5 GB/s" in judged((0.06, 2.5e9))[1]


def test_the_sentence_has_the_interface_of_each_link_where_it_is_known():
    over = "eth0 with 1000 Mbit/s (eth1 at 10.8.0.1 has 25000 Mbit/s)"
    suspect = LinkEcho("r0", "r1", SpeedMeasurement(7, 0, 0.0, 0.0, 0.06, 3e6, interface=over))
    witness = LinkEcho("r2", "r0", SpeedMeasurement(7, 0, 0.0, 0.0, *GOOD, interface="eth1\n" * 99))
    why = judge_link(suspect, witness)[1]
    assert (
        f"60 ms and 3 MB/s over {over}; from r2 to r0: a round trip of 0.4 ms and 900 MB/s over eth1" in why
    )
    assert "\n" not in why and len(why) < 600


@pytest.mark.parametrize("own", [GOOD, (0.004, 600e6), (0.0001, 2000e6)])
def test_a_link_like_the_witness_refutes_it(own):
    is_slow, why = judged(own)
    assert is_slow is False and "not slow now" in why


@pytest.mark.parametrize("bad", [(0.0, 0.0), (-1.0, 900e6), (math.nan, 900e6), (0.1, math.inf)])
def test_without_an_answer_nothing_is_said_of_the_link(bad):
    is_slow, why = judged(bad)
    assert is_slow is None and why.startswith("r1 has not answered the echo of r0")
    is_slow, why = judged(GOOD, bad)
    assert is_slow is None and why.startswith("r0 has not answered the echo of r2")


@pytest.mark.parametrize(
    ("members", "slow", "witness"),
    [
        ("r0 r1", "r0", ("r1", "r0")),
        ("r0 r1 r2", "r0", ("r1", "r2")),
        ("r0 r1 r2 r3", "r0", ("r2", "r3")),
        ("r0 r1 r2 r3", "r0 r2", ("r1", "r2")),
        ("r0", "r0", None),
        ("r0 r1", "r0 r1", None),
    ],
)
def test_the_witness_shares_as_few_ends_with_the_suspect_as_possible(members, slow, witness):
    assert witness_link(("r0", "r1"), members.split(), slow.split()) == witness


def test_the_last_member_of_a_ring_sends_to_the_first():
    assert witness_link(("r1", "r2"), ["r0", "r1", "r2", "r3"], {"r1"}) == ("r3", "r0")


def test_in_a_long_ring_the_witness_is_one_of_the_first_members():
    members = [f"m{n}" for n in range(10_000)]
    assert witness_link(("m7", "m8"), members, {"m7"}) == ("m0", "m1")
