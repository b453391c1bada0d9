"""``faults.py --unequal``: kills and rejoins beside a replica of another layout of ranks.

Two replicas run under `fabric launch`. r1 is two ranks of FSDP, and its rank 1 is killed. The survivor r0 is
two ranks too, or one process. A timed wait stands for the device. The stall is r0's longest step around the
kill, over its median step alone right after: in both it computes the micro-batches of both replicas. A join
is what r0's steps took beyond that median until r1 contributed again.
"""

import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

if str(HERE := Path(__file__).resolve().parent.parent / "tests" / "integration") not in sys.path:
    sys.path.insert(0, str(HERE))

import common
from job import Zygote
from test_launched_jobs import LaunchedJob

STEPS = 5  # undisturbed steps before each kill
PATIENCE_S = 300.0
# The benchmark kills replicas on purpose, so no number of failures keeps a replica out.
ENVIRONMENT = {"FABRIC_REPLICAS": "2", "FABRIC_UNEQUAL": "1", "FABRIC_ADAPT": "off", "TEST_FAILURES": "0"}


def launch(job: LaunchedJob, replica: str, ranks: int) -> None:
    # Without `fabric run`, whose low-priority imports would lengthen each join.
    job.launch(replica, "--ranks", str(ranks), "--no-python", sys.executable)


def commits(job: LaunchedJob, replica: str = "r0") -> list[dict[str, Any]]:
    return job.events(replica, "commit")


def settle(job: LaunchedJob) -> None:
    """Wait until both replicas have contributed to some further steps."""
    after = max((x["step"] for x in commits(job)), default=-1)

    def together() -> bool:
        own = [x for x in commits(job, "r1") if x["contributed"] and x["step"] > after]
        return len(own) >= STEPS and commits(job)[-1]["step"] >= own[-1]["step"]

    job.wait_for(together, "steps of both replicas", PATIENCE_S)


def kill_and_join(job: LaunchedJob, kill: Callable[[], None]) -> tuple[float, float]:
    """Kill something of r1 and wait for its return; return the seconds of the stall and of the join."""
    settle(job)
    before, killed_at = len(commits(job)), commits(job)[-1]["t"]
    kill()
    step = commits(job)[before - 1]["step"]
    job.wait_for(
        lambda: [x for x in commits(job, "r1") if x["contributed"] and x["t"] > killed_at + 1.0],
        f"the return of r1 after step {step}",
        PATIENCE_S,
    )
    settle(job)
    steps = [(b["t"] - a["t"], b) for a, b in pairwise(commits(job)[before - 1 :])]
    alone = [(seconds, x) for seconds, x in steps if "r1" not in x["contributions"]]
    # Later steps share the processors with the next process of r1, which imports torch.
    usual = statistics.median(seconds for seconds, _ in alone[1:6])
    back = next(k for k, (_, x) in enumerate(steps) if k and "r1" in x["contributions"])
    first = max(seconds for seconds, _ in steps[:3])
    return first - usual, sum(seconds - usual for seconds, _ in steps[3 : back + 1])


def measure(zygote: Zygote, ranks: int, kills: int) -> list[tuple[float, float]]:
    """The stalls and joins of a survivor of so many ranks."""
    with (
        tempfile.TemporaryDirectory() as folder,
        LaunchedJob(zygote, Path(folder), replicas=2, ranks=2, environment=ENVIRONMENT) as job,
    ):
        job.trainer = "relayout_trainer.py"
        launch(job, "r0", ranks)
        launch(job, "r1", 2)

        def kill() -> None:
            os.kill(job.pid("r1", 1), signal.SIGKILL)

        return [kill_and_join(job, kill) for _ in range(kills)]


def compare(kills: int) -> dict[str, float]:
    """Print and return the figures of equal and of unequal layouts."""
    zygote = Zygote()
    figures: dict[str, float] = {}
    try:
        for name, ranks in (("equal", 2), ("unequal", 1)):
            costs = measure(zygote, ranks, kills)
            stalls, joins = zip(*costs, strict=True)
            figures |= {
                f"{name}_stall_s": statistics.median(stalls),
                f"{name}_join_s": statistics.median(joins),
            }
            common.say(f"{name}: stalls {_list(stalls)}; joins {_list(joins)}")
    finally:
        zygote.close()
    return figures


def _list(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.2f} s" for value in values)
