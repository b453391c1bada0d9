"""The settings and the data that all members of a job must have in common.

A difference that is noticed only after the join ends in rounds that can never be exchanged.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest

from fabric.model import Record, Value
from fabric.protocol.messages.network import OpenSession
from fabric.protocol.rules import layout_text

# Data setting -> the name of the variable or argument with which the user chooses it.
_LABELS = {
    "content": "the digest of some samples (seed what splits, shuffles or draws the data; sort listed files)",
    "data_slots": "seats (FABRIC_REPLICAS)",
    "exchange": "FABRIC_EXCHANGE",
    "on_nan": "FABRIC_ON_NAN",
    "order": "the order of the sampler (its digest)",
}
# Value of ``OpenSession.plane`` -> words for an error message.
_PLANES = {"host": "in host memory", "device": "on a GPU", "nccl": "through NCCL"}


def incompatibility(a: OpenSession, b: OpenSession) -> str:
    """Say why these two replicas cannot be members of one job, and what to do; empty when they can."""
    what = _model(a, b)
    # Processes that began at unequal steps may have begun with unequal data, as in a curriculum. Their
    # members compare them at each change (``split_by_data``).
    clauses = unequal_settings(_settings(a), _settings(b)) if a.began == b.began else ""
    if what is None and clauses:
        what = "data settings", f" ({clauses})"
    if what:
        return (
            f"{a.replica} has other {what[0]} than {b.replica}{what[1]}: start every replica with the same "
            "model, data set, batch sizes, number of steps and FABRIC_ settings"
        )
    if a.plane and b.plane and a.plane != b.plane:
        return (
            f"{a.replica} exchanges gradients {_place(a)} and {b.replica} {_place(b)}: have the parameters "
            "of every replica on the same kind of device, with the same FABRIC_DATA_PLANE"
        )
    return ""


def _place(session: OpenSession) -> str:
    return _PLANES.get(session.plane, f"by {session.plane}")


def _model(a: OpenSession, b: OpenSession) -> tuple[str, str] | None:
    """The part of the model that differs between two replicas, and the difference."""
    if bool(a.cuts) != bool(b.cuts):
        return "settings (FABRIC_UNEQUAL is not the same)", ""
    if len(a.ranks) != len(b.ranks) and not a.cuts:
        return f"ranks ({1 + len(a.ranks)} and not {1 + len(b.ranks)})", ""
    if a.layout != b.layout and a.tensors and a.tensors == b.tensors:
        return "layout of gradients", " (equal parameters: the sharding or the release of fabric differs)"
    if a.layout != b.layout:
        # Either side may have no descriptions.
        described = a.tensors and b.tensors
        pairs = enumerate(zip_longest(a.tensors, b.tensors, fillvalue="missing") if described else ())
        differ = (
            f" (parameter {number} is {here} here, and {there} there)"
            for number, (here, there) in pairs
            if here != there
        )
        return "parameters (names, shapes, dtypes or their order)", next(differ, "")
    if a.cuts != b.cuts:
        difference = layout_text.difference(a.replica, a.cuts, b.replica, b.cuts)
        if difference:
            return "parts of the parameters", f" ({difference})"
    return None


def settings_in(described: str) -> dict[str, str]:
    """The settings in a text "name value name value ..."."""
    words = described.split()
    return dict(zip(words[::2], words[1::2], strict=False))


def unequal_settings(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The settings that differ, in clauses for people; empty where none does."""
    return ", ".join(
        f"{_LABELS.get(name, name)} is {ours.get(name, 'not given')} here and "
        f"{theirs.get(name, 'not given')} there"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    )


def _settings(session: OpenSession) -> dict[str, str]:
    sharing = session.sharing
    return settings_in(session.data) | {
        "micro_batches": str(session.micro_batches),
        "policy": sharing.policy,
        "data_slots": str(sharing.data_slots),
        "redundancy": str(sharing.readers),
        "on_poison": sharing.on_poison,
        "on_loss": sharing.on_loss,
    }


class DataSplit(Value):
    """A step whose members have unequal data, and why, in one sentence."""

    wrong: tuple[str, ...]  # the members of the smaller side, or in a tie of the newer one
    why: str
    undecided: bool = False  # no side is smaller or newer


def split_by_data(record: Record, described: Mapping[str, str], step: int) -> DataSplit | None:
    """Compare the members' data at ``step``; None where they are equal.

    ``described``: by member, its ``DataPlan.described``; a member with an empty one is not compared.

    A loop may call ``session.steps`` several times, with other data and batch sizes. All members must make
    these changes at the same steps.
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
