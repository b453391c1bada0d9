"""Play seeds: ``python tests/sim/run.py --seed N`` replays one with its trace, ``--seeds A:B`` hunts."""

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "tests")]

from sim import coverage
from sim.world import run_seed


def hunt(first: int, last: int, faultless: bool = False, limit: int = 20) -> tuple[Counter[str], list[str]]:
    """Play ``first`` to ``last`` (exclusive): the coverage counters, and a line per failure."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for seed in range(first, last):
        try:
            counts.update(run_seed(seed, faultless=faultless).clockwork.counts)
        except Exception as error:  # noqa: BLE001  (whatever a core raises is a finding)
            failures.append(
                f"seed {seed}: {type(error).__name__}: {error}\n"
                f"    replay: python tests/sim/run.py --seed {seed}"
            )
            if len(failures) >= limit:
                break
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="0:200")
    parser.add_argument("--faultless", action="store_true")
    parser.add_argument("--limit", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return replay(arguments.seed, arguments.faultless)
    first, last = (int(x) for x in arguments.seeds.split(":"))
    started = time.perf_counter()
    counts, failures = hunt(first, last, arguments.faultless, arguments.limit)
    for kind, number in sorted(counts.items()):
        print(f"{number:10} {kind}")
    if not arguments.faultless:
        print("never met: " + (", ".join(coverage.missing(counts)) or "nothing"))
    for line in failures:
        print(line[:1200])
    print(f"{len(failures)} failures, {time.perf_counter() - started:.1f} s")
    return 1 if failures else 0


def replay(seed: int, faultless: bool) -> int:
    """One seed with everything that happened."""
    try:
        world = run_seed(seed, tracing=True, faultless=faultless)
    except Exception as error:  # noqa: BLE001
        print("\n".join(error.world.clockwork.lines))  # type: ignore[attr-defined]
        traceback.print_exc()
        return 1
    print("\n".join(world.clockwork.lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
