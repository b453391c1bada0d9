"""The state that would be left of a job if all its trainers died now."""

from dataclasses import asdict
from typing import Any

from fabric.protocol.leader.view import LeaderView


def recoverable(view: LeaderView, now: float) -> dict[str, Any] | None:
    """Return the freshest state of which checkpoint servers hold every lane, and its age.

    The age is in committed steps, and in seconds since it was the trainers' state."""
    roster = view.record.roster if view.record is not None else ()
    ref = view.liveness.newest_state(max((len(x.addresses) for x in roster), default=1))
    if ref is None:
        return None
    same = view.record is not None and view.record.generation == ref.generation
    age_s = view.liveness.state_age_s(ref, now)
    return {
        **asdict(ref),
        "steps_behind": max(0, view.top_step() - ref.step) if same else None,
        "age_s": None if age_s is None else round(age_s, 3),
    }
