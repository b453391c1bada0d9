"""A member with cut links: the members that it names, the time of its complaint, and its probes from
outside.
"""

from msgspec.structs import replace
from protocol.makers import record_of
from protocol.test_member import FIRST, M, Trainer, contribution, resume_of, running

from fabric.protocol.member.links import PROBE_AGAIN_S, PROBE_S, TEST_AGAIN_S, TEST_S
from fabric.protocol.member.rounds import TEST_ENDS_S
from fabric.protocol.member.state import Mode
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire
from fabric.protocol.rules.assignment import assign

THREE = record_of("a b c", epoch=1)


def in_three():
    """Return a member that runs in an epoch of three."""
    trainer = Trainer()
    trainer.leader(m.Epoch(THREE), m.Resume(THREE.fence, 0, (m.Assignment("a", (0, 1)),)))
    trainer.do(io.Linked(1))
    assert trainer.core.epochs.mode is Mode.RUN
    return trainer


def left_out():
    """Return a replica that was left out of epoch 2 because it and b cannot reach each other."""
    trainer = in_three()
    trainer.do(io.LinkLost("b", 1, "timed out", silent=True))
    second = record_of("b c", epoch=2)
    trainer.leader(m.Epoch(second))
    assert trainer.core.epochs.mode is Mode.OUTSIDE
    return trainer, second


def test_a_link_that_went_silent_is_named_and_one_that_was_closed_is_not():
    for silent, named in ((True, ("b",)), (False, ())):
        trainer = in_three()
        trainer.do(io.LinkLost("b", 1, "timed out", silent=silent))
        (aborted,) = trainer.said(m.Aborted)
        assert (aborted.about, aborted.unreachable) == ("b", named)


def test_a_link_that_goes_silent_after_the_abort_is_reported_too():
    trainer = in_three()
    trainer.do(io.LinkLost("b", 1, "timed out", silent=True))
    trainer.do(io.LinkLost("c", 1, "timed out", silent=True))
    (aborted,) = trainer.said(m.Aborted)
    assert aborted.unreachable == ("b", "c") and aborted.fence == THREE.fence


def test_an_abort_of_an_unlinked_epoch_names_the_unreachable_members():
    trainer = running(linked=False)
    trainer.do(io.LinkFailed(1, "b", "b cannot be reached", unreachable=("b",)))
    assert trainer.said(m.Aborted)[0].unreachable == ("b",)


def test_a_newcomer_that_went_silent_costs_the_round_under_way_nothing():
    """The epoch with the newcomer is not yet linked, so the round under way goes on."""
    trainer = running()
    second = record_of("a b c", epoch=2, forced=1, c={"joining": True})
    trainer.leader(m.Epoch(second))
    trainer.do(io.LinkLost("c", 1, "timed out", silent=True))
    (aborted,) = trainer.said(m.Aborted)
    assert aborted.fence == second.fence and aborted.unreachable == ("c",)
    assert trainer.core.epochs.mode is Mode.RUN and trainer.core.epochs.current == FIRST


def test_a_replica_left_out_names_the_members_it_misses_and_probes_again():
    trainer, second = left_out()
    assert trainer.said(m.Heartbeat)[-1].unreachable == ("b",)
    assert trainer.found(io.Probe) == [io.Probe(second.roster)]
    trainer.now += 2.0
    trainer.do(io.Probed(("b",)))
    trainer.now += PROBE_AGAIN_S - 0.01
    trainer.do(io.Tick())
    assert not trainer.found(io.Probe)
    trainer.now += 0.02
    trainer.do(io.Tick())
    assert trainer.found(io.Probe)


def test_only_one_probe_runs_at_a_time():
    trainer, _ = left_out()
    trainer.now += 60.0
    trainer.do(io.Tick())
    assert not trainer.found(io.Probe), "the first has not ended"


def test_a_replica_left_out_reports_at_once_that_it_reaches_all_members():
    trainer, _ = left_out()
    trainer.now += 0.1
    trainer.do(io.Probed(()))
    assert trainer.said(m.Heartbeat)[-1].unreachable == ()
    assert trainer.core.next_deadline() <= trainer.now + PROBE_S


def test_a_member_does_not_probe_and_names_no_unreachable_members_in_heartbeats():
    trainer = in_three()
    assert not trainer.found(io.Probe)
    trainer.now += 10.0
    trainer.do(io.Tick())
    assert not trainer.found(io.Probe) and trainer.said(m.Heartbeat)[-1].unreachable == ()


def test_established_links_to_all_members_end_the_suspicion():
    trainer = in_three()
    trainer.do(io.LinkLost("b", 1, "timed out", silent=True))
    second = record_of("a b c", epoch=2)
    trainer.leader(m.Epoch(second))
    trainer.do(io.Linked(2))
    trainer.leader(m.Resume(second.fence, 0, ()))
    trainer.do(io.LinkLost("c", 1, "reset"))
    assert trainer.said(m.Aborted)[0].unreachable == ()


def test_a_probe_result_that_arrives_after_readmission_is_ignored():
    trainer, _ = left_out()
    third = record_of("a b c", epoch=3)
    trainer.leader(m.Epoch(third))
    assert trainer.core.epochs.mode is Mode.REPORTED
    trainer.do(io.Probed(("b",)))
    assert trainer.core.epochs.links.silent == {"b"}, "what it knew before stays until links are made"
    trainer.do(io.Linked(3))
    assert not trainer.core.epochs.links.silent


def test_of_thousands_only_the_unreachable_members_are_probed():
    roster = record_of(" ".join(f"r{i:03}" for i in range(200)), epoch=2)
    trainer = Trainer("a")
    trainer.leader(m.Epoch(roster))
    assert trainer.core.epochs.mode is Mode.OUTSIDE and not trainer.found(io.Probe)
    trainer.core.epochs.links.silent = {"r007", "gone"}
    trainer.do(io.Tick())
    assert [[x.replica for x in e.members] for e in trainer.found(io.Probe)] == [["r007"]]


def test_a_member_says_that_its_links_are_still_to_be_made():
    trainer = running(linked=False)
    trainer.now += 5.0
    trainer.do(io.Tick())
    beat = trainer.said(m.Heartbeat)[-1]
    assert beat.is_linking and beat.phase == "run, linking"
    trainer.do(io.Computed(0, (0, 1), 2.0))
    trainer.now += 5.0
    trainer.do(io.Tick())
    assert trainer.said(m.Heartbeat)[-1].waits and trainer.said(m.Heartbeat)[-1].is_linking
    trainer.do(io.Linked(1))
    trainer.now += 5.0
    trainer.do(io.Tick())
    assert not trainer.said(m.Heartbeat)[-1].is_linking


def test_a_member_never_waits_for_itself():
    """The data plane of a ring of one names the member itself as the neighbour whose bytes are due."""
    alone = record_of("a", epoch=1)
    trainer = Trainer(exchange_s=10.0)
    trainer.leader(m.Epoch(alone), m.Resume(alone.fence, 0, (m.Assignment("a", (0, 1, 2, 3)),)))
    trainer.do(io.Linked(1), io.Computed(0, (0, 1, 2, 3), 4.0))
    trainer.do(io.RingWaitsFor("a"))
    trainer.now += 11.0
    trainer.do(io.Tick())
    (aborted,) = trainer.said(m.Aborted)
    assert aborted.waiting_for == () and aborted.about == ""
    assert "and I wait for no member in particular" in aborted.why


def test_a_heartbeat_of_an_older_version_names_no_unreachable_member():
    beat = m.Heartbeat(1, 2, 1, 5)
    old = wire.encode(beat).replace(b',"unreachable":[]', b"")
    assert old != wire.encode(beat) and wire.decode(old) == beat
    named = replace(beat, unreachable=("b",))
    assert wire.decode(wire.encode(named)) == named


def test_a_link_that_was_cut_is_looked_at_often_until_links_have_stood():
    """The link may flap, and rare probes would miss a second cut."""
    trainer, _ = left_out()
    for _ in range(3):
        trainer.do(io.Probed(()))
        assert trainer.core.link_watch.next_probe == trainer.now + PROBE_AGAIN_S
        trainer.now += PROBE_AGAIN_S
        trainer.do(io.Tick())
        assert trainer.found(io.Probe)
    trainer.leader(m.Epoch(record_of("a b c", epoch=3)))
    trainer.do(io.Linked(3))
    assert not trainer.core.link_watch.flaps


def in_the_exchange():
    """Return a member of two whose peer has contributed too."""
    trainer = running()
    trainer.do(io.Computed(0, (0, 1), 2.0))
    trainer.peer("b", contribution(FIRST, 0, (2, 3)))
    assert trainer.core.next_deadline() <= trainer.now + TEST_S
    return trainer


def after(trainer, seconds):
    trainer.now += seconds
    trainer.do(io.Tick())


def test_a_round_that_takes_long_tests_the_links_once_with_a_large_message():
    trainer = in_the_exchange()
    after(trainer, TEST_S - 0.1)
    assert not trainer.told_peers(m.Contribution)
    after(trainer, 0.1)
    (test,) = trainer.told_peers(m.Contribution)
    assert len(wire.encode(test)) > m.LARGE_BYTES and test.micro_batches == (0, 1)
    after(trainer, TEST_S)
    assert not trainer.told_peers(m.Contribution)


def test_members_that_wait_for_the_state_of_a_newcomer_test_their_links_again_and_again():
    a, b = FIRST.roster
    record = replace(FIRST, roster=(a, replace(b, joining=True, blocking_join=True)))
    trainer = Trainer("a")
    trainer.leader(m.Epoch(record), resume_of(record, 0, **assign(range(M), FIRST.roster)))
    trainer.do(io.Linked(1))
    trainer.do(io.Computed(0, (0, 1), 2.0))
    assert [x.padding for x in trainer.told_peers(m.Contribution)] == ["", m.PADDING]
    for _ in range(2):
        after(trainer, TEST_AGAIN_S - 0.1)
        assert not trainer.told_peers(m.Contribution)
        after(trainer, 0.1)
        assert [x.padding for x in trainer.told_peers(m.Contribution)] == [m.PADDING]


def test_a_reduced_round_tests_no_links():
    trainer = in_the_exchange()
    trainer.do(io.Exchanged(0, 0, "g0"), io.Exchanged(1, 0, "g0"))
    after(trainer, TEST_S)
    assert not trainer.told_peers(m.Contribution)


def test_a_member_answers_the_test_of_its_round_with_its_own():
    trainer = running()
    trainer.do(io.Computed(0, (0, 1), 2.0))
    test = replace(contribution(FIRST, 0, (2, 3)), padding=m.PADDING)
    trainer.peer("b", test)
    assert [x.padding for x in trainer.told_peers(m.Contribution)] == [m.PADDING]
    trainer.peer("b", test)
    assert not trainer.told_peers(m.Contribution)
    assert trainer.core.rounds.round.contributions["b"].padding == ""


def test_the_test_of_another_round_and_of_a_member_in_user_code_has_no_answer():
    trainer = running()
    trainer.peer("b", replace(contribution(FIRST, 0, (2, 3)), padding=m.PADDING))
    assert not trainer.told_peers(m.Contribution)
    trainer.do(io.Computed(0, (0, 1), 2.0))
    assert [x.padding for x in trainer.told_peers(m.Contribution)] == [""]
    trainer.peer("b", replace(contribution(FIRST, 1, (2, 3)), padding=m.PADDING))
    assert not trainer.told_peers(m.Contribution)


def test_an_abort_names_the_size_only_where_the_test_has_ended_the_link():
    for silent_s, size in ((TEST_ENDS_S + 0.1, m.LARGE_BYTES), (TEST_ENDS_S - 0.1, 0)):
        trainer = in_the_exchange()
        after(trainer, TEST_S)
        trainer.now += silent_s
        trainer.do(io.LinkLost("b", 1, "timed out", silent=True))
        (aborted,) = trainer.said(m.Aborted)
        assert (aborted.unreachable, aborted.lost_bytes) == (("b",), size)


def test_a_replica_outside_tells_the_size_of_the_messages_that_its_probes_lose():
    trainer, _ = left_out()
    trainer.do(io.Probed(("b",), m.LARGE_BYTES))
    assert trainer.said(m.Heartbeat)[-1].lost_bytes == m.LARGE_BYTES
