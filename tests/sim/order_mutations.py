"""Deliberate bugs in penalties and overrides; the worlds of ``order_worlds`` must notice each bug."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from sim.faults import Aims

from fabric.model import Member, Record
from fabric.protocol.leader.admission import Admission
from fabric.protocol.leader.evictions import Evictions, RingRebuilder
from fabric.protocol.leader.evidence import FailureEvidence, Penalty
from fabric.protocol.leader.joins import Joins
from fabric.protocol.leader.liveness import Peer
from fabric.protocol.leader.starts import Starts
from fabric.protocol.leader.state import Mark

Patch = pytest.MonkeyPatch


def let_the_penalised_in(patch: Patch) -> None:
    patch.setattr(FailureEvidence, "penalty_of", lambda evidence, member: None)


def forget_the_evidence_of_the_last_leader(patch: Patch) -> None:
    recall = FailureEvidence.recall

    def recalled(evidence: FailureEvidence, record: Record) -> None:
        recall(evidence, replace(record, failures=()))

    patch.setattr(FailureEvidence, "recall", recalled)


def one_failure_is_forgiven(patch: Patch) -> None:
    find = FailureEvidence.find_penalties

    def penalties(evidence: FailureEvidence) -> list[Penalty]:
        state, config = evidence.state, evidence.state.config
        state.config = replace(config, failures=config.failures + 1)
        found = find(evidence)
        state.config = config
        return found

    patch.setattr(FailureEvidence, "find_penalties", penalties)


def count_a_cut_link_against_a_replica(patch: Patch) -> None:
    leave_out = RingRebuilder._leave_out

    def left_out(rebuilder: RingRebuilder, member: Member, why: str) -> None:
        leave_out(rebuilder, member, why)
        rebuilder.state.epoch.marks[member.replica].discard(Mark.EXCUSED)

    patch.setattr(RingRebuilder, "_leave_out", left_out)


def count_an_eviction_that_the_store_lost(patch: Patch) -> None:
    patch.setattr(FailureEvidence, "take_back", lambda evidence, record: None)


def count_no_death(patch: Patch) -> None:
    schedule = Evictions.schedule

    def scheduled(evictions: Evictions, replica: str, reason: str, *marks: Mark) -> None:
        schedule(evictions, replica, reason, *marks)
        if reason.startswith("its process is gone"):
            evictions.state.epoch.mark(replica, [Mark.EXCUSED])

    patch.setattr(Evictions, "schedule", scheduled)


def begin_again_with_the_penalised(patch: Patch) -> None:
    def candidates(starts: Starts) -> list[Peer]:
        state = starts.state
        peers = [p for p in state.liveness.peers.values() if p.connected and not state.suspicion(p)]
        return sorted(peers, key=lambda p: p.session.replica)

    patch.setattr(Starts, "candidates", candidates)


def let_a_suspect_in_beside_a_full_job(patch: Patch) -> None:
    patch.setattr(FailureEvidence, "stands_by", lambda evidence, peer: peer.session.spare)


def let_in_while_joins_are_paused(patch: Patch) -> None:
    kept_out = Admission.kept_out

    def reason(admission: Admission, peer: Peer) -> str:
        why = kept_out(admission, peer)
        return "" if why.startswith("joins are paused") else why

    patch.setattr(Admission, "kept_out", reason)


def let_nobody_into_a_job_that_is_parked(patch: Patch) -> None:
    admit = Joins.admit

    def admitted(joins: Joins, record: Record) -> bool:
        return not joins.state.is_parked(record) and admit(joins, record)

    patch.setattr(Joins, "admit", admitted)


# The leader dies after it has evicted a member.
AFTER_AN_EVICTION: Aims = (("commit", "kill trainer"), ("decided", "lighthouse crash"))

# All processes die after the leader has evicted a member.
ALL_AFTER_AN_EVICTION: Aims = (("commit", "kill trainer"), ("decided", "kill everybody"))

# Links between members are cut, so the leader evicts members that did not fail.
CUT_LINKS: Aims = (("commit", "partition"), ("commit", "partition"))

ORDERS: dict[str, tuple[Callable[[Patch], None], Aims]] = {
    mutation.__name__: (mutation, aims)
    for mutation, aims in (
        (let_the_penalised_in, ()),
        (forget_the_evidence_of_the_last_leader, AFTER_AN_EVICTION),
        (count_a_cut_link_against_a_replica, CUT_LINKS),
        (count_an_eviction_that_the_store_lost, AFTER_AN_EVICTION),
        (count_no_death, ()),
        (let_a_suspect_in_beside_a_full_job, ()),
        (one_failure_is_forgiven, ()),
        (begin_again_with_the_penalised, ALL_AFTER_AN_EVICTION),
        (let_in_while_joins_are_paused, ()),
        (let_nobody_into_a_job_that_is_parked, ()),
    )
}
