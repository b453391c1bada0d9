"""Which micro-batches kill whoever computes them, from what checkpoint servers saw. Pure.

A trainer notes in its server's memory which micro-batch its main thread is at; the server survives it, and
its status names the micro-batch that the process died at. One death proves nothing: machines die. Two
processes that died at the same micro-batch of the same step are taken as proof.
"""

from collections.abc import Collection, Iterable, Mapping

from fabric.model import Death, Poison

# So many deaths at one micro-batch, and nobody is given it again.
ENOUGH = 2
# More micro-batches than these are not a bad sample, but a bad program: the job stops.
MOST = 64

# (step, micro-batch) -> the processes that died at it, as (replica, incarnation).
Deaths = Mapping[tuple[int, int], frozenset[tuple[str, int]]]


def proven(
    statuses: Iterable[tuple[str, Iterable[Death]]], excused: Collection[tuple[str, Death]] = ()
) -> Deaths:
    """The micro-batches at which enough processes died; ``statuses`` are (replica, what its server saw)."""
    found: dict[tuple[int, int], set[tuple[str, int]]] = {}
    for replica, deaths in statuses:
        for death in deaths:
            if (replica, death) not in excused:
                who = found.setdefault((death.step, death.micro_batch), set())
                who.add((replica, death.incarnation))
    return {place: frozenset(who) for place, who in sorted(found.items()) if len(who) >= ENOUGH}


def merged(known: Iterable[Poison], deaths: Deaths) -> tuple[Poison, ...]:
    """``known`` and the micro-batches of ``deaths``, by step."""
    by_step: dict[int, set[int]] = {}
    for poison in known:
        by_step.setdefault(poison.step, set()).update(poison.micro_batches)
    for step, micro_batch in deaths:
        by_step.setdefault(step, set()).add(micro_batch)
    return tuple(Poison(step, tuple(sorted(ids))) for step, ids in sorted(by_step.items()))


def size(poison: Iterable[Poison]) -> int:
    """How many micro-batches."""
    return sum(len(p.micro_batches) for p in poison)


def sentence(deaths: Deaths) -> str:
    """What happened and what to do, for a person."""
    places = [
        f"micro-batch {micro_batch} of step {step} ({', '.join(sorted({name for name, _ in who}))})"
        for (step, micro_batch), who in deaths.items()
    ]
    return (
        f"{ENOUGH} processes died while they computed {'; '.join(places)}: nobody else is given it. Look at "
        'its samples and at the ends of those processes, or let it be skipped with on_poison="skip"'
    )
