"""How fast the trainers of a test go while a replica of theirs is away: so slowly towards the end that it
finds the job still there, however long its start takes on a loaded machine."""

import os
import time

import fabric.client

_PATIENT_S = 4.0
# In this many last steps the trainers also wait for a replaying newcomer, which may be slow.
_LAST_STEPS = 6


def leave_time(session: fabric.client.Session, left: int, step_s: float) -> None:
    """At the beginning of a step, of which ``left`` are to come: nothing where all are there. Else six times
    ``step_s``, and towards the end until a newcomer needs a step of this one, at most four seconds. At
    the very end it only needs one that could not join without it: one that replays is given time to come up.

    TINY_PATIENT_STEPS says in how many steps before the end; 0: in none, for nobody is to come."""
    # read here, because the zygote has another environment
    patient_steps = int(os.environ.get("TINY_PATIENT_STEPS", "0"))
    if len(session.members) >= int(os.environ.get("FABRIC_REPLICAS", "1").split(":")[-1]):
        return
    time.sleep(step_s * 6)
    over = time.monotonic() + _PATIENT_S
    while left <= patient_steps and time.monotonic() < over and not _is_needed(session, left):
        time.sleep(0.01)


def _is_needed(session: fabric.client.Session, left: int) -> bool:
    """Whether somebody follows this member, or waits for an epoch that begins with its next commit."""
    member = session._engine.member.view
    follows = member.listeners and left > _LAST_STEPS
    return bool(member.promised_snapshots or follows or member.newest is not member.current)
