"""How far a job is, by what its leader's core has heard."""

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
