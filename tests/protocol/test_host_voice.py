"""The voice of a host: what its ranks say becomes one message, and what one rank alone says goes at once."""

import pytest
from msgspec.structs import replace
from protocol.test_rank_orders import FIRST

from fabric.errors import ProtocolError
from fabric.model import SnapshotRef, SpeedMeasurement, StepTimes
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import rank_messages as ro
from fabric.protocol.messages.rank_messages import MOST_TIMED_RANKS
from fabric.protocol.ranks import FollowerRank, HostVoice

RANKS = (4, 5, 6)


def say(voice, rank, event, number=0):
    """Let one rank speak; return what rank 0 gets after the messages have travelled."""
    sent = [ro.encode_outcomes(said) for said in voice.take(rank, ro.RankOutcome(event, number))]
    heard = [ro.decode_outcomes(data, RANKS) for data in sent]
    return [(x.ranks, x.events, x.number) for x in heard]


def test_a_host_speaks_once_when_all_of_its_ranks_have_answered():
    voice = HostVoice(RANKS, 7)
    assert say(voice, 5, io.Exchanged(1, 2, "five")) == say(voice, 4, io.Exchanged(1, 2, "four")) == []
    events = io.Exchanged(1, 2, "five"), io.Exchanged(1, 2, "four"), io.Exchanged(1, 2, "six")
    assert say(voice, 6, events[2]) == [((5, 4, 6), events, 0)]


def test_what_is_the_same_for_all_ranks_is_sent_once():
    said = ro.FromHost(RANKS, (io.Linked(7),) * 3)
    assert ro.encode_outcomes(said).count(b"epoch") == 1
    assert ro.decode_outcomes(ro.encode_outcomes(said), RANKS) == said


def test_times_and_metrics_are_kept_by_rank():
    voice = HostVoice(RANKS, 7)
    for event in (
        lambda rank: io.Ready(3, f"d{rank}", StepTimes(float(rank), work={0: 1.0})),
        lambda rank: io.Computed(3, (1,), float(rank), (("loss", rank / 2),)),
    ):
        assert not say(voice, 4, event(4)) and not say(voice, 5, event(5))
        assert say(voice, 6, event(6)) == [(RANKS, tuple(map(event, RANKS)), 0)]


def test_of_a_large_replica_only_measured_times_travel():
    voice = HostVoice((4, 5), MOST_TIMED_RANKS + 1)
    measured = StepTimes(2.0, measured=(SpeedMeasurement(1, 4),))
    say(voice, 4, io.Ready(3, "d", StepTimes(1.0)))
    ((_, (four, five), _),) = say(voice, 5, io.Ready(3, "d", measured))
    assert four.times is None and five.times == measured
    times = [StepTimes(9.0), *(four.times for _ in range(MOST_TIMED_RANKS)), five.times]
    assert ro.replica_times(times) == StepTimes(9.0, measured=measured.measured)


@pytest.mark.parametrize(
    "alone",
    [
        io.ExchangeFailed(1, 2, "b", "reset"),
        io.LinkFailed(1, "b", "no answer"),
        io.LoopRaised("ValueError"),
        io.Busy("evaluation", 5.0),
        io.Noticed(),
        io.Saved(1, ""),
        io.GradientGone(1, True, "gone"),
        ro.SnapshotDue(1),
        ro.RankLost(5, "its process ended"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_one_rank_alone_says_goes_at_once_and_after_what_it_said_before(alone):
    voice = HostVoice(RANKS, 7)
    assert say(voice, 5, io.Exchanged(1, 2, "five")) == []
    before, said = say(voice, 5, alone)
    assert before == ((5,), (io.Exchanged(1, 2, "five"),), 0) and said == ((5,), (alone,), 0)
    assert say(voice, 4, io.Exchanged(1, 2, "four")) == []
    assert [x[0] for x in say(voice, 6, io.Exchanged(1, 2, "six"))] == [(4, 6)]


def test_ranks_that_stand_at_different_places_are_reported():
    voice = HostVoice(RANKS, 7)
    for rank, event in ((4, io.Ready(3, "")), (5, io.Closing())):
        assert say(voice, rank, event) == []
    assert say(voice, 6, io.Ready(3, "")) == [
        ((4,), (io.Ready(3, ""),), 0),
        ((5,), (io.Closing(),), 0),
        ((6,), (io.Ready(3, ""),), 0),
    ]


def test_outcomes_that_cross_leave_none_behind():
    """Rank 4 is linked before it has computed, and the others after."""
    voice, told = HostVoice(RANKS[:2], 7), []
    for rank, event in ((4, io.Linked(1)), (4, io.Ready(0, "")), (5, io.Ready(0, "")), (5, io.Linked(1))):
        for ranks, events, _ in say(voice, rank, event):
            told += zip(ranks, events, strict=True)
    assert len(told) == 4 and not voice._waiting
    assert [event for rank, event in told if rank == 4] == [io.Linked(1), io.Ready(0, "")]


def test_a_rank_that_links_again_is_not_kept_waiting():
    voice = HostVoice(RANKS, 7)
    say(voice, 5, io.Linked(1))
    assert say(voice, 4, io.LinkFailed(1, "b", "reset"))
    assert say(voice, 5, io.Linked(1)) == [((5,), (io.Linked(1),), 0)]
    assert say(voice, 4, io.Linked(1)) == []
    assert say(voice, 6, io.Linked(1)) == [((4, 6), (io.Linked(1),) * 2, 0)]


def test_a_fetch_is_one_question_however_each_rank_ends_it():
    voice = HostVoice(RANKS[:2], 7)
    assert say(voice, 4, io.StateFetched(7, "d"), 3) == []
    assert say(voice, 5, io.FetchFailed("gone"), 3) == [
        ((4,), (io.StateFetched(7, "d"),), 3),
        ((5,), (io.FetchFailed("gone"),), 3),
    ]


def test_the_questions_that_some_rank_never_answers_are_forgotten():
    voice = HostVoice(RANKS, 7)
    for epoch in range(1000):
        voice.take(4, ro.RankOutcome(io.Linked(epoch)))
    assert len(voice._told) < 100 and len(voice._waiting) < 100


def test_each_rank_of_a_host_gets_its_part_of_a_command():
    own = ro.addresses_by_rank(FIRST, 2)
    assert own[1] == ("a:2", "http://a/1", "b:2", "http://b/1")
    command = ro.RankCommand(
        3,
        1,
        io.LinkUp(replace(FIRST, roster=tuple(replace(x, link="", ckpt="", ranks=()) for x in FIRST.roster))),
    )
    parts = ro.commands_by_rank(ro.HostCommands(command).of(own), 2)
    for rank, data in enumerate(parts):
        assert ro.decode_command(data).effect == ro.with_own(command.effect, own[rank])
    fetch = ro.RankCommand(4, 1, io.FetchState(SnapshotRef(1, 2, "d"), ()))
    parts = ro.commands_by_rank(ro.HostCommands(fetch).of((("http://x",), ("http://y",))), 2)
    assert [ro.decode_command(x).effect.urls for x in parts] == [("http://x",), ("http://y",)]


def test_a_command_that_is_the_same_for_all_is_passed_on_as_it_came():
    data = ro.HostCommands(ro.RankCommand(3, 1, io.Compute(7, (1, 2)))).of()
    assert all(part is data for part in ro.commands_by_rank(data, 8))


def test_a_rank_knows_the_digest_of_its_own_part():
    follower = FollowerRank(5, speaker=4)
    for step in range(6, 8):
        follower.tell(io.Exchanged(3, step, "own" if step == 7 else "other"))
    prepared = io.PreparedRound(3, 7, "", 4.0, (("a", (0, 1)),), ())
    for effect in (io.Apply(1, 7, prepared, True, False), io.Publish(1, prepared)):
        assert follower.obey(ro.RankCommand(1, 1, effect)).prepared.gradient_digest == "own"
    assert follower.lost("reset").reason == "rank 4 of this replica is lost (reset): all ranks start again"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"kind":"Linked","value":{"epoch":1},"number":0,"ranks":[9]}', "speaks for ranks of another host"),
        (b'{"kind":"Linked","value":[{"epoch":1}],"number":0,"ranks":[4,5]}', "2 ranks have 1 outcomes"),
        (b'{"kind":"Linked","value":[{"step":1}],"number":0,"ranks":[4]}', "epoch"),
    ],
)
def test_a_voice_that_says_what_cannot_be_is_refused(text, words):
    with pytest.raises(ProtocolError, match=words):
        ro.decode_outcomes(text, RANKS)


def test_a_command_that_does_not_fit_its_ranks_is_refused():
    data = ro.HostCommands(ro.RankCommand(3, 1, io.LinkUp(FIRST))).of((("a:1",),))
    with pytest.raises(ProtocolError, match="does not fit 1 values"):
        ro.decode_command(data)
    with pytest.raises(ProtocolError, match="is for 1 ranks, and this host has 2"):
        ro.commands_by_rank(data, 2)


def test_the_first_rank_of_a_host_speaks_for_it_except_on_the_host_of_rank_0():
    urls = [f"http://h{rank // 2}:1" + (f"/ranks/{rank}#{rank}" if rank else "") for rank in range(6)]
    assert ro.voices_of(urls) == ((0,), (1,), (2, 3), (4, 5))
