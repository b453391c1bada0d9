"""The lighthouse's sentences about what a job waits for."""

from protocol.makers import record_of
from protocol.test_leader import Lighthouse

from fabric.lighthouse.diagnosis.status_text import policy_kept, waiting_for
from fabric.model import Policy, SnapshotRef


def test_a_refused_policy_is_explained_by_its_differences():
    said = policy_kept(
        Policy(start_replicas=5, start_wait_s=30.0), Policy(start_replicas=3, start_wait_s=30.0)
    )
    assert said == "it asked for start_replicas 5, the job has 3"


def said_by(lighthouse):
    return waiting_for(lighthouse.core, lighthouse.now)


def test_a_start_counts_those_that_could_begin_and_not_the_sessions_of_the_dead():
    """The sentence must never say "4 of 4 have a session, after 120 s 1 will do"."""
    lighthouse = Lighthouse(start_replicas=2, min_replicas=1, start_wait_s=120.0)
    lighthouse.status("b", "gone")
    lighthouse.open("a", "b")
    assert said_by(lighthouse).startswith(
        "replicas to start with: 1 of 2 have a session, and 1 more a session but no sign of life, after 120 s"
    )


def test_a_first_start_names_the_server_whose_scripts_own_checkpoint_it_waits_for():
    lighthouse = Lighthouse(start_replicas=2)
    lighthouse.open("a", step=40)
    lighthouse.open("b", step=30)
    lighthouse.status("b", snapshots=[SnapshotRef(0, 30, "thirty")])
    expected = "the checkpoint server of a, to hold the state of step 40 that its script begins at, until "
    assert said_by(lighthouse).startswith(expected)


def test_a_cold_start_says_how_long_it_waits_for_the_rest_and_then_for_which_servers():
    lighthouse = Lighthouse(record_of("a b c", epoch=3, cold=1), start_replicas=3, start_wait_s=120.0)
    for name in "ab":
        lighthouse.open(name, incarnation=2, predecessors=(1,), snapshots=(SnapshotRef(1, 5, "s5"),))
    lighthouse.status("c", "gone")
    lighthouse.wait(0.5)
    assert "replicas to start with: 2 of 3 have a session, after 5 s (now" in said_by(lighthouse)
    lighthouse.open("c", incarnation=2, predecessors=(1,))
    lighthouse.wait(0.5)
    assert "what the checkpoint servers http://a, http://b hold, which may be the newest" in said_by(
        lighthouse
    )
    for name in "ab":
        lighthouse.status(name, incarnation=2)
    assert "what the checkpoint servers of replicas outside the roster hold, which" in said_by(lighthouse)
