"""Sentences of the lighthouse about what a job does not do."""

from fabric.lighthouse.reasons import policy_kept
from fabric.model import Policy


def test_a_policy_that_is_not_followed_is_told_by_what_differs():
    said = policy_kept(
        Policy(start_replicas=5, start_wait_s=30.0), Policy(start_replicas=3, start_wait_s=30.0)
    )
    assert said == "it asked for start_replicas 5, the job has 3"
