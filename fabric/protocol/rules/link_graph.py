"""The largest set of members that all reach each other, from the members' complaints. Pure.

"Links that are cut" in docs/protocol.md. The commit needs a link between every two members, so no ring order
helps where a link is missing. The leader keeps that set and leaves the other members out in one epoch. They
come back when their links have worked for a while, so a link that fails repeatedly costs one change.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct, field

from fabric.model import ReplicaProcess

# Up to this many members with a missing link the search is exhaustive. With more such members, the chosen set
# may be smaller than the largest possible set.
EXACT = 16
# Seconds that the links of a member that was left out must work before it comes back, doubled every time.
CALM_S = 5.0
CALM_LIMIT_S = 12.0
# After this many seconds without a missing link a process counts as one that never missed a link.
FORGET_S = 600.0

Pair = tuple[str, str]


def missing_links(unreachable: Mapping[str, Iterable[str]], names: Collection[str]) -> set[Pair]:
    """The links between ``names`` of which one end cannot reach the other: a link needs both directions."""
    members = frozenset(names)
    pairs = ((by, about) for by, others in unreachable.items() for about in others)
    return {(min(p), max(p)) for p in pairs if p[0] != p[1] and members.issuperset(p)}


def reachable_set(
    seniority: Sequence[str], missing: Collection[Pair], newcomers: Collection[str] = ()
) -> tuple[str, ...]:
    """Choose the set of members that goes on: all links between them work.

    It is the set with the most veterans (members that are not ``newcomers``), then with the most members,
    then with the most senior ones. ``seniority`` names all members, the most senior first. With more than
    ``EXACT`` ends of missing links it is any set to which no member can be added.
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


def _best(neighbours: Mapping[int, set[int]], new: Collection[int]) -> set[int]:
    """Try every way to leave members out, and take the best."""

    def search(left: frozenset[int]) -> frozenset[int]:
        cut = [i for i in left if neighbours[i] & left]
        if not cut:
            return left
        chosen = max(cut, key=lambda i: (len(neighbours[i] & left), -i))
        without = search(left - {chosen})
        with_it = search(left - neighbours[chosen])
        # The most veterans, then the most members, then the most senior ones.
        return max(
            (without, with_it),
            key=lambda kept: (sum(i not in new for i in kept), len(kept), [-i for i in sorted(kept)]),
        )

    return set(search(frozenset(neighbours)))


def _greedy(neighbours: Mapping[int, set[int]], new: Collection[int]) -> set[int]:
    """Leave out the member that misses the most links until none is missing; then take back all that fit."""
    left = {i: len(others) for i, others in neighbours.items()}
    heap = [(-(i in new), -count, -i) for i, count in left.items()]
    heapq.heapify(heap)
    while heap:
        _, count, place = heapq.heappop(heap)
        i = -place
        if i not in left or left[i] != -count or not left[i]:
            continue  # the member is out already, or the heap's entry is outdated
        del left[i]
        for other in neighbours[i] & left.keys():
            left[other] -= 1
            heapq.heappush(heap, (-(other in new), -left[other], -other))
    kept = set(left)
    for i in sorted(neighbours.keys() - kept, key=lambda i: (i in new, i)):
        if not neighbours[i] & kept:
            kept.add(i)
    return kept


class _Trouble(Struct):
    times: int = 0  # how often the process was left out for its links
    at: float = 0.0  # when a link of the process was last missing


class Healing(Struct):
    """Remembers the processes whose links were cut."""

    _troubles: dict[ReplicaProcess, _Trouble] = field(default_factory=dict)

    def left_out(self, process: ReplicaProcess, now: float) -> None:
        """Note that the process was left out, because a link was missing."""
        trouble = self._troubles.setdefault(process, _Trouble())
        trouble.times = 1 if now - trouble.at > FORGET_S else trouble.times + 1
        trouble.at = now

    def missed(self, process: ReplicaProcess, now: float) -> None:
        """Note that the process says, from outside the roster, that it does not reach all members.

        That counts only for a process that was left out. Another process may miss a member that just died.
        """
        if process in self._troubles:
            self._troubles[process].at = now

    def calm_s(self, process: ReplicaProcess) -> float:
        """How long its links must work before the process comes back; 0 if they always worked."""
        trouble = self._troubles.get(process)
        if trouble is None:
            return 0.0
        return float(min(CALM_S * 2 ** max(0, trouble.times - 1), CALM_LIMIT_S))

    def is_calm(self, process: ReplicaProcess, now: float) -> bool:
        """Whether the links of the process have worked for ``calm_s``."""
        trouble = self._troubles.get(process)
        return trouble is None or now - trouble.at >= self.calm_s(process)

    def forget(self, replica: str) -> None:
        """Forget the missing links of ``replica``, because an operator has mended them."""
        self._troubles = {process: x for process, x in self._troubles.items() if process.replica != replica}
