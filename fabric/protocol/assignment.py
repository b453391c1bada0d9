"""Who computes which micro-batches: one pure function of (micro-batches, members, shares).

The global batch of a step is a fixed list of micro-batches; a roster only changes who computes them.
Ranges are contiguous in roster order, so the assignment is stable while the roster is, and sizes follow
the shares by the largest remainder method (ties go to the earlier member).
"""

from collections.abc import Iterable, Mapping, Sequence

from fabric.model import Member


def apportion(count: int, shares: Sequence[int]) -> list[int]:
    """Split ``count`` into integers proportional to ``shares`` that sum to ``count``.

    Hamilton's largest remainder method in integer arithmetic, so that every replica computes the same.
    Shares must not be negative; when all are zero the split is even.
    """
    total = sum(shares)
    if total <= 0:
        shares = [1] * len(shares)
        total = len(shares)
    parts = [count * share // total for share in shares]
    remainders = [(-(count * share % total), i) for i, share in enumerate(shares)]
    for _, index in sorted(remainders)[: count - sum(parts)]:
        parts[index] += 1
    return parts


def assign(micro_batches: Iterable[int], members: Sequence[Member]) -> dict[str, tuple[int, ...]]:
    """Give every micro-batch to exactly one of ``members``, by their shares, in roster order.

    Raises ValueError without members.
    """
    if not members:
        raise ValueError("nobody is left to compute the micro-batches")
    ids = sorted(micro_batches)
    given: dict[str, tuple[int, ...]] = {}
    start = 0
    for member, size in zip(members, apportion(len(ids), [m.shares for m in members]), strict=True):
        given[member.replica] = tuple(ids[start : start + size])
        start += size
    return given


def spread(
    micro_batches: Iterable[int], members: Sequence[Member], load: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """Give the orphaned ``micro_batches`` to ``members``, least relative load first.

    ``load`` is how many each one already has in its kept gradient. Every id goes to exactly one member;
    ties go to the earlier in roster order. A share of zero counts as the smallest positive one here:
    somebody must compute what the dead left.
    """
    if not members:
        raise ValueError("nobody is left to compute the micro-batches")
    given: dict[str, list[int]] = {m.replica: [] for m in members}
    for micro_batch in sorted(micro_batches):
        lightest = min(
            members,
            # Compared as fractions over a common denominator would be exact too; cross-multiplied
            # integers would not order a list, and these floats are small integers' quotients.
            key=lambda m: (load.get(m.replica, 0) + len(given[m.replica]) + 1) / max(m.shares, 1),
        )
        given[lightest.replica].append(micro_batch)
    return {replica: tuple(ids) for replica, ids in given.items()}
