"""The pace of a test's trainers: while a replica is away they go slowly, so that the job still runs when the
replica comes back.
"""

import math
import os
import time
from pathlib import Path

import fabric.client

_PATIENT_S = 4.0
# In this many last steps the trainers also wait for a replaying newcomer, which may be slow.
_LAST_STEPS = 6


def leave_time(session: fabric.client.Session, left: int, step_s: float) -> None:
    """Pause at the beginning of a step, with ``left`` steps to come; do not pause if no replica is missing.
    With a replica missing, pause six times ``step_s``, and near the end up to four seconds. At the very end
    pause only until a replaying newcomer has caught up.

    TINY_PATIENT_STEPS is the number of last steps with such pauses; 0: none. TINY_REPLICAS is how many
    replicas there must be, if more than the job begins with. Once the file TINY_GO_ON exists there are no
    more pauses, because the missing replica has ended for good."""
    # read here, because the zygote has another environment
    patient_steps = int(os.environ.get("TINY_PATIENT_STEPS", "0"))
    if _is_complete(session) or Path(os.environ.get("TINY_GO_ON", "/nowhere")).exists():
        return
    time.sleep(step_s * 6)
    over = time.monotonic() + _PATIENT_S
    while left <= patient_steps and time.monotonic() < over and not _is_needed(session, left):
        time.sleep(0.01)


def waiting(advance):
    """Return ``StepFeed.advance`` with a wait for replicas that are away."""

    def patient(feed):
        step = advance(feed)
        if step is not None:
            leave_time(feed.session, int(os.environ["EXAMPLE_STEPS"]) - step.number, 0.02)
        return step

    return patient


def _is_complete(session: fabric.client.Session) -> bool:
    replicas = os.environ.get("TINY_REPLICAS") or os.environ.get("FABRIC_REPLICAS", "1").split(":")[-1]
    return len(session.members) >= int(replicas)


def _is_needed(session: fabric.client.Session, left: int) -> bool:
    """Return whether a newcomer replays this member's gradients, or waits for an epoch after its next
    commit.
    """
    member = session._engine.member
    follows = math.inf in member.serving.listeners.values() and left > _LAST_STEPS
    # A step under way while this member pauses may have let the newcomer in.
    joins = member.epochs.newest is not member.epochs.current or _is_complete(session)
    return bool(member.serving.promised or follows or joins)
