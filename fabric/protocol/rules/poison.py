"""Micro-batches that kill the processes that compute them, by the statuses of checkpoint servers. Pure.

A trainer notes in its server's memory which micro-batch its main thread is at. The server survives the
trainer, and its status names that micro-batch. One death proves nothing, because machines die. Two deaths at
the same micro-batch of the same step count as proof.
"""

from collections.abc import Collection, Iterable, Mapping

from fabric.model import Death, Poison, ReplicaProcess

# After this many deaths at one micro-batch no member computes the micro-batch again.
ENOUGH = 2
# More poisoned micro-batches than this show a bad program, not a bad sample: the job stops.
MOST = 64

# (step, micro-batch) -> the processes that died at it.
Deaths = Mapping[tuple[int, int], frozenset[ReplicaProcess]]


def proven(
    reports: Iterable[tuple[str, Iterable[Death]]], excused: Collection[tuple[str, Death]] = ()
) -> Deaths:
    """The micro-batches at which enough processes died; ``reports`` has the deaths at each replica."""
    victims: dict[tuple[int, int], set[ReplicaProcess]] = {}
    for replica, deaths in reports:
        for death in deaths:
            if (replica, death) not in excused:
                processes = victims.setdefault((death.step, death.micro_batch), set())
                processes.add(ReplicaProcess(replica, death.incarnation))
    return {at: frozenset(dead) for at, dead in sorted(victims.items()) if len(dead) >= ENOUGH}


def merged(poisons: Iterable[Poison], deaths: Deaths) -> tuple[Poison, ...]:
    """``poisons`` and the micro-batches of ``deaths``, by step."""
    by_step: dict[int, set[int]] = {}
    for poison in poisons:
        by_step.setdefault(poison.step, set()).update(poison.micro_batches)
    for step, micro_batch in deaths:
        by_step.setdefault(step, set()).add(micro_batch)
    return tuple(Poison(step, tuple(sorted(ids))) for step, ids in sorted(by_step.items()))


def sentence(deaths: Deaths) -> str:
    """Tell a person what happened and what to do."""
    places = [
        f"micro-batch {micro_batch} of step {step} ({', '.join(sorted({x.replica for x in dead}))})"
        for (step, micro_batch), dead in deaths.items()
    ]
    return (
        f"{ENOUGH} processes died while they computed {'; '.join(places)}: no other member gets it; look at "
        'its samples and at the ends of those processes, or let it be skipped with on_poison="skip"'
    )
