"""The wait-for graph of a stalled round, ring orders that avoid bad links, and waits for user code. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

# The most places in the ring to try for one end of a bad link: enough for a roster of thousands.
_PLACES = 64


def root_waiters(waiting: Mapping[str, Sequence[str]], names: Sequence[str]) -> tuple[str, ...]:
    """The members that others wait for, and that wait for no other themselves.

    ``waiting`` names, for each member that reported, the members that it waits for. Members that wait for
    each other in a circle are all excused: a link between two of them is to blame.
    """
    awaited = {other for others in waiting.values() for other in others}
    return tuple(n for n in names if n in awaited and not waiting.get(n))


def ring_order(names: Sequence[str], bad: Mapping[tuple[str, str], int]) -> tuple[str, ...]:
    """Find an order of the ring without bad links, if there is one.

    ``bad`` counts complaints by (sender, receiver). Three members in a ring are all neighbours, so only the
    direction can change. The result is deterministic, and is ``names`` where no link is bad.
    """
    orders = (tuple(names), tuple(reversed(names)))
    best = min(orders, key=lambda order: _cost(order, bad))  # of equal ones the first
    cost, improved = _cost(best, bad), True
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


class StragglerTracker(Struct):
    """How long the others have waited for members that have not come to the exchange."""

    since: dict[str, tuple[int, float]] = field(default_factory=dict)  # member -> its step, and since when
    _reports: dict[str, tuple[str, ...]] = field(default_factory=dict)  # member -> those that it waits for
    _named: Counter[str] = field(default_factory=Counter)  # member -> how many reports name it

    def report(self, by: str, waiting_for: Sequence[str]) -> None:
        """Note for which members ``by`` waits now. A member that no report names any more has come.

        An empty report proves nothing: after a re-forming ``by`` waits for no member until it contributes.
        """
        before, now = self._reports.get(by, ()), tuple(waiting_for)
        if not now or before == now:
            return
        self._reports[by] = now
        self._named.update(now)
        self._withdraw(before)

    def waited_s(self, name: str, step: int, now: float) -> float:
        """Note that a member waits for ``name`` in ``step``; return for how many seconds others have."""
        if self.since.get(name, (-1, now))[0] != step:
            self.since[name] = (step, now)
        return now - self.since[name][1]

    def came(self, name: str) -> None:
        """Note that no member waits for ``name`` any more."""
        self.since.pop(name, None)

    def forget(self, name: str) -> None:
        """Forget what the replaced process of ``name`` said, and what others said about it."""
        self.came(name)
        self._withdraw(self._reports.pop(name, ()))

    def _withdraw(self, names: Sequence[str]) -> None:
        for name in names:
            self._named[name] -= 1
            if not self._named[name]:
                del self._named[name]
                self.came(name)


class RingRebuilds(Struct):
    """The rebuilds of the ring since the last committed step, and the complaints that led to them."""

    tries: int = 0
    blame: Counter[str] = field(default_factory=Counter)  # member -> complaints about it
    links: Counter[tuple[str, str]] = field(default_factory=Counter)  # complaints, by link of the ring
    stuck: Counter[str] = field(default_factory=Counter)  # member -> stalls of it without an excuse

    def forget(self, name: str) -> None:
        """Forget the complaints about the replaced process of ``name``."""
        del self.blame[name], self.stuck[name]
        for link in [x for x in self.links if name in x]:
            del self.links[link]
