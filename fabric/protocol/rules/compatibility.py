"""What all members of a job must have in common, seen before they join: a difference that is met later ends
in rounds that can never be exchanged."""

from itertools import zip_longest

from fabric.protocol.messages.network import OpenSession

# Data settings that people give under another name.
_LABELS = {"data_slots": "seats (FABRIC_REPLICAS)", "on_nan": "FABRIC_ON_NAN"}
# ``OpenSession.plane`` for people.
_PLANES = {"host": "in host memory", "device": "on a GPU", "nccl": "through NCCL"}


def incompatibility(mine: OpenSession, theirs: OpenSession) -> str:
    """Why these two cannot be members of one job, in a sentence that says what to do; empty when they can."""
    me, other = mine.replica, theirs.replica
    what = _model(mine, theirs) or _data(mine, theirs)
    if what:
        return (
            f"{me} has other {what[0]} than {other}{what[1]}: start every replica with the same model, data "
            "set, batch sizes, number of steps and FABRIC_ settings"
        )
    if mine.plane and theirs.plane and mine.plane != theirs.plane:
        return (
            f"{me} exchanges gradients {_place(mine)} and {other} {_place(theirs)}: have the parameters of "
            "every replica on the same kind of device, with the same FABRIC_DATA_PLANE"
        )
    return ""


def _place(session: OpenSession) -> str:
    return _PLANES.get(session.plane, f"by {session.plane}")


def _model(a: OpenSession, b: OpenSession) -> tuple[str, str] | None:
    """What of the model differs, and how."""
    if len(a.ranks) != len(b.ranks):
        return f"ranks ({1 + len(a.ranks)} and not {1 + len(b.ranks)})", ""
    if a.layout != b.layout:
        return "parameters (names, shapes, dtypes or their order)", _tensor(a.tensors, b.tensors)
    return None


def _data(a: OpenSession, b: OpenSession) -> tuple[str, str] | None:
    """What of the data differs, and the settings that do."""
    mine, theirs = _settings(a), _settings(b)
    if mine == theirs:
        return None
    said = []
    for name in {**mine, **theirs}:
        here, there = mine.get(name, "not given"), theirs.get(name, "not given")
        if here != there:
            said.append(f"{_LABELS.get(name, name)} is {here} here and {there} there")
    return "data settings", f" ({', '.join(said)})"


def _settings(session: OpenSession) -> dict[str, str]:
    words, sharing = session.data.split(), session.sharing
    named = dict(zip(words[::2], words[1::2], strict=False))
    return named | {
        "micro_batches": str(session.micro_batches),
        "policy": sharing.policy,
        "data_slots": str(sharing.data_slots),
        "redundancy": str(sharing.readers),
        "on_poison": sharing.on_poison,
        "on_loss": sharing.on_loss,
    }


def _tensor(mine: tuple[str, ...], theirs: tuple[str, ...]) -> str:
    """The first parameter that differs, for people; empty when nobody described them, or all are alike."""
    if not mine or not theirs:
        return ""
    for number, (one, other) in enumerate(zip_longest(mine, theirs, fillvalue="missing")):
        if one != other:
            return f" (parameter {number} is {one} here, and {other} there)"
    return ""
