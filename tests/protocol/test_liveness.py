"""Which members count as dead, for which reason, and which are proven dead."""

import pytest
from protocol.makers import member_of, session_of

from fabric.protocol.leader.liveness import LastStatus, Liveness, LivenessConfig, Peer

CONFIG = LivenessConfig(stopped_s=0.15, reconnect_s=3.0, silence_s=2.0, lost_s=0.05, grace_s=3.0)
LATE = 100.0  # long after the election


def liveness(peer=None, status=None, elected=0.0):
    found = Liveness(CONFIG, elected)
    if peer is not None:
        found.peers["a"] = peer
    if status is not None:
        found.servers.of_rank(0)["a"] = status
    return found


def peer(connected=True, seen=LATE, closed=0.0, incarnation=1, **changes):
    return Peer(session_of("a", incarnation, **changes), connected, seen, closed=closed)


def status(trainer="running", since=LATE, seen=LATE, connected=True, incarnation=1):
    return LastStatus(incarnation, trainer, since, seen, connected)


@pytest.mark.parametrize(
    ("peer_", "status_", "now", "verdict"),
    [
        (peer(), status(), LATE, ""),
        (peer(), status("gone"), LATE, "its process is gone"),
        (peer(), status("stopped"), LATE + 0.1, ""),
        (peer(), status("stopped"), LATE + 0.2, "its trainer has been stopped for 0.20 s"),
        # A stop that a now dead server saw does not prove that the trainer is still stopped.
        (peer(seen=LATE), status("stopped", connected=False), LATE + 0.2, ""),
        # The session ended, but the status says that the trainer runs: it has time to reconnect.
        (peer(False, closed=LATE), status(seen=LATE + 1), LATE + 1, ""),
        (peer(False, closed=LATE), status(seen=LATE + 3), LATE + 3, "its session ended 3.00 s ago"),
        # Session and server connection both ended: the trainer is dead at once.
        (peer(False, closed=LATE), status(connected=False), LATE + 0.06, "its session ended 0.06 s ago"),
        # The trainer is silent (C code keeps the GIL), but its server is not: the trainer is alive.
        (peer(seen=LATE), status(seen=LATE + 50), LATE + 50, ""),
        (peer(seen=LATE), status(seen=LATE), LATE + 2, "its host has been silent for 2.00 s"),
        (None, None, LATE, "its session ended 97.00 s ago"),
    ],
)
def test_each_combination_of_heartbeat_and_status_has_its_verdict(peer_, status_, now, verdict):
    assert liveness(peer_, status_).failure_reason(member_of("a"), now) == verdict


def test_after_an_election_absence_does_not_count():
    assert liveness(elected=LATE).failure_reason(member_of("a"), LATE + 2.9) == ""
    assert liveness(peer(seen=LATE - 10), elected=LATE).failure_reason(member_of("a"), LATE + 2.9) == ""
    assert liveness(elected=LATE).failure_reason(member_of("a"), LATE + 3.1) != ""


def test_the_credit_lasts_while_members_still_come_back():
    """Thousands of members do not come back within three seconds, and an absent member is not dead for
    that.
    """
    found, now = liveness(elected=LATE), LATE
    for _ in range(20):
        now += 2.9
        found.came_back(now)
        assert found.failure_reason(member_of("a"), now + 2.9) == ""
    assert found.failure_reason(member_of("a"), now + 3.1) == "its session ended 0.10 s ago"
    found.came_back(now + 3.5)
    assert found.failure_reason(member_of("a"), now + 3.6) != "", "credit that is over does not begin again"


def test_silence_counts_from_the_beginning_of_a_generation_and_the_kernels_word_at_once():
    silent = liveness(peer(seen=LATE - 5))
    assert silent.failure_reason(member_of("a"), LATE) == "its host has been silent for 5.00 s"
    silent.began = LATE
    assert silent.failure_reason(member_of("a"), LATE + 1.9) == ""
    assert silent.failure_reason(member_of("a"), LATE + 2.1) == "its host has been silent for 2.10 s"
    gone = liveness(peer(seen=LATE - 5), status("gone"))
    gone.began = LATE
    assert gone.failure_reason(member_of("a"), LATE) == "its process is gone"
    away = liveness(peer(False, closed=LATE), status(connected=False))
    away.began = LATE
    assert away.failure_reason(member_of("a"), LATE + 0.1) == "its session ended 0.10 s ago"


def test_after_an_election_both_ends_seen_is_evidence():
    """The leader saw both connections of the host end, so the grace period does not apply."""
    dead = liveness(peer(False, closed=LATE + 1), status(connected=False), elected=LATE)
    assert dead.failure_reason(member_of("a"), LATE + 1.1) == "its session ended 0.10 s ago"


def test_the_status_of_another_incarnation_does_not_count():
    newer = liveness(peer(incarnation=2), status("gone", incarnation=2))
    assert newer.failure_reason(member_of("a", 2), LATE) == "its process is gone"
    assert newer.proven_dead(member_of("a", 1)) == ""
    vouched = liveness(peer(incarnation=2, predecessors=(1,)))
    assert "found this one gone" in vouched.proven_dead(member_of("a", 1))
    assert vouched.proven_dead(member_of("a", 2)) == ""


def test_out_of_contact_counts_from_the_last_sign_of_either_source():
    member = member_of("a")
    assert not liveness(peer()).out_of_contact(member, LATE + 1000, 10)
    gone = liveness(peer(False, closed=LATE), status(seen=LATE + 5, connected=False))
    assert not gone.out_of_contact(member, LATE + 14.9, 10)
    assert gone.out_of_contact(member, LATE + 15, 10)
    assert not liveness(elected=LATE).out_of_contact(member, LATE + 9, 10), "from its own election on"


def test_a_doubtful_member_is_checked_again_soon():
    roster = (member_of("a"),)
    assert liveness(peer(), status()).next_check(roster, LATE) == LATE + 0.5
    assert liveness(peer(False), status()).next_check(roster, LATE) == LATE + 0.025
    assert liveness(peer(), status("stopped")).next_check(roster, LATE) == LATE + 0.025


def test_a_member_spared_in_an_overload_is_not_checked_all_the_time():
    """Some of thousands of returning members give up before admission; the leader need not check them
    meanwhile.
    """
    roster = (member_of("a"),)
    away = liveness(peer(False, closed=LATE), elected=LATE)
    away.note_overload(LATE + 10)
    assert away.next_check(roster, LATE + 1) == LATE + 1.5
    assert away.next_check(roster, away.overload_grace_until - 0.1) == away.overload_grace_until
    assert away.next_check(roster, away.overload_grace_until) == away.overload_grace_until + 0.025
    away.servers.of_rank(0)["a"] = status("stopped", since=LATE + 1)
    assert away.next_check(roster, LATE + 1) == LATE + 1.025
