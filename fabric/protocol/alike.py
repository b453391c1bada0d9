"""What all members of a job must have in common, seen before they join: a difference that is met later ends
in rounds that can never be exchanged."""

from itertools import zip_longest

from fabric.protocol.messages import Session

# ``Session.plane`` for people.
_PLANES = {"host": "in host memory", "device": "on a GPU", "nccl": "through NCCL"}


def difference(mine: Session, theirs: Session) -> str:
    """Why these two cannot be members of one job, in a sentence that says what to do; empty when they can."""
    me, other = mine.replica, theirs.replica
    what, tensor = _what(mine, theirs), _tensor(mine.tensors, theirs.tensors)
    if what:
        return (
            f"{me} has other {what} than {other}{tensor}: start every replica with the same model, data set, "
            "batch sizes and number of steps"
        )
    if mine.plane and theirs.plane and mine.plane != theirs.plane:
        return (
            f"{me} exchanges gradients {_place(mine)} and {other} {_place(theirs)}: have the parameters of "
            "every replica on the same kind of device, with the same FABRIC_DATA_PLANE"
        )
    return ""


def _place(session: Session) -> str:
    return _PLANES.get(session.plane, f"by {session.plane}")


def _what(a: Session, b: Session) -> str:
    if len(a.ranks) != len(b.ranks):
        return f"ranks ({1 + len(a.ranks)} and not {1 + len(b.ranks)})"
    if a.layout != b.layout:
        return "parameters (names, shapes, dtypes or their order)"
    if (a.micro_batches, a.data, a.sharing) != (b.micro_batches, b.data, b.sharing):
        return "data settings"
    return ""


def _tensor(mine: tuple[str, ...], theirs: tuple[str, ...]) -> str:
    """The first parameter that differs, for people; empty when nobody described them, or all are alike."""
    if not mine or not theirs:
        return ""
    for number, (one, other) in enumerate(zip_longest(mine, theirs, fillvalue="missing")):
        if one != other:
            return f" (parameter {number} is {one} here, and {other} there)"
    return ""
