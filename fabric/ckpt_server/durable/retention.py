"""Which folders of durable checkpoints go when another one is complete. Pure."""

from collections.abc import Iterable

from fabric.ckpt_server.durable.manifest import Attempt


def attempts_to_delete(
    complete: Iterable[Attempt], unfinished: Iterable[Attempt], mine: Attempt, keep: int
) -> list[Attempt]:
    """What to delete now that ``mine`` is complete, the worst first: tries that came to nothing, then all but
    the newest ``keep`` complete ones.

    A folder without a marker may belong to somebody who still writes: it goes when it is older than ``mine``
    (nobody would want it), or when it is this replica's own, which writes one at a time.
    """
    order = {a: (a.generation, a.step) for a in (*complete, mine)}
    dead = [
        a
        for a in unfinished
        if a != mine and ((a.generation, a.step) < order[mine] or a.replica == mine.replica)
    ]
    newest_last = sorted(order, key=lambda a: (*order[a], a == mine, a.folder))
    return dead + newest_last[: max(len(newest_last) - max(keep, 1), 0)]
