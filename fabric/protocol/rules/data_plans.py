"""The members of a step that take it from other data than the rest: compared before the step is committed.

A loop may call ``session.steps`` several times, with other data and batch sizes. All members must make these
changes at the same steps.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from fabric.model import Record
from fabric.protocol.rules.compatibility import settings_in, unequal_settings


@dataclass(frozen=True, slots=True)
class DataSplit:
    """A step whose members have unequal data, and why, in one sentence."""

    wrong: tuple[str, ...]  # the members of the smaller side, or in a tie of the newer one
    why: str
    undecided: bool = False  # no side is smaller or newer


def split_by_data(record: Record, described: Mapping[str, str], step: int) -> DataSplit | None:
    """Compare the members' data at ``step``; None where they are equal.

    ``described``: by member, its ``DataPlan.described``; a member with an empty one is not compared.
    """
    compared = {name: text for name, text in described.items() if text}
    counts = Counter(compared.values())
    if len(counts) < 2:
        return None
    entered = {member.replica: member.since for member in record.roster}

    def rank(text: str) -> tuple[int, list[int]]:
        """Order the sides: the larger one, then the one with the longer tenure, has the lowest rank."""
        since = sorted((entered[name] for name, other in compared.items() if other == text), reverse=True)
        return -counts[text], since

    first, second = sorted(counts, key=rank)[:2]
    undecided = rank(first) == rank(second)
    wrong = tuple(name for name, text in compared.items() if text != first)
    right = next(name for name, text in compared.items() if text == first)
    clauses = unequal_settings(settings_in(compared[wrong[0]]), settings_in(first))
    why = (
        f"{wrong[0]} has other data than {right} at step {step} ({clauses}): give session.steps the same "
        "loaders and the same steps on every replica"
    )
    return DataSplit(wrong, why, undecided)
