"""The trainer of ``snapshot.py``: steps of a replica of one, with snapshots, without, and being fetched from.

Its state is ``SNAPSHOT_GB`` (1), its gradient 256 KB: a small matrix is trained (AdamW), the others are
frozen and snapshotted like everything else. Already with a gradient of 17 MB the noise of computing and
exchanging it on two cores (10 to 30 ms a step, snapshots or not) is larger than what is measured. Forward and
backward are a timer, which stands for a device, and later real products.
"""

import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
from common import ROUNDS, WARM_UP, interleave

import fabric.client

WIDTH, TRAINED_WIDTH = 2048, 256
GB = float(os.environ.get("SNAPSHOT_GB", "1"))
ROUND_COUNT = int(os.environ.get("SNAPSHOT_ROUNDS", str(ROUNDS)))
STEPS, CPU_STEPS = 12, 4  # in a turn
LEAST_COMPUTE_S, MOST_COMPUTE_S = 0.25, 1.0
HERE = Path(__file__).resolve().parent


class FrozenModel(torch.nn.Module):
    """A small matrix that is trained, and frozen ones of 17 MB: ``gb`` of state."""

    def __init__(self, gb: float) -> None:
        super().__init__()
        frozen = max(1, round(gb * 1e9 / (4 * WIDTH**2)))
        self.trained = torch.nn.Parameter(torch.full((TRAINED_WIDTH, TRAINED_WIDTH), 0.01))
        self.frozen = torch.nn.ParameterList(
            torch.nn.Parameter(torch.full((WIDTH, WIDTH), 0.01), requires_grad=False) for _ in range(frozen)
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return (self.trained * float(value)).sum()


def make(gb: float) -> tuple[FrozenModel, torch.optim.Optimizer]:
    """The model, its optimizer with a state."""
    model = FrozenModel(gb)
    optimizer = torch.optim.AdamW([model.trained], lr=1e-4, fused=True)
    return model, optimizer


class SnapshotSwitch:
    """A snapshot at every step, or none."""

    on = False

    def is_due(self, step: int, now: float) -> bool:
        return self.on

    def taken(self, step: int, now: float, cost_s: float) -> None:
        self.costs.append(cost_s)

    def __init__(self) -> None:
        self.costs: list[float] = []


def timer(seconds: float) -> None:
    """A device that computes: this process uses no CPU."""
    time.sleep(seconds)


def products(seconds: float) -> Callable[[], None]:
    """As many matrix products as take about so long when nothing else runs."""
    a = b = torch.full((1024, 1024), 1 / 1024)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < 1.0:
        a = a @ b
        count += 1
    count = max(1, round(count * seconds))

    def compute() -> None:
        x = b
        for _ in range(count):
            x = x @ b

    return compute


class SnapshotTrainer:
    """The user's loop, step by step. ``gaps`` of the last turn: from an optimizer step's end to the next
    one's start; ``digested``: in which of them a digest of the state was due."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self.switch = SnapshotSwitch()
        self.compute = compute
        model, self._optimizer = make(GB)
        self._model = model
        session = fabric.client.attach(model, self._optimizer, snapshots=self.switch)
        if not isinstance(session, fabric.client.Session):
            raise SystemExit("snapshot_trainer.py: there are no snapshots with FABRIC_DISABLE: unset it")
        self.session = session
        session._parts.slots.wanted = True  # noqa: SLF001  (as if another replica had come)
        samples = torch.arange(1, 1001, dtype=torch.float32)
        data = self.session.loader(samples, global_batch_size=1, micro_batch_size=1, seed=1)
        self._steps = self.session.steps(data, until=1_000_000)
        self.gaps: list[float] = []
        self.digested: list[bool] = []
        self._ended = 0.0

    def step(self) -> None:
        step = next(self._steps)
        for batch in step:
            step.backward(self._model(batch[0] / 1000))
            self.compute()
        if not step.contributed:
            raise SystemExit("snapshot_trainer.py: a step was not computed here")
        self.gaps.append(time.perf_counter() - self._ended)
        self.digested.append(step.number % self.session.settings.digest_steps == 0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._ended = time.perf_counter()

    def turn(self, steps: int, snapshots: bool) -> float:
        """Run this many steps; return the seconds per step."""
        self.switch.on, self.gaps, self.digested = snapshots, [], []
        began = self._ended = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.switch.on = False
        return (self._ended - began) / steps


class PeerFetch:
    """The peer's process, while the block lasts; ``rates`` in bytes per second."""

    def __init__(self, url: str, token_file: str) -> None:
        command = [sys.executable, str(HERE / "snapshot_peer.py"), url, token_file]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.rates: list[float] = []

    def during(self, work: Callable[[], float]) -> float:
        """Return the measurement of ``work`` while the peer fetches."""
        self._say("go")
        self._hear()
        found = work()
        self._say("stop")
        got = json.loads(self._hear())
        self.rates.append(got["bytes"] / got["seconds"])
        return found

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"snapshot_trainer.py: the peer ended with {self._process.wait()}")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def checkpoint_url() -> str:
    """Of this replica's own server, as everybody learns it."""
    job, token = os.environ["FABRIC_JOB"], Path(os.environ["FABRIC_TOKEN_FILE"]).read_text().strip()
    request = urllib.request.Request(  # noqa: S310  (our own lighthouse)
        f"{os.environ['FABRIC_LIGHTHOUSE']}/v1/jobs/{job}", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
        return str(json.load(answer)["members"][0]["ckpt"])


def blocked(
    plain: list[tuple[list[float], list[bool]]], with_one: list[tuple[list[float], list[bool]]]
) -> dict[str, list[float]]:
    """By how much gaps are longer than the median of the same round's that have neither snapshot nor digest:
    with a snapshot, with a digest alone, and with neither, which is the noise of all these figures."""
    found: dict[str, list[float]] = {"blocked": [], "digest": [], "noise": []}
    for (gaps, digested), (snapshot_gaps, _) in zip(plain, with_one, strict=True):
        bare = statistics.median(gap for gap, due in zip(gaps, digested, strict=True) if not due)
        found["blocked"] += [gap - bare for gap in snapshot_gaps]
        for gap, due in zip(gaps, digested, strict=True):
            found["digest" if due else "noise"].append(gap - bare)
    return found


def main() -> None:
    torch.set_num_threads(1)
    trainer = SnapshotTrainer(lambda: timer(LEAST_COMPUTE_S))
    trainer.turn(5, snapshots=True)
    copy_s = statistics.median(trainer.switch.costs[1:])
    seconds = min(MOST_COMPUTE_S, max(LEAST_COMPUTE_S, 2 * copy_s))
    trainer.compute = lambda: timer(seconds)
    trainer.switch.costs.clear()
    peer = PeerFetch(checkpoint_url(), os.environ["FABRIC_TOKEN_FILE"])
    turns: dict[bool, list[tuple[list[float], list[bool]]]] = {False: [], True: []}

    def turn(snapshots: bool) -> float:
        seconds = trainer.turn(STEPS, snapshots)
        turns[snapshots].append((trainer.gaps, trainer.digested))
        return seconds

    measured = interleave(
        {
            "plain": lambda: turn(snapshots=False),
            "snapshot": lambda: turn(snapshots=True),
            "serving": lambda: peer.during(lambda: trainer.turn(STEPS, snapshots=False)),
        },
        ROUND_COUNT,
    )
    peer.close()
    costs = list(trainer.switch.costs)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    trainer.compute = products(seconds)
    cpu = interleave(
        {
            "plain": lambda: trainer.turn(CPU_STEPS, snapshots=False),
            "snapshot": lambda: trainer.turn(CPU_STEPS, snapshots=True),
        },
        ROUND_COUNT,
        warm_up=1,
    )
    found = {
        "measured": measured,
        "cpu": cpu,
        "compute_s": seconds,
        **blocked(turns[False][WARM_UP:], turns[True][WARM_UP:]),
        "costs": costs,
        "rates": peer.rates[WARM_UP:],
    }
    Path(os.environ["BENCHMARK_OUT"]).write_text(json.dumps(found))
    # The trainer has no last step: it ends when the benchmark ends its processes.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
