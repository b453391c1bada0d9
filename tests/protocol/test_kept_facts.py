"""Every fact that the leader keeps, whose it is, and when it ends: a table, compared with the code."""

import dataclasses
import random

from fabric.protocol.leader.core import LeaderConfig, LeaderCore
from fabric.protocol.leader.state import JobState

# A fact, whose it is, when it ends, and its names in the code. A fact about a process carries its
# incarnation, or ends when the replica's next process opens a session. Durable checkpoints that a process
# named end with its session or server; where no session is left, by ``fabric retry``.
FACTS: list[tuple[str, str, str, list[str]]] = [
    ("the record", "the job", "never: leaders hand it on in the store", ["JobState.record"]),
    (
        "what goes into the next record",
        "the job",
        "with the term: the record has it",
        [
            "RosterLimits.overrides",
            "FailureEvidence.failures",
            "FailureEvidence.hosts",
            "RecordWriter.data_slots",
            "JobState.autonomy_s",
        ],
    ),
    (
        "bases that cannot be loaded or trusted",
        "the job",
        "with the term, or by fabric retry",
        ["BaseChoice.unusable", "BaseChoice.mistrusted", "BaseChoice.silent_servers"],
    ),
    (
        "times of election, returns, overload, late ticks; newest numbers of sessions",
        "the term",
        "with the term",
        [
            "Liveness.elected",
            "Liveness.returned",
            "Liveness.overloaded_until",
            "Liveness.late_s",
            "Liveness.began",
            "PlanTimer",
            "JobState.named",
        ],
    ),
    (
        "write under way, announcement",
        "the record",
        "with the next record",
        ["RecordWriter.writing", "RecordWriter.reading", "RecordWriter.announcement"],
    ),
    (
        "policy in force",
        "the record, else the process that counts most",
        "with the next record, or a cold start",
        ["RosterLimits.source"],
    ),
    (
        "steps; newest loaded base",
        "the generation",
        "with the next",
        ["Progress", "BaseChoice.base_loaded_generation", "BaseChoice.steps_lost"],
    ),
    (
        "end without a lighthouse, order to end",
        "the generation",
        "with the generation, or the job",
        ["Endings.end_step", "Endings.ended_by"],
    ),
    (
        "reports, decision, aborts, pending evictions; failure, who was told",
        "the epoch in force",
        "with the next",
        ["EpochState", "Endings.failure", "Endings.notified_incarnation", "Endings.restart_after_failure"],
    ),
    ("notices of members", "the epoch in force", "at the next look", ["OperatorOrders.noticed"]),
    (
        "advice of the detector",
        "the epoch that it names",
        "when followed, or with that epoch",
        ["Adaptations.advice", "Adaptations.held", "Relayouts"],
    ),
    (
        "session and heartbeats",
        "a process",
        "with a newer process's session; former while the record lists it",
        ["Liveness.peers", "Liveness.former"],
    ),
    ("proven end", "a process", "when no roster lists it, or it is heard again", ["Liveness.proven_ends"]),
    (
        "readmission backoff, user code at the eviction, calm links",
        "a process",
        "with the term, or by fabric admit",
        ["Admission.readmission_backoff", "Admission.evicted_in_user_code", "Healing"],
    ),
    ("deaths that a person has forgiven", "a process", "with the term", ["FailureEvidence.forgiven_deaths"]),
    ("a planned leave", "a process", "with a cold start that lists it", ["Admission.ending"]),
    (
        "processes outside the roster",
        "a process",
        "when it is a member, is gone, or was compared with one",
        ["Admission.below"],
    ),
    (
        "snapshots promised to a newcomer",
        "a process",
        "when it is a member with the state, is gone, or asks again",
        ["Joins.serving"],
    ),
    (
        "drain order, reason told to a newcomer",
        "a process",
        "with the replica's next process",
        ["OperatorOrders.draining", "Admission.waiting_outside"],
    ),
    (
        "waits for user code",
        "a process",
        "when the member comes, with its next process, or with the generation",
        ["StragglerTracker"],
    ),
    (
        "finished loop",
        "a process",
        "with its next process or the generation, or when it is gone and no roster lists it",
        ["Endings.finished"],
    ),
    (
        "rebuilt rings, complaints",
        "the members in a round",
        "when a step commits; of one process with its next",
        ["RingRebuilds"],
    ),
    (
        "incident of a lost replica",
        "the loss",
        "when the replica takes part again",
        ["LeaderOutbox.loss_incidents"],
    ),
    ("begin of a wait for replicas", "the start", "when the job begins", ["Starts.waiting_since"]),
    (
        "status of a checkpoint server",
        "a checkpoint server",
        "with its connection, unless a session or the record names its replica",
        ["ServerStatuses"],
    ),
]
# What is no fact about the job: its name, settings, this leader's clock, effects of one event, and caches.
NO_FACTS = {
    "JobState.job",
    "JobState.config",
    "JobState.store_id",
    "JobState.leading",
    "JobState.now",
    "JobState.unix_offset_s",
    "Liveness.config",
    "Liveness._late_before_s",
    "LeaderOutbox.effects",
    "FailureEvidence._penalties",
    "RecordWriter.entropy",
}


def is_part(value: object) -> bool:
    """Whether this is a part of the leader with facts of its own."""
    kind = type(value)
    changes = dataclasses.is_dataclass(kind) and not kind.__dataclass_params__.frozen
    return kind.__module__.startswith("fabric.protocol") and (changes or isinstance(value, JobState))


def facts_of(part: object, known: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the fields of every part of a leader that are no parts themselves, by class."""
    own = known[type(part).__name__] = []
    names = [x.name for x in dataclasses.fields(part)] if dataclasses.is_dataclass(part) else list(vars(part))
    for name in names:
        value = getattr(part, name)
        if not is_part(value):
            own.append(f"{type(part).__name__}.{name}")
        elif type(value).__name__ not in known:
            facts_of(value, known)
    return known


def test_the_table_lists_every_fact_that_the_leader_keeps():
    listed = [name for *_, names in FACTS for name in names]
    assert len(listed) == len(set(listed)), "a fact has one row"
    assert all(owner and end for _, owner, end, _ in FACTS)
    known = facts_of(LeaderCore("j", LeaderConfig(), random.Random(1), 0.0), {})
    facts = {x: kind for kind, fields in known.items() for x in fields}
    missing = {x for x, kind in facts.items() if x not in listed and kind not in listed} - NO_FACTS
    assert not missing
    assert set(listed) | NO_FACTS <= facts.keys() | set(facts.values()), "each name is in the code"
