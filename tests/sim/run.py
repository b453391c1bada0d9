"""Play seeds: ``python tests/sim/run.py --seed N`` replays one with its trace, ``--seeds A:B`` hunts;
``--kind`` says in which worlds."""

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "tests")]

from sim import coverage
from sim.adapt_worlds import AdaptWorld
from sim.carried_worlds import carried_world
from sim.cold_worlds import EarlyTwins, cold_world
from sim.data_worlds import CurriculumWorld, RebatchedWorld
from sim.dispute_worlds import ColdDisputeWorld, DisputeWorld, ReportedWorld
from sim.durable_worlds import DurableWorld
from sim.end_worlds import EndWorld, LateNewcomerWorld
from sim.late_worlds import late_world
from sim.link_worlds import CalmWorld, LinkWorld
from sim.mixed_worlds import MixedWorld
from sim.norm_worlds import NormWorld
from sim.notice_worlds import NoticeWorld
from sim.order_worlds import OrderWorld
from sim.own_worlds import OwnRankWorld, OwnWorld, ReplacedWorld
from sim.parted_worlds import PartedWorld
from sim.ranks import RankWorld
from sim.relayout_worlds import RelayoutWorld
from sim.stall_worlds import StallWorld
from sim.store_worlds import store_world
from sim.swarm_worlds import swarm_world
from sim.unequal_worlds import UnequalWorld
from sim.world import World

# Kind of world -> the function that builds a world from a seed.
KINDS: dict[str, Callable[[int], World]] = {
    "plain": World,
    "carried": carried_world,
    "faultless": lambda seed: World(seed, faultless=True),
    "late": late_world,
    "stall": StallWorld,
    "order": OrderWorld,
    "durable": DurableWorld,
    "ranks": RankWorld,
    "unequal": UnequalWorld,
    "store": store_world,
    "parted": PartedWorld,
    "end": EndWorld,
    "late-end": LateNewcomerWorld,
    "mixed": MixedWorld,
    "cold": cold_world,
    "links": LinkWorld,
    "calm": CalmWorld,
    "adapt": AdaptWorld,
    "relayout": RelayoutWorld,
    "curriculum": CurriculumWorld,
    "rebatched": RebatchedWorld,
    "norm": NormWorld,
    "notice": NoticeWorld,
    "dispute": DisputeWorld,
    "cold-dispute": ColdDisputeWorld,
    "reported": ReportedWorld,
    "twin": EarlyTwins,
    "swarm": swarm_world,
    "own": OwnWorld,
    "own-ranks": OwnRankWorld,
    "replaced": ReplacedWorld,
}


def hunt(first: int, last: int, kind: str = "plain", limit: int = 20) -> tuple[Counter[str], list[str]]:
    """Play the seeds from ``first`` to ``last`` (exclusive); return the counters, and a line per failure."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for seed in range(first, last):
        world = KINDS[kind](seed)
        try:
            world.run()
        except Exception as error:  # noqa: BLE001  (whatever a core raises is a finding)
            failures.append(
                f"seed {seed}: {type(error).__name__}: {error}\n"
                f"    replay: python tests/sim/run.py --kind {kind} --seed {seed}"
            )
            if len(failures) >= limit:
                break
        counts.update(world.clockwork.counts)
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="0:200")
    parser.add_argument("--kind", choices=KINDS, default="plain")
    parser.add_argument("--limit", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return replay(arguments.seed, arguments.kind)
    first, last = (int(x) for x in arguments.seeds.split(":"))
    started = time.perf_counter()
    counts, failures = hunt(first, last, arguments.kind, arguments.limit)
    for kind, number in sorted(counts.items()):
        print(f"{number:10} {kind}")
    if arguments.kind == "plain":
        print("never met: " + (", ".join(coverage.missing(counts)) or "nothing"))
    for line in failures:
        print(line[:1200])
    print(f"{len(failures)} failures, {time.perf_counter() - started:.1f} s")
    return 1 if failures else 0


def replay(seed: int, kind: str) -> int:
    """Play one seed, and print its trace."""
    world = KINDS[kind](seed)
    world.clockwork.tracing = True
    try:
        world.run()
    except Exception:  # noqa: BLE001
        print("\n".join(world.clockwork.lines))
        traceback.print_exc()
        return 1
    print("\n".join(world.clockwork.lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
