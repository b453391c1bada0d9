"""Reasons to refuse a session, as sentences that say what to do; empty if the session may stand."""

from fabric.model import Record
from fabric.protocol.leader.liveness import Liveness, as_member, vouches
from fabric.protocol.messages.network import OpenSession
from fabric.protocol.rules.compatibility import incompatibility

# A session that is silent for this many seconds counts as left open by a dead process.
HALF_OPEN_S = 10.0


def replaced(session: OpenSession, liveness: Liveness) -> str:
    """Refuse a session if a newer process of its replica is here."""
    peer = liveness.peers.get(session.replica)
    if peer is None or peer.incarnation <= session.incarnation:
        return ""
    return f"a newer process of {session.replica} has taken its place: this one must end"


def taken(session: OpenSession, liveness: Liveness, record: Record | None, now: float) -> str:
    """Refuse a session if an older process of its replica lives, by its session or checkpoint server."""
    peer = liveness.peers.get(session.replica)
    entry = record.member(session.replica) if record is not None else None
    older = [as_member(peer.session)] if peer is not None else []
    older += [entry] if entry is not None else []
    for member in older:
        if member.incarnation >= session.incarnation or vouches(session, member):
            continue
        if liveness.proven_dead(member):
            continue
        is_same = peer is not None and peer.incarnation == member.incarnation
        is_heard = peer is not None and is_same and peer.connected and now - peer.seen < HALF_OPEN_S
        if is_heard or liveness.says_running(member, now):
            return (
                f"replica id {session.replica} is taken by a living process: give every replica its own "
                "FABRIC_REPLICA, or end the other process first"
            )
    return ""


def unlike(session: OpenSession, liveness: Liveness) -> str:
    """Refuse a session if another replica has other settings, or asks for the same data slot."""
    for other in liveness.peers.values():
        # Compare only connected replicas: all replicas of a job may come back with new settings.
        if other.session.replica == session.replica or not other.connected:
            continue
        if session.data_slot >= 0 and session.data_slot == other.session.data_slot:
            return (
                f"{session.replica} and {other.session.replica} both ask for data slot "
                f"{session.data_slot}: give every replica one of its own"
            )
        why = incompatibility(session, other.session)
        if why:
            return why
        if session.data_slot < 0:
            break  # the other sessions were compared with this one when they opened
    return ""
