"""Deliberate bugs in who is kept out, and for how long: the worlds of ``order_worlds`` must notice each."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from sim.faults import Aims

from fabric.model import Record
from fabric.protocol.leader.core import LeaderCore
from fabric.protocol.leader.orders import Admission

Patch = pytest.MonkeyPatch


def let_the_penalised_in(patch: Patch) -> None:
    patch.setattr(Admission, "_penalty_of", lambda leader, member: None)


def forget_the_evidence_of_the_last_leader(patch: Patch) -> None:
    recall = Admission._recall

    def recalled(leader: Admission, record: Record) -> None:
        recall(leader, replace(record, failures=()))

    patch.setattr(Admission, "_recall", recalled)


def one_failure_is_forgiven(patch: Patch) -> None:
    find = Admission._find_penalties

    def found(leader: Admission) -> list:
        config, leader.config = leader.config, replace(leader.config, failures=leader.config.failures + 1)
        penalties = find(leader)
        leader.config = config
        return penalties

    patch.setattr(Admission, "_find_penalties", found)


def begin_again_with_the_penalised(patch: Patch) -> None:
    patch.setattr(
        LeaderCore,
        "_startable",
        lambda leader: sorted(
            (p for p in leader.liveness.peers.values() if p.connected and not leader._suspicion(p)),
            key=lambda p: p.session.replica,
        ),
    )


def let_a_suspect_in_beside_a_full_job(patch: Patch) -> None:
    patch.setattr(Admission, "stands_by", lambda leader, peer: peer.session.spare)


def let_in_while_joins_are_paused(patch: Patch) -> None:
    kept_out = Admission.kept_out

    def said(leader: Admission, peer: object) -> str:
        why = kept_out(leader, peer)  # type: ignore[arg-type]
        return "" if why.startswith("nobody is admitted") else why

    patch.setattr(Admission, "kept_out", said)


def let_nobody_into_a_job_that_is_parked(patch: Patch) -> None:
    admit = LeaderCore._admit

    def admitted(leader: LeaderCore, record: Record) -> bool:
        return not leader._is_parked(record) and admit(leader, record)

    patch.setattr(LeaderCore, "_admit", admitted)


# The leader dies once it has left somebody out.
AFTER_AN_EVICTION: Aims = (("commit", "kill trainer"), ("decided", "lighthouse crash"))

# All die once somebody was left out.
ALL_AFTER_AN_EVICTION: Aims = (("commit", "kill trainer"), ("decided", "kill everybody"))

ORDERS: dict[str, tuple[Callable[[Patch], None], Aims]] = {
    mutation.__name__: (mutation, aims)
    for mutation, aims in (
        (let_the_penalised_in, ()),
        (forget_the_evidence_of_the_last_leader, AFTER_AN_EVICTION),
        (let_a_suspect_in_beside_a_full_job, ()),
        (one_failure_is_forgiven, ()),
        (begin_again_with_the_penalised, ALL_AFTER_AN_EVICTION),
        (let_in_while_joins_are_paused, ()),
        (let_nobody_into_a_job_that_is_parked, ()),
    )
}
