"""Cut work to measured speeds: micro-batches to replicas, layers to stages, ranks to a tensor-parallel group.

A speed is a throughput; only its ratio to the other speeds counts. The speed 0 belongs to a dead device.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fabric.model import apportion

# The fastest speed as an integer: integers divide exactly, and equally on every host.
_UNIT = 1 << 40


def micro_batch_shares(total: int, speeds: Sequence[float], least: int = 1) -> tuple[int, ...]:
    """Split ``total`` micro-batches in proportion to ``speeds``, by the largest remainder; ties go to the
    first.

    A replica with a speed gets at least ``least``, so that its speed stays measured. A replica with the
    speed 0 gets none. Raises ValueError for values that are not speeds, and where ``total`` is too small to
    give each replica ``least``.
    """
    check_speeds(speeds, "replica")
    able = [place for place, speed in enumerate(speeds) if speed > 0]
    if not able:
        raise ValueError("all replicas have the speed 0: no replica can compute the micro-batches")
    if least * len(able) > total:
        raise ValueError(f"{total} micro-batches are too few for {len(able)} replicas: use fewer replicas")
    shares = [0] * len(speeds)
    while able:
        rest, weight = total - sum(shares), math.fsum(speeds[place] for place in able)
        quotas = {place: rest * speeds[place] / weight for place in able}
        small = [place for place in able if quotas[place] < least]
        if not small:
            fastest = max(speeds)
            parts = apportion(rest, [round(speeds[place] / fastest * _UNIT) for place in able])
            for place, part in zip(able, parts, strict=True):
                shares[place] = part
            break
        # The slowest replica gets ``least`` first, which leaves fewer micro-batches for the others.
        slowest = min(small, key=lambda place: (speeds[place], place))
        shares[slowest] = least
        able.remove(slowest)
    return tuple(shares)


def cut_layers(layers: int, speeds: Sequence[float], most: int = 0) -> tuple[int, ...]:
    """Cut ``layers`` equal layers into stages, at least 1 each, with the smallest slowest stage.

    The slowest stage has max(l_s / v_s). Greedy: the next layer goes to the stage with the smallest (l_s + 1)
    / v_s, ties to the first. For equal layers no cut is better. ``most``: the layers that fit into the memory
    of a stage; 0 means no limit. Raises ValueError where no such cut exists.
    """
    check_speeds(speeds, "stage")
    stages = len(speeds)
    if not stages or min(speeds) == 0:
        raise ValueError("a stage has the speed 0: leave it out before you cut the layers")
    if layers < stages:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages: use at most {layers} stages")
    most = most or layers
    if layers > most * stages:
        raise ValueError(f"{stages} stages of at most {most} layers cannot hold {layers}: use more stages")
    cut = [1] * stages
    queue = [(2 / speed, stage) for stage, speed in enumerate(speeds) if most > 1]
    heapq.heapify(queue)
    for _ in range(layers - stages):
        _, stage = heapq.heappop(queue)
        cut[stage] += 1
        if cut[stage] < most:
            heapq.heappush(queue, ((cut[stage] + 1) / speeds[stage], stage))
    return tuple(cut)


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """The ranks that work as one tensor-parallel or FSDP group."""

    ranks: tuple[int, ...]  # ascending
    speed: float  # k times the slowest rank's speed


def select_group(speeds: Mapping[int, float], sizes: Iterable[int]) -> GroupChoice:
    """Choose the k fastest living ranks for which k * min(speed) is largest; ties go to the smaller k.

    ``speeds``: rank -> speed. ``sizes``: the numbers of ranks that the model allows. Raises ValueError where
    no size fits the living ranks.
    """
    check_speeds(tuple(speeds.values()), "rank")
    fastest = sorted((rank for rank in speeds if speeds[rank] > 0), key=lambda rank: (-speeds[rank], rank))
    fitting = sorted({size for size in sizes if 1 <= size <= len(fastest)})
    if not fitting:
        raise ValueError(
            f"no group of the {len(fastest)} living ranks has a size that the model allows: add a machine"
        )
    best = max(fitting, key=lambda size: (size * speeds[fastest[size - 1]], -size))
    return GroupChoice(tuple(sorted(fastest[:best])), best * speeds[fastest[best - 1]])


def check_speeds(speeds: Sequence[float], what: str) -> None:
    """Raise ValueError for the first speed that is not a finite number of at least 0."""
    for place, speed in enumerate(speeds):
        if not (math.isfinite(speed) and speed >= 0):
            raise ValueError(f"{what} {place} has the speed {speed:g}: measure it again before you plan")
