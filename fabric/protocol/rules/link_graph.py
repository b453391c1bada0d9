"""Which members can go on together: the link graph, from what each says it cannot reach. Pure.

The barrier needs a link between every two members, so no ring order helps where one is missing. The leader
keeps the largest set whose members all reach each other, and leaves the others out in one epoch. They come
back when their links have held for a while, so that a link that flaps costs one change and not many.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# So many members with a missing link are looked at exhaustively; among more the set may be smaller than the
# largest.
EXACT = 16
# Seconds that the links of a member that was left out must hold before it comes back, doubled every time.
CALM_S = 5.0
CALM_LIMIT_S = 12.0
# Whoever had no trouble for so many seconds is treated like one that never had any.
FORGET_S = 600.0

Pair = tuple[str, str]


def missing_links(said: Mapping[str, Iterable[str]], names: Collection[str]) -> set[Pair]:
    """The links that somebody cannot use, both ends in ``names``. A link needs both directions, so the word
    of one end is enough."""
    there = frozenset(names)
    pairs = ((by, about) for by, others in said.items() for about in others)
    return {(min(p), max(p)) for p in pairs if p[0] != p[1] and there.issuperset(p)}


def reachable_set(
    seniority: Sequence[str], missing: Collection[Pair], newcomers: Collection[str] = ()
) -> tuple[str, ...]:
    """The set that goes on: no link of it is missing, and it has the most members that are no newcomers, then
    the most members, then the most senior ones. ``seniority`` names all members, the most senior first.

    With more than ``EXACT`` ends of missing links the answer is a set that nobody can be added to.
    """
    neighbours: dict[int, set[int]] = {}
    place = {name: i for i, name in enumerate(seniority)}
    for a, b in missing:
        neighbours.setdefault(place[a], set()).add(place[b])
        neighbours.setdefault(place[b], set()).add(place[a])
    new = {place[name] for name in newcomers if name in place}
    choose = _best if len(neighbours) <= EXACT else _greedy
    kept = choose(neighbours, new) | (set(place.values()) - neighbours.keys())
    return tuple(name for i, name in enumerate(seniority) if i in kept)


def _worth(kept: Collection[int], new: Collection[int]) -> tuple[int, int, tuple[int, ...]]:
    """What is compared: veterans, members, and the places of the most senior ones."""
    return sum(i not in new for i in kept), len(kept), tuple(-i for i in sorted(kept))


def _best(neighbours: Mapping[int, set[int]], new: Collection[int]) -> set[int]:
    """Of every way to leave somebody out, the best."""

    def search(left: frozenset[int]) -> frozenset[int]:
        torn = [i for i in left if neighbours[i] & left]
        if not torn:
            return left
        chosen = max(torn, key=lambda i: (len(neighbours[i] & left), -i))
        without = search(left - {chosen})
        with_it = search(left - neighbours[chosen])
        return max(without, with_it, key=lambda kept: _worth(kept, new))

    return set(search(frozenset(neighbours)))


def _greedy(neighbours: Mapping[int, set[int]], new: Collection[int]) -> set[int]:
    """Leave out whoever misses the most links until none is missing; then take back whom that allows."""
    left = {i: len(others) for i, others in neighbours.items()}
    heap = [(-(i in new), -count, -i) for i, count in left.items()]
    heapq.heapify(heap)
    while heap:
        _, count, place = heapq.heappop(heap)
        i = -place
        if i not in left or left[i] != -count or not left[i]:
            continue  # it is out, or an older word of it
        del left[i]
        for other in neighbours[i] & left.keys():
            left[other] -= 1
            heapq.heappush(heap, (-(other in new), -left[other], -other))
    kept = set(left)
    for i in sorted(neighbours.keys() - kept, key=lambda i: (i in new, i)):
        if not neighbours[i] & kept:
            kept.add(i)
    return kept


@dataclass(slots=True)
class _Trouble:
    """How often a process was left out for its links, and when one of them was last missing."""

    times: int = 0
    at: float = 0.0


@dataclass(slots=True)
class Healing:
    """Remembers whose links were cut, by process (replica, incarnation)."""

    _troubles: dict[tuple[str, int], _Trouble] = field(default_factory=dict)

    def left_out(self, process: tuple[str, int], now: float) -> None:
        """It was left out, for a link was missing."""
        trouble = self._troubles.setdefault(process, _Trouble())
        trouble.times = 1 if now - trouble.at > FORGET_S else trouble.times + 1
        trouble.at = now

    def missed(self, process: tuple[str, int], now: float) -> None:
        """It says, from outside, that it does not reach all members. That counts for whoever was left out: of
        others a member may have just died."""
        if process in self._troubles:
            self._troubles[process].at = now

    def calm_s(self, process: tuple[str, int]) -> float:
        """For how long its links must hold before it comes back; 0 where they were always whole."""
        trouble = self._troubles.get(process)
        if trouble is None:
            return 0.0
        return float(min(CALM_S * 2 ** max(0, trouble.times - 1), CALM_LIMIT_S))

    def is_calm(self, process: tuple[str, int], now: float) -> bool:
        """Whether they have held for that long."""
        trouble = self._troubles.get(process)
        return trouble is None or now - trouble.at >= self.calm_s(process)

    def forget(self, replica: str) -> None:
        """Somebody says that it is mended."""
        self._troubles = {key: x for key, x in self._troubles.items() if key[0] != replica}
