"""If the states of two replicas differ, the leader evicts the newcomer; if they had agreed before, the job
stops.
"""

import pytest
from sim import noticing, parted_worlds

from fabric.protocol.rules import decide as deciding

SEEDS = 60
MUTATION_SEEDS = 20


def test_the_newcomer_goes_and_a_member_that_had_agreed_is_not_judged():
    noticing.meet("parted", parted_worlds.REQUIRED, SEEDS)


def stop_whoever_the_two_are(patch):
    patch.setattr(deciding, "_newest_of_two", lambda record, digests: "")


def let_the_elder_of_two_go(patch):
    newest = deciding._newest_of_two

    def elder(record, digests):
        found = newest(record, digests)
        return next((name for name in digests if found and name != found), "")

    patch.setattr(deciding, "_newest_of_two", elder)


def blame_the_newest_although_it_had_agreed(patch):
    decide = deciding._minority

    def blamed(record, reports, digests, what):
        reports = {name: deciding.replace(x, unconfirmed=True) for name, x in reports.items()}
        return decide(record, reports, digests, what)

    patch.setattr(deciding, "_minority", blamed)


BUGS = (stop_whoever_the_two_are, let_the_elder_of_two_go, blame_the_newest_although_it_had_agreed)


@pytest.mark.parametrize("bug", BUGS)
def test_the_simulator_notices_a_wrong_verdict_on_two(bug):
    noticing.find(bug, "parted", range(MUTATION_SEEDS))
