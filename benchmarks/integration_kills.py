"""A replica of each training framework is killed three times: what do the survivors lose?

``fabric drill`` starts three replicas of an example and kills one after the other, each when the last one is
back. It judges the journals: lost steps, equal digests, each sample once, and the survivors' longest wait
between two commits beyond the median step. Frameworks are imported by each new process, so the time until a
replica is back is mostly theirs. The aims are those of faults.py. The exit code is 1 where one is missed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import begin, finish, say, table, verdict

ROOT = Path(__file__).parent.parent
MEDIAN_S, WORST_S = 0.25, 0.6
LIMIT_S = 600.0
# Way in -> the words that start its script.
SCRIPTS = {
    "own": ["examples/own_loop.py"],
    "transformers": ["examples/transformers_trainer.py"],
    "accelerate": ["examples/accelerate_loop.py"],
    "lightning": ["examples/lightning_trainer.py"],
    "adopt": ["-m", "fabric", "run", "--adopt", "tests/integration/plain_ddp.py", "100000", "unsaved.pt"],
}
EXPECTED = ["promises-kept", "steps_lost==0", "digests-equal", "sources-agree", "restarts==0"]
# The part of a dead replica is skipped in an adopted loop, as docs/adopt/plain-pytorch.md says.
SKIPPING = {"adopt"}


def drill(name: str, folder: Path) -> dict[str, Any]:
    """Return the report of one drill."""
    command = [sys.executable, *SCRIPTS[name]]
    command[1:] = [str(ROOT / word) if word.endswith(".py") else word for word in command[1:]]
    expected = EXPECTED + ([] if name in SKIPPING else ["samples-exactly-once"])
    expectations = [word for x in expected for word in ("--expect", x)]
    faults = [word for i in (1, 2, 0) for word in ("--fault", f"kill r{i}")]
    words = [
        sys.executable,
        "-m",
        "fabric",
        "drill",
        "--replicas",
        "3",
        *faults,
        *expectations,
        "--out",
        str(folder / "out"),
    ]
    environment = os.environ | {"EXAMPLE_STEPS": "1000000", "EXAMPLE_PAUSE_S": "0.02"}
    environment["EXAMPLE_EVERY"] = "1000000"  # others wait for an evaluation, which is no failure
    environment["EXAMPLE_OUTPUT"] = str(folder / "files")
    done = subprocess.run(
        [*words, "--", *command], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    report = folder / "out" / "report.json"
    if not report.exists():
        raise SystemExit(f"the drill of {name} ended without a report:\n{done.stdout}{done.stderr}")
    return dict(json.loads(report.read_text()))


def figures(report: dict[str, Any]) -> dict[str, float]:
    """Return what a table and the JSON have of one framework."""
    stalls = [fault["stall_s"] for fault in report["faults"]]
    back = [seconds for fault in report["faults"] for seconds in fault["rejoined_s"].values()]
    broken = [x for x in report["expectations"] if not x["holds"]]
    for expectation in broken:
        say(f"not held: {expectation}")
    return {
        "stall_median_s": statistics.median(stalls),
        "stall_worst_s": max(stalls),
        "back_median_s": statistics.median(back),
        "step_s": report["median_step_s"],
        "steps_lost": report["summary"]["steps_lost"],
        "expectations_broken": len(broken),
    }


def main() -> int:
    """Drill every framework, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SCRIPTS))
    names = parser.parse_args().names
    begin()
    measured: dict[str, dict[str, float]] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            measured[name] = figures(drill(name, Path(folder)))
        say(f"{name}: {measured[name]}")
    columns = ["way in", "stall: median", "worst", "back after", "step", "steps lost"]
    rows = [
        [
            name,
            *(f"{x[key]:.3f} s" for key in ("stall_median_s", "stall_worst_s", "back_median_s", "step_s")),
            x["steps_lost"],
        ]
        for name, x in measured.items()
    ]
    table("three kills in a job of three replicas", columns, rows)
    good = True
    for name, x in measured.items():
        good &= verdict(f"{name}: median stall, seconds", x["stall_median_s"], at_most=MEDIAN_S)
        good &= verdict(f"{name}: worst stall, seconds", x["stall_worst_s"], at_most=WORST_S)
        good &= verdict(f"{name}: broken expectations", x["expectations_broken"], at_most=0)
    finish(measured)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
