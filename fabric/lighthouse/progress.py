"""How far a job is, by what its leader's core has heard."""

from dataclasses import asdict
from typing import Any

from fabric.protocol.leader import Leader


def top_step(core: Leader) -> int:
    """The highest step that a member has told of, else where the generation began."""
    record = core.record
    if record is None:
        return 0
    if record.complete:
        return record.base.step
    steps = [
        peer.step
        for name, peer in core.liveness.peers.items()
        if record.lists(name, peer.incarnation) and peer.generation == record.generation
    ]
    return max(steps, default=record.base.step)


def recoverable(core: Leader, now: float) -> dict[str, Any] | None:
    """The freshest state that checkpoint servers hold between them, every lane of it, and how old that is: in
    committed steps, and in seconds since it was the trainers'."""
    roster = core.record.roster if core.record is not None else ()
    ref = core.liveness.freshest(max((len(x.addresses) for x in roster), default=1))
    if ref is None:
        return None
    same = core.record is not None and core.record.generation == ref.generation
    age_s = core.liveness.age_s(ref, now)
    return {
        **asdict(ref),
        "steps_behind": max(0, top_step(core) - ref.step) if same else None,
        "age_s": None if age_s is None else round(age_s, 3),
    }
