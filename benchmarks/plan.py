"""The cost of the planner: a simulated run of SPARe at two sizes, and one reordering after a failure.

Each figure is compared with its own limit: 10,000 steps of 200 groups, the same of 1,000 groups, and the
slowest reordering of 1,000 groups until the first wipe-out. The cost per step must not grow with the square
of the groups: the last figure is the cost per step and group at 1,000 over that at 200.
"""

import random
import statistics
import time

from common import begin, finish, interleave, no_options, table, verdict
from papers.published import SPARE_RUNS

from fabric.plan.advice import SPARePolicy
from fabric.plan.engine import simulate
from fabric.protocol.rules.spare import StackedShards, golomb_offsets, ring_layout

STEPS = 10_000


def simulated(number: int) -> None:
    run = SPARE_RUNS[number]
    redundancy, every, *_ = run.spare
    simulate(run.job(every, STEPS), SPARePolicy(golomb_offsets(run.groups, redundancy)), run.failures)


def slowest_reordering(groups: int = 1000, redundancy: int = 9, seed: int = 0) -> float:
    """Seconds of the slowest `StackedShards.fail` in one random order of failures."""
    shards = StackedShards(ring_layout(groups, golomb_offsets(groups, redundancy)))
    slowest = 0.0
    for group in random.Random(seed).sample(range(groups), groups):
        began = time.perf_counter()
        masked = shards.fail([group]) is not None
        slowest = max(slowest, time.perf_counter() - began)
        if not masked:
            return slowest
    raise AssertionError("every layout is wiped out in the end")


def main() -> None:
    no_options(__doc__)
    begin()
    measured = interleave(
        {"200": lambda: simulated(0), "1000": lambda: simulated(2), "reorder": slowest_reordering},
        rounds=3,
        warm_up=1,
    )
    small, large = (statistics.median(measured[name]) for name in ("200", "1000"))
    reorder_ms = 1000 * statistics.median(measured["reorder"])
    growth = (large / 1000) / (small / 200)
    table(
        "median of three rounds",
        ["what", "median", "limit"],
        [
            ["10,000 steps of 200 groups", f"{small:.2f} s", "3 s"],
            ["10,000 steps of 1,000 groups", f"{large:.2f} s", "10 s"],
            ["slowest reordering, 1,000 groups", f"{reorder_ms:.1f} ms", "20 ms"],
            ["cost per step and group, 1,000 over 200", f"{growth:.2f}", "2"],
        ],
    )
    verdict("des_200_groups_10000_steps_s", small, at_most=3)
    verdict("des_1000_groups_10000_steps_s", large, at_most=10)
    verdict("reorder_1000_groups_ms", reorder_ms, at_most=20)
    verdict("cost_per_step_and_group_ratio", growth, at_most=2)
    finish(
        {
            "des_200_groups_10000_steps_s": round(small, 3),
            "des_1000_groups_10000_steps_s": round(large, 3),
            "reorder_1000_groups_ms": round(reorder_ms, 3),
            "cost_per_step_and_group_ratio": round(growth, 3),
        }
    )


if __name__ == "__main__":
    main()
