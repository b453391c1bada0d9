"""Who holds the others up: the wait-for graph of a round that stalled, a ring order that avoids bad links,
and members whose user code keeps everybody waiting. Pure functions and one small memory."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Places that are tried for one end of a bad link: a roster of thousands has room enough among them.
_PLACES = 64


def root_waiters(waiting: Mapping[str, Sequence[str]], names: Sequence[str]) -> tuple[str, ...]:
    """Those for whom somebody waits, directly or through others, and who wait for nobody themselves.

    ``waiting``: whom each member that spoke was waiting for; who did not speak waits for nobody. Members that
    wait for each other in a circle excuse each other: then a link between two of them is to blame.
    """
    awaited = {other for others in waiting.values() for other in others}
    return tuple(n for n in names if n in awaited and not waiting.get(n))


def ring_order(names: Sequence[str], bad: Mapping[tuple[str, str], int]) -> tuple[str, ...]:
    """An order of the ring in which nobody sends over a bad link, where there is one.

    ``bad`` counts complaints by (sender, receiver). Three members in a ring are all neighbours: there the
    direction can be turned, no more. Deterministic; the order stays as it is where nothing is bad.
    """
    best = tuple(names)
    cost = _cost(best, bad)
    turned = tuple(reversed(best))
    if _cost(turned, bad) < cost:
        best, cost = turned, _cost(turned, bad)
    improved = True
    while cost and improved:
        improved = False
        for sender, receiver in sorted(bad):
            if sender not in best or receiver not in best:
                continue
            at = best.index(receiver)
            for step in range(1, min(len(best), _PLACES)):
                other = (at + step) % len(best)
                tried = list(best)
                tried[at], tried[other] = tried[other], tried[at]
                if _cost(tried, bad) < cost:
                    best, cost, improved = tuple(tried), _cost(tried, bad), True
                    break
    return best


def blamed_link(names: Sequence[str], about: str, by: str) -> tuple[str, str] | None:
    """The ring link (sender, receiver) that ``by`` complains of when it names ``about``, or None."""
    if about not in names or by not in names or about == by:
        return None
    place, other = names.index(by), names.index(about)
    if (other + 1) % len(names) == place:
        return about, by
    if (place + 1) % len(names) == other:
        return by, about
    return None


def _cost(names: Sequence[str], bad: Mapping[tuple[str, str], int]) -> int:
    if len(names) < 2:
        return 0
    return sum(bad.get((name, names[(i + 1) % len(names)]), 0) for i, name in enumerate(names))


@dataclass(slots=True)
class StragglerTracker:
    """Since when, and in which step, the others wait for a member that has not come to the exchange."""

    since: dict[str, tuple[int, float]] = field(default_factory=dict)

    def waited_s(self, name: str, step: int, now: float) -> float:
        """Somebody waits for ``name`` in ``step``: for how long that has been so."""
        known = self.since.get(name)
        if known is None or known[0] != step:
            known = self.since[name] = (step, now)
        return now - known[1]

    def came(self, name: str) -> None:
        """Nobody waits for it any more."""
        self.since.pop(name, None)


@dataclass(slots=True)
class RingRebuilds:
    """Tries to form again without a committed step between them: who was blamed, and which ring links."""

    tries: int = 0
    blame: Counter[str] = field(default_factory=Counter)
    links: Counter[tuple[str, str]] = field(default_factory=Counter)
    stuck: Counter[str] = field(default_factory=Counter)
