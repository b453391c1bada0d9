"""Short slowdowns delay the report of the next slowdown; after a calm time the delay ends."""

from fabric.health.alarm import CALM, MOST, SHORT, Damping


def play(damping: Damping, start: int, steps: int, every: int, lasts: int) -> int:
    """Play slowdowns of ``lasts`` steps, one per ``every`` steps; return the number of reports."""
    told, was = 0, False
    for step in range(start, start + steps):
        is_told = bool(damping.admit({"r0"} if step % every < lasts else set(), step))
        told, was = told + (is_told and not was), is_told
    return told


def test_the_first_slowdown_is_announced_at_once():
    damping = Damping()
    assert damping.admit({"r1"}, 100) == {"r1"}
    assert damping.admit({"r1"}, 101) == {"r1"}
    assert damping.admit(set(), 102) == set()


def test_many_short_slowdowns_are_announced_once_or_twice():
    assert 1 <= play(Damping(), 0, 1000, every=20, lasts=6) <= 2


def test_a_lasting_slowdown_is_announced_after_many_short_ones():
    damping = Damping()
    play(damping, 0, 400, every=20, lasts=6)
    assert 0 < damping.needed <= MOST
    told = [bool(damping.admit({"r2"}, 400 + step)) for step in range(MOST + 2)]
    assert not told[0] and told[-1]


def test_a_lasting_slowdown_does_not_delay_the_announcement_of_the_next_slowdown():
    damping = Damping()
    for step in range(SHORT + 1):
        damping.admit({"r0"}, step)
    damping.admit(set(), SHORT + 1)
    assert damping.needed == 0


def test_after_calm_steps_a_slowdown_is_announced_at_once_again():
    damping = Damping()
    play(damping, 0, 200, every=20, lasts=6)
    for step in range(200, 200 + 10 * CALM):
        damping.admit(set(), step)
    assert damping.needed == 0
    assert damping.admit({"r0"}, 10_000) == {"r0"}


def test_a_cold_start_to_an_older_step_resets_the_damping():
    damping = Damping()
    damping.admit({"r0"}, 500)
    assert damping.admit({"r0"}, 10) == {"r0"}
    assert damping.needed == 0
