"""Stops of a trainer are events once: the first of several in a row, and their end."""

from protocol.test_leader import started

from fabric.protocol.leader.liveness import STOP_CALM_S

TURN_S = 0.02


def duty_cycle(lighthouse, turns, name="b", incarnation=1):
    """Stop and continue the trainer in turns, as SIGSTOP and SIGCONT do; return the events about it."""
    events = []
    for _ in range(turns):
        for trainer in ("stopped", "running"):
            lighthouse.now += TURN_S
            lighthouse.status(name, trainer, incarnation)
            events += trainer_events(lighthouse)
    return events


def trainer_events(lighthouse):
    return [
        (e.kind, e.about)
        for kind in ("trainer stopped", "trainer running", "trainer gone")
        for e in lighthouse.told(kind)
    ]


def calm(lighthouse, seconds, name="b", incarnation=1):
    """Report the trainer as running for so long; return the events about it."""
    events = []
    for _ in range(round(seconds / 0.2)):
        lighthouse.now += 0.2
        lighthouse.status(name, "running", incarnation)
        events += trainer_events(lighthouse)
    return events


def test_a_trainer_stopped_in_turns_gives_an_event_at_the_beginning_and_at_the_end():
    lighthouse = started()
    assert duty_cycle(lighthouse, 500) == [("trainer stopped", "b")]
    assert calm(lighthouse, STOP_CALM_S - 0.5) == []
    assert calm(lighthouse, 1.0) == [("trainer running", "b")]
    assert calm(lighthouse, STOP_CALM_S) == []


def test_the_end_says_how_often_it_was_stopped():
    lighthouse = started()
    duty_cycle(lighthouse, 7)
    lighthouse.now += STOP_CALM_S
    lighthouse.status("b", "running")
    (event,) = lighthouse.told("trainer running")
    assert event.why == "it has run for 10 s without a stop, after 7 stops"


def test_after_a_calm_time_the_next_stop_is_an_event_again():
    lighthouse = started()
    duty_cycle(lighthouse, 2)
    calm(lighthouse, STOP_CALM_S + 1)
    assert duty_cycle(lighthouse, 3) == [("trainer stopped", "b")]


def test_each_process_of_a_replica_has_its_own_stops():
    lighthouse = started()
    duty_cycle(lighthouse, 2)
    lighthouse.status("b", "gone")
    assert trainer_events(lighthouse) == [("trainer gone", "b")]
    lighthouse.lose("b")
    lighthouse.open("b", incarnation=2)
    assert duty_cycle(lighthouse, 2, incarnation=2) == [("trainer stopped", "b")]
