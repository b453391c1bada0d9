"""kept_facts.md lists every fact that the leader keeps, whose it is, and when it ends."""

import random
import re
from pathlib import Path

from msgspec import Struct

from fabric.model import Value
from fabric.protocol.leader.core import LeaderConfig, LeaderCore
from fabric.protocol.leader.state import JobState

PAGE = Path(__file__).with_name("kept_facts.md")
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
    changes = issubclass(kind, Struct) and not issubclass(kind, Value)
    return kind.__module__.startswith("fabric.protocol") and (changes or isinstance(value, JobState))


def facts_of(part: object, known: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the fields of every part of a leader that are no parts themselves, by class."""
    own = known[type(part).__name__] = []
    names = part.__struct_fields__ if isinstance(part, Struct) else list(vars(part))
    for name in names:
        value = getattr(part, name)
        if not is_part(value):
            own.append(f"{type(part).__name__}.{name}")
        elif type(value).__name__ not in known:
            facts_of(value, known)
    return known


def test_the_page_lists_every_fact_that_the_leader_keeps():
    rows = [row.split("|")[1:-1] for row in PAGE.read_text().splitlines() if row.startswith("| ")][1:]
    listed = [name for row in rows for name in re.findall(r"`([A-Za-z_.]+)`", row[1])]
    assert len(listed) == len(set(listed)), "a fact has one row"
    assert all(owner.strip() and end.strip() for *_, owner, end in rows)
    known = facts_of(LeaderCore("j", LeaderConfig(), random.Random(1), 0.0), {})
    facts = {x: kind for kind, fields in known.items() for x in fields}
    missing = {x for x, kind in facts.items() if x not in listed and kind not in listed} - NO_FACTS
    assert not missing
    assert set(listed) | NO_FACTS <= facts.keys() | set(facts.values()), "each name is in the code"
