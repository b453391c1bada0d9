"""When a replica that starts again takes its state from its own hosts' memory.

Its snapshot there is older than the members' state, so it also fetches the published gradients since then. It
does so where these have fewer bytes than a newer state.
"""

from collections.abc import Mapping, Set

from fabric.model import SnapshotRef

# Members hold the gradients of so many steps in any case, and of so many for a newcomer.
ALWAYS_KEPT, KEPT = 2, 5


def replay_steps(state_bytes: int, gradient_bytes: int) -> int:
    """The most gradients that together have fewer bytes than the state."""
    return max(0, state_bytes - 1) // gradient_bytes if gradient_bytes else 0


def own_snapshot(
    held: Mapping[SnapshotRef, Set[str]], own: Set[str], now: tuple[int, int], kept_from: int, most: int
) -> SnapshotRef | None:
    """The newest snapshot from which to replay, of those in ``held`` (with their servers), or None.

    ``own``: the replica's servers; ``now``: the job's generation and step; ``kept_from``: the oldest step
    whose gradient members hold; ``most``: see ``replay_steps``. Members may drop one gradient of ``KEPT``
    before the replica asks. Of unequal snapshots of a step nobody knows here which one is right.
    """
    (generation, step), oldest = now, max(now[1] - min(most, KEPT - 1), kept_from)
    there = [ref for ref in held if ref.generation == generation and oldest <= ref.step <= step]
    steps = [ref.step for ref in there]
    fits = [ref for ref in there if steps.count(ref.step) == 1 and not own.isdisjoint(held[ref])]
    return max(fits, key=lambda ref: ref.step, default=None)
