"""The detector on synthetic streams: how well it predicts, how often it cries wolf, how fast it finds a slow
stage.

Packed sequences of three lengths through a pipeline of four stages, 220 iterations, 20 seeds; each stream
once undisturbed and once with one stage that gets 1.5 times slower. Ends with 1 where a target is missed. The
streams are seeded: two runs give the same figures, but for the time that the detector needs.
"""

import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

if str(ROOT := Path(__file__).resolve().parent.parent) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.common import begin, finish, no_options, quantile, say, table, verdict
from benchmarks.health_streams import STAGES, Fault, StreamResult, play
from fabric.health.detector import JobDetector
from fabric.health.work import WorkAmount

LENGTHS = (8192, 16384, 32768)
SEEDS = 20
FACTOR = 1.5
WITHIN = 3  # iterations
REPLICAS, REPORTS = 16, 300


def undisturbed(case: tuple[int, int]) -> StreamResult:
    return play(*case)


def disturbed(case: tuple[int, int]) -> StreamResult:
    seed, length = case
    return play(seed, length, Fault(seed % STAGES, FACTOR))


def report_s() -> float:
    """Seconds that the lighthouse's detector needs for one report of a replica, verdicts included."""
    detector = JobDetector()
    began = 0.0
    for step in range(REPORTS):
        if step == REPORTS // 2:
            began = time.process_time()  # the warm-up is over
        for number in range(REPLICAS):
            amount = WorkAmount(1000.0 + (step * 37 + number * 11) % 500, 0.0, 4.0, 4)
            detector.observe(f"r{number}", 1, step, amount, 1e-4 * amount.tokens)
            detector.slowdowns()
    return (time.process_time() - began) / (REPLICAS * (REPORTS - REPORTS // 2))


def of_length(length: int, quiet: list[StreamResult], slow: list[StreamResult]) -> dict[str, float]:
    """The figures of one sequence length."""
    found = [x.found_after for x in slow]
    return {
        "length": length,
        "micro_batch_mape": statistics.fmean(e for x in quiet for e in x.micro_batch_errors),
        "iteration_mape": statistics.fmean(e for x in quiet for e in x.iteration_errors),
        "false_alarms_per_job": statistics.fmean(x.false_alarms for x in [*quiet, *slow]),
        "found_share": sum(x is not None and x <= WITHIN for x in found) / len(found),
        "found_after_worst": max((x for x in found if x is not None), default=0),
    }


def main() -> int:
    no_options(__doc__)
    begin()
    cases = [(seed, length) for length in LENGTHS for seed in range(SEEDS)]
    with ProcessPoolExecutor(2) as pool:
        quiet = dict(zip(cases, pool.map(undisturbed, cases), strict=True))
        slow = dict(zip(cases, pool.map(disturbed, cases), strict=True))
    figures = [
        of_length(n, [quiet[s, n] for s in range(SEEDS)], [slow[s, n] for s in range(SEEDS)]) for n in LENGTHS
    ]
    table(
        f"{SEEDS} seeds, {STAGES} stages, 220 iterations",
        list(figures[0]),
        [[f"{value:.4g}" for value in row.values()] for row in figures],
    )
    seconds = quantile([report_s() for _ in range(5)], 0.5)
    say("")
    met = [
        verdict("MAPE of a micro-batch", max(x["micro_batch_mape"] for x in figures), at_most=0.015),
        verdict("MAPE of an iteration", max(x["iteration_mape"] for x in figures), at_most=0.05),
        verdict("false alarms per job", max(x["false_alarms_per_job"] for x in figures), at_most=0.1),
        verdict(f"found within {WITHIN} iterations", min(x["found_share"] for x in figures), at_least=0.99),
    ]
    finish({"lengths": {str(int(x["length"])): x for x in figures}, "report_s": round(seconds, 7)})
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
