"""Who is refused a session, in sentences that say what to do; empty where nothing is against it."""

from fabric.model import Record
from fabric.protocol.leader.liveness import Liveness, as_member, vouches
from fabric.protocol.messages.network import OpenSession
from fabric.protocol.rules.compatibility import incompatibility

# Seconds after which a session that says nothing is taken for one that a dead process has left open.
HALF_OPEN_S = 10.0


def replaced(session: OpenSession, liveness: Liveness) -> str:
    """A newer process of the same replica is here already."""
    known = liveness.peers.get(session.replica)
    if known is None or known.incarnation <= session.incarnation:
        return ""
    return f"a newer process of {session.replica} has taken its place: this one must end"


def taken(session: OpenSession, liveness: Liveness, record: Record | None, now: float) -> str:
    """An older process of the same replica lives, as its session or its checkpoint server says."""
    known = liveness.peers.get(session.replica)
    entry = record.member(session.replica) if record is not None else None
    older = [as_member(known.session)] if known is not None else []
    older += [entry] if entry is not None else []
    for member in older:
        if member.incarnation >= session.incarnation or vouches(session, member):
            continue
        if liveness.proven_dead(member):
            continue
        is_known = known is not None and known.incarnation == member.incarnation
        is_heard = known is not None and is_known and known.connected and now - known.seen < HALF_OPEN_S
        if is_heard or liveness.says_running(member, now):
            return (
                f"replica id {session.replica} is taken by a living process: give every replica its own "
                "FABRIC_REPLICA, or end the other process first"
            )
    return ""


def unlike(session: OpenSession, liveness: Liveness) -> str:
    """Another replica has other settings, or asks for the same data slot."""
    for other in liveness.peers.values():
        # Who is away does not count: a whole job may come back with other settings.
        if other.session.replica == session.replica or not other.connected:
            continue
        if session.data_slot >= 0 and session.data_slot == other.session.data_slot:
            return (
                f"{session.replica} and {other.session.replica} both ask for data slot "
                f"{session.data_slot}: give every replica one of its own"
            )
        apart = incompatibility(session, other.session)
        if apart:
            return apart
        if session.data_slot < 0:
            break  # the others are like this one: they were let in
    return ""
