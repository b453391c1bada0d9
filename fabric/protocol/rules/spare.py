"""SPARe's stacked shards: which group computes which shard type, and how that changes when groups fail.

The method is that of arXiv 2603.00357. A job has N groups and N shard types per step. Every type can be
read by r groups. A group keeps the types that it can read in an ordered *stack* and computes the first S of
them in each step; S is the *stack depth*. Without failures S is 1 and nothing is computed twice.

When groups fail, `StackedShards.fail` finds the smallest depth at which every type still has a living host
with a free slot, moves as few types as possible, and says which types must be computed now (the *patch*). A
type without a living host is a *wipe-out*.

Two things are not in the paper. Each type has one *owner*, so a type that was computed twice is summed once.
The patch of the current step is separate from the layout of the next step.

Everything here is integer arithmetic in a fixed order: every replica computes the same result from the same
input.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache

from fabric.model import Value

_FAR = 1 << 30  # larger than the cost of any path

# Optimal Golomb rulers by number of marks, from 1 mark on. Lengths: OEIS A003022.
GOLOMB_RULERS: tuple[tuple[int, ...], ...] = (
    (0,),
    (0, 1),
    (0, 1, 3),
    (0, 1, 4, 6),
    (0, 1, 4, 9, 11),
    (0, 1, 4, 10, 12, 17),
    (0, 1, 4, 10, 18, 23, 25),
    (0, 1, 4, 9, 15, 22, 32, 34),
    (0, 1, 5, 12, 25, 27, 35, 41, 44),
    (0, 1, 6, 10, 23, 26, 34, 41, 53, 55),
    (0, 1, 4, 13, 28, 33, 47, 54, 64, 70, 72),
    (0, 2, 6, 24, 29, 40, 43, 55, 68, 75, 76, 85),
    (0, 2, 5, 25, 37, 43, 59, 70, 85, 89, 98, 99, 106),
    (0, 4, 6, 20, 35, 52, 59, 77, 78, 86, 89, 99, 122, 127),
    (0, 4, 20, 30, 57, 59, 62, 76, 100, 111, 123, 136, 144, 145, 151),
    (0, 1, 4, 11, 26, 32, 56, 68, 76, 115, 117, 134, 150, 163, 168, 177),
    (0, 5, 7, 17, 52, 56, 67, 80, 81, 100, 122, 138, 159, 165, 168, 191, 199),
    (0, 2, 10, 22, 53, 56, 82, 83, 89, 98, 130, 148, 153, 167, 188, 192, 205, 216),
    (0, 1, 6, 25, 32, 72, 100, 108, 120, 130, 153, 169, 187, 190, 204, 231, 233, 242, 246),
    (0, 1, 8, 11, 68, 77, 94, 116, 121, 156, 158, 179, 194, 208, 212, 228, 240, 253, 259, 283),
    (0, 2, 24, 56, 77, 82, 83, 95, 129, 144, 179, 186, 195, 255, 265, 285, 293, 296, 310, 329, 333),
    (0, 1, 9, 14, 43, 70, 106, 122, 124, 128, 159, 179, 204, 223, 253, 263, 270, 291, 330, 341, 353,
     356),
    (0, 3, 7, 17, 61, 66, 91, 99, 114, 159, 171, 199, 200, 226, 235, 246, 277, 316, 329, 348, 350, 366,
     372),
    (0, 9, 33, 37, 38, 97, 122, 129, 140, 142, 152, 191, 205, 208, 252, 278, 286, 326, 332, 353, 368,
     384, 403, 425),
    (0, 12, 29, 39, 72, 91, 146, 157, 160, 161, 166, 191, 207, 214, 258, 290, 316, 354, 372, 394, 396,
     431, 459, 467, 480),
    (0, 1, 33, 83, 104, 110, 124, 163, 185, 200, 203, 249, 251, 258, 314, 318, 343, 356, 386, 430, 440,
     456, 464, 475, 487, 492),
)  # fmt: skip


def golomb_offsets(groups: int, redundancy: int) -> tuple[int, ...]:
    """The optimal Golomb ruler with ``redundancy`` marks, as offsets for a ring of ``groups``.

    Two types then share at most one host. Raises ValueError where no ruler is known (r > 26), or where the
    ring is too small for it (N < 2 * length + 1): differences would repeat around the end.
    """
    _check(groups, redundancy)
    if redundancy > len(GOLOMB_RULERS):
        raise ValueError(
            f"no optimal Golomb ruler of {redundancy} marks is known: choose a redundancy of"
            f" {len(GOLOMB_RULERS)} or less"
        )
    ruler = GOLOMB_RULERS[redundancy - 1]
    if groups < 2 * ruler[-1] + 1:
        raise ValueError(
            f"{groups} groups are too few for a Golomb layout of redundancy {redundancy}: it needs"
            f" {2 * ruler[-1] + 1}"
        )
    return ruler


def consecutive_offsets(groups: int, redundancy: int) -> tuple[int, ...]:
    """Offsets 0 to r - 1, for ``groups`` too few for a Golomb ruler."""
    _check(groups, redundancy)
    return tuple(range(redundancy))


def best_offsets(groups: int, redundancy: int) -> tuple[int, ...]:
    """The Golomb offsets if they fit, else offsets with distinct differences, else consecutive offsets.

    Distinct differences cover perfect difference sets such as 7 groups with (0, 1, 3).
    """
    try:
        return golomb_offsets(groups, redundancy)
    except ValueError:
        _check(groups, redundancy)
    if redundancy <= len(GOLOMB_RULERS):
        ruler = GOLOMB_RULERS[redundancy - 1]
        if ruler[-1] < groups and has_distinct_differences(groups, ruler):
            return ruler
    return consecutive_offsets(groups, redundancy)


def has_distinct_differences(groups: int, offsets: Sequence[int]) -> bool:
    """Whether no difference of two ``offsets`` repeats around a ring of ``groups``.

    Two types then share at most one host.
    """
    differences = [(b - a) % groups for a in offsets for b in offsets if a != b]
    return len(set(differences)) == len(differences)


def ring_layout(groups: int, offsets: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The stack of every group: group w hosts the types (w + o) mod N, in the order of ``offsets``."""
    return tuple(tuple((group + offset) % groups for offset in offsets) for group in range(groups))


def _check(groups: int, redundancy: int) -> None:
    if groups < 1:
        raise ValueError(f"a job needs at least 1 group, not {groups}")
    if not 1 <= redundancy <= groups:
        raise ValueError(f"the redundancy must be 1 to {groups}, the number of groups, not {redundancy}")


class Patch(Value):
    """The work of the survivors after a failure, before they retry the exchange."""

    compute: dict[int, tuple[int, ...]]  # group -> the types to compute now, in ascending order
    depth: int  # the stack depth from the next step on
    deeper: bool  # the depth rose, so every survivor computes one more slot per level

    @property
    def slots(self) -> int:
        """The number of types that the busiest group computes: the time of the patch in units of one type."""
        return max((len(types) for types in self.compute.values()), default=0)


class StackedShards:
    """Stacks, owners and depth of a job, from its layout and the failures so far."""

    def __init__(self, stacks: Sequence[Sequence[int]]) -> None:
        """``stacks``: per group the types that it hosts. Types are 0 to N - 1, one per group.

        Raises ValueError where a stack repeats a type, names one that does not exist, or a type has no host.
        """
        self._stacks = [list(stack) for stack in stacks]
        self._owners = _Owners(stacks)
        self.owner = self._owners.owner  # per type the group whose copy is summed
        orphan = next((type_ for type_, hosts in enumerate(self._owners.hosts) if not hosts), None)
        if orphan is not None:
            raise ValueError(f"no group hosts type {orphan}: the layout is not complete")
        self.alive = set(range(len(stacks)))
        self.depth = 0
        self._plan(range(len(stacks)))

    def stack(self, group: int) -> tuple[int, ...]:
        """The types of ``group`` in the order in which it computes them; it computes the first ``depth``."""
        return tuple(self._stacks[group])

    def computes(self, group: int) -> tuple[int, ...]:
        """The types that ``group`` computes in a step without failures."""
        return tuple(self._stacks[group][: self.depth])

    def fail(self, groups: Iterable[int]) -> Patch | None:
        """Take ``groups`` out; return the work of the survivors, or None at a wipe-out.

        After a wipe-out nothing has changed: the caller restarts the job, or waits for a host to come back.
        """
        lost = self.alive.intersection(groups)
        remaining = self.alive - lost
        hosts = self._owners.hosts
        if any(remaining.isdisjoint(hosts[type_]) for group in lost for type_ in self._stacks[group]):
            return None
        self.alive = remaining
        orphans = sorted(type_ for group in lost for type_ in self._owners.owned[group])
        for type_ in orphans:
            self._owners.give(type_, -1)
        before = self.depth
        return Patch(self._plan(orphans), self.depth, self.depth > before)

    # --- planning ------------------------------------------------------------------------------------

    def _plan(self, orphans: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Give every orphan an owner, deepen the stacks if needed, and return what to compute now."""
        computed = {group: set(self._stacks[group][: self.depth]) for group in self.alive}
        homeless = []
        for type_ in orphans:
            hosts = self._owners.hosts[type_]
            host = next((g for g in hosts if g in computed and type_ in computed[g]), None)
            if host is None:
                homeless.append(type_)
            else:
                self._owners.give(type_, host)
        before = self.depth
        least = before or -(-len(self.owner) // len(self.alive))
        self.depth = self._owners.settle(homeless, computed, least)
        return self._reorder(computed, before)

    def _reorder(self, computed: dict[int, set[int]], depth_before: int) -> dict[int, tuple[int, ...]]:
        """Put the types that a group owns into its first ``depth`` slots; return what each must compute now.

        Fill the other slots with types that the group has computed already, then with the next types of its
        stack.
        """
        patch: dict[int, tuple[int, ...]] = {}
        for group, done in computed.items():
            stack, owned = self._stacks[group], self._owners.owned[group]
            if self.depth == depth_before and owned <= done and depth_before:
                continue
            free = self.depth - len(owned)
            fill = [t for t in stack if t not in owned and t in done]
            fill += [t for t in stack if t not in owned and t not in done]
            first = owned.union(fill[:free])
            self._stacks[group] = [t for t in stack if t in first] + [t for t in stack if t not in first]
            missing = tuple(sorted(first - done))
            if missing:
                patch[group] = missing
        return patch


class Settlement(Value):
    """The group that computes each type while some groups are absent."""

    owner: tuple[int, ...]  # per type; -1 where no host is present
    depth: int  # the most types that any group computes


@lru_cache(maxsize=256)
def settle(groups: int, redundancy: int, present: frozenset[int]) -> Settlement:
    """The owners of all types while only the groups in ``present`` are there.

    Every type stays with its own group where that group is present. The other types go to present hosts at
    the smallest feasible depth. As few types as possible leave their own group. No type is computed twice.
    """
    stacks = ring_layout(groups, best_offsets(groups, redundancy))
    owners = _Owners(stacks)
    computed = {group: {group} for group in sorted(present)}
    for group in computed:
        owners.give(group, group)
    homeless = [t for t in range(groups) if t not in present and not present.isdisjoint(owners.hosts[t])]
    if not present:
        return Settlement(tuple(owners.owner), 0)
    least = -(-(len(homeless) + len(present)) // len(present))
    depth = owners.settle(homeless, computed, least)
    return Settlement(tuple(owners.owner), depth)


@lru_cache(maxsize=256)
def hosts_of(type_: int, groups: int, redundancy: int) -> tuple[int, ...]:
    """The groups that host ``type_``, its own first: (type - o) mod N for every offset o."""
    return tuple((type_ - offset) % groups for offset in best_offsets(groups, redundancy))


def stack_of(group: int, groups: int, redundancy: int) -> tuple[int, ...]:
    """The types that ``group`` hosts, its own first: (group + o) mod N for every offset o."""
    return tuple((group + offset) % groups for offset in best_offsets(groups, redundancy))


class _Owners:
    """Which group owns each type, and the assignment of types to hosts with a limit per group."""

    def __init__(self, stacks: Sequence[Sequence[int]]) -> None:
        types = len(stacks)
        self.hosts: list[list[int]] = [[] for _ in range(types)]
        for group, stack in enumerate(stacks):
            if len(set(stack)) != len(stack) or not all(0 <= type_ < types for type_ in stack):
                raise ValueError(
                    f"the stack of group {group} repeats a type, or names one outside 0 to {types - 1}"
                )
            for type_ in stack:
                self.hosts[type_].append(group)
        self.owner = [-1] * types
        self.owned: list[set[int]] = [set() for _ in range(types)]

    def give(self, type_: int, group: int) -> None:
        """Make ``group`` the owner of ``type_``; -1 leaves it without one."""
        previous = self.owner[type_]
        if previous >= 0:
            self.owned[previous].discard(type_)
        self.owner[type_] = group
        if group >= 0:
            self.owned[group].add(type_)

    def settle(self, homeless: Sequence[int], computed: dict[int, set[int]], depth: int) -> int:
        """Give all of ``homeless`` an owner at minimum cost: the smallest feasible depth from ``depth`` on.

        ``computed``: per present group the types that it has computed already. Every type in ``homeless``
        must have a present host.
        """
        before = tuple(self.owner)
        while not self._assign(homeless, computed, depth):
            for type_, owner in enumerate(before):
                self.give(type_, owner)
            depth += 1
        return depth

    def _assign(self, homeless: Sequence[int], computed: dict[int, set[int]], depth: int) -> bool:
        cheap = True  # whether every type so far cost 1, which is the least possible cost
        for type_ in homeless:
            search = _PathSearch(self.hosts, self.owned, computed, depth, cheap)
            search.run(type_)
            if search.goal < 0:
                return False
            for moved, group in search.path():
                self.give(moved, group)
            cheap = cheap and search.cost == 1
        return True


class _PathSearch:
    """The cheapest augmenting path that gives one more type an owner.

    A step of the path gives a type to another of its hosts. It costs 1 where that host has not computed the
    type, and returns the cost of the host that gives it up. Cheapest paths, one type after the other, keep
    the whole assignment at minimum cost (successive shortest paths). Where all paths so far were ``cheap``
    (cost 1), a path of cost 1 cannot be beaten, and the search ends there.
    """

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        owned: Sequence[set[int]],
        computed: dict[int, set[int]],
        depth: int,
        cheap: bool,
    ) -> None:
        self._hosts, self._owned, self._computed = hosts, owned, computed
        self._depth, self._cheap = depth, cheap
        self._cost: dict[int, int] = {}  # group -> the cost to reach it with one type too many
        # Reached group -> the type that it takes, and the group that gives up the type (-1: no owner).
        self._via: dict[int, tuple[int, int]] = {}
        self._queue: deque[int] = deque()
        self.goal = -1  # the group with a free slot at the end of the path; -1: there is no path
        self.cost = _FAR  # the cost of the path

    def run(self, type_: int) -> None:
        """Search for an owner of ``type_``, which has none."""
        self._move(type_, -1, 0)
        while self._queue and not (self._cheap and self.cost == 1):
            group = self._queue.popleft()
            for moved in sorted(self._owned[group]):
                self._move(moved, group, self._cost[group])

    def _move(self, type_: int, source: int, cost: int) -> None:
        """Follow the steps that give ``type_`` from ``source`` to each other host."""
        returned = 0 if source < 0 else int(type_ not in self._computed[source])
        for group in self._hosts[type_]:
            if group == source or group not in self._computed:
                continue
            reached = cost + int(type_ not in self._computed[group]) - returned
            if reached >= self._cost.get(group, _FAR) or (self._cheap and reached >= self.cost):
                continue
            self._cost[group], self._via[group] = reached, (type_, source)
            if len(self._owned[group]) >= self._depth:
                if group not in self._queue:
                    self._queue.append(group)
            elif reached < self.cost:
                self.goal, self.cost = group, reached

    def path(self) -> list[tuple[int, int]]:
        """The moves as (type, new owner), from the free slot back to the type that had no owner."""
        moves, group = [], self.goal
        while group >= 0:
            type_, source = self._via[group]
            moves.append((type_, group))
            group = source
        return moves
