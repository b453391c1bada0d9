"""Published formulas for stacked shards and replication (SPARe, arXiv 2603.00357).

N is the number of groups, r the redundancy (hosts per shard type), k the failures since the last global
restart. Scalars in, scalars out. The arguments are those of a valid `Cluster`.
"""

import math

from fabric.model import Value


def stack_depth_bound(groups: int, failures: int) -> int:
    """c(k) = ceil(N / (N - k)): the least stack depth at which N - k survivors compute N types (section
    3)."""
    return -(-groups // (groups - failures))


def masked_failures(groups: int, redundancy: int) -> float:
    """mu(N, r), the mean number of failures that a Golomb layout masks, as the series
    sum over k = 1 .. N - 1 of (1 - C(k, r) / C(N, r)) ** N."""
    hosts = math.comb(groups, redundancy)
    return math.fsum((1 - math.comb(k, redundancy) / hosts) ** groups for k in range(1, groups))


def masked_failures_replication(groups: int, redundancy: int) -> float:
    """mu for traditional replication in blocks of r groups: Gamma(1 + 1/r) * N * (r / N) ** (1/r)."""
    return math.gamma(1 + 1 / redundancy) * groups * math.pow(redundancy / groups, 1 / redundancy)


def mean_overhead(groups: int, masked: float) -> float:
    """S_bar without patch stacks: the mean number of stacks per step, the mean of c(k) over k < floor(mu)."""
    count = min(max(1, math.floor(masked)), groups - 1)
    return math.fsum(stack_depth_bound(groups, k) for k in range(count)) / count


def optimal_interval(save_s: float, up_s: float, restart_s: float) -> float:
    """T_c* = T_s + sqrt(T_s^2 + 2 T_s (T_f + T_r)): seconds from one checkpoint to the next, the save
    included.

    ``up_s`` (T_f) is the mean time between global restarts, ``restart_s`` (T_r) the length of a restart.
    """
    return save_s + math.sqrt(save_s * save_s + 2 * save_s * (up_s + restart_s))


def availability(interval_s: float, save_s: float, up_s: float, restart_s: float) -> float:
    """A(T_c) = T_f (1 - T_s / T_c) / (T_f + T_r + T_c / 2): the share of time that makes lasting progress."""
    return up_s * (1 - save_s / interval_s) / (up_s + restart_s + interval_s / 2)


class JointOptimum(Value):
    """A redundancy with its best checkpoint interval."""

    redundancy: int
    overhead: float  # S_bar, stacks per step
    objective: float  # J(r) = S_bar / A*, the time to train over that of one stack per step and no failures


def joint_objective(
    groups: int, redundancy: int, *, save_s: float, restart_s: float, mtbf_s: float
) -> JointOptimum:
    """J(r) = S_bar / A(T_c*), with T_f = mu(N, r) * m; ``mtbf_s`` is m, the mean time between failures of the
    whole system."""
    masked = masked_failures(groups, redundancy)
    up_s = max(masked, 1.0) * mtbf_s
    interval_s = optimal_interval(save_s, up_s, restart_s)
    overhead = mean_overhead(groups, masked)
    share = 1.0 if interval_s == 0 else availability(interval_s, save_s, up_s, restart_s)
    return JointOptimum(redundancy, overhead, overhead / share)


def best_redundancy(
    groups: int,
    *,
    save_s: float,
    restart_s: float,
    mtbf_s: float,
    most: int = 26,
) -> JointOptimum:
    """argmin of J(r) over r = 2 .. ``most``; rulers of up to 26 marks are known. The smaller r wins a tie."""
    candidates = range(2, max(3, min(most, groups - 1) + 1))
    return min(
        (joint_objective(groups, r, save_s=save_s, restart_s=restart_s, mtbf_s=mtbf_s) for r in candidates),
        key=lambda optimum: optimum.objective,
    )
