"""A whole training step on one GPU with fabric, against the same model and optimizer without it.

    python benchmarks/gpu/step.py

With one replica the peer is a plain loop. With two replicas, which share the GPU, the peer is DDP on gloo:
NCCL refuses two members on one GPU. Both sides run in the same processes, in turns of some steps. Ours is a
session with its defaults: snapshots, digests, the commit and the published gradients.

The last figures are of the exchange of two replicas: how long it takes behind backward, and which part of
it backward hides. The processes take turns on the GPU in slices of some milliseconds, also when each waits
for the other's work. So one GPU shows less overlap than two would.
"""

import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from common import WARM_UP, begin, describe, finish, interleave, paired, say, update_past_hooks  # noqa: E402
from fleet import Fleet, free_port  # noqa: E402

import fabric.client  # noqa: E402
from fabric.client.gradients.exchange_thread import ExchangeThread  # noqa: E402

LAYERS, WIDTH = 8, 4096
ROWS = 24576  # of a micro-batch: 35 ms of forward and backward on an H100
STEPS = 10  # of a turn: as many as from one digest of the state to the next
ROUNDS = 5
CASES = ((1, 1), (1, 8), (2, 8))  # replicas, and micro-batches of a step per replica
LIMIT_S = 250.0


class Numbers(torch.utils.data.Dataset[int]):
    """Samples that cost nothing: the rows are made on the GPU."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Square matrices with AdamW: 134 million parameters, 0.5 GiB of gradients, 1.5 GiB of state."""
    torch.manual_seed(1)
    parts: list[torch.nn.Module] = []
    for _ in range(LAYERS):
        parts += [torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Tanh()]
    model = torch.nn.Sequential(*parts).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


class Ours:
    """The session's loop, advanced step by step."""

    def __init__(self, rows: torch.Tensor, micro_batches: int, until: int) -> None:
        self._rows, self.model_and_optimizer = rows, build()
        self.exchanges: dict[bool, list[float]] = {
            False: [],
            True: [],
        }  # whether exposed -> seconds of each step
        self._is_exposed = False
        take = ExchangeThread.take_times

        def noted(exchange: Any, *clock: Any) -> Any:
            self.exchanges[self._is_exposed].append(exchange.seconds)
            return take(exchange, *clock)

        ExchangeThread.take_times = noted  # type: ignore[assignment, method-assign]
        self._session: Any = fabric.client.attach(*self.model_and_optimizer)
        data = self._session.loader(Numbers(), global_batch_size=micro_batches, micro_batch_size=1, seed=5)
        self._steps: Iterator[Any] = self._session.steps(data, until=until)

    def _run(self, step: fabric.client.Step) -> None:
        model, optimizer = self.model_and_optimizer
        for _ in step:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(self._rows).square().mean()
            step.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def __call__(self, is_exposed: bool = False) -> None:
        step = next(self._steps)  # notes the exchange of the step before
        self._is_exposed = is_exposed
        self._run(step)

    def exposed(self) -> None:
        """A step whose exchange begins after backward."""
        overlap = self._session.overlap
        overlap.may_begin, may_begin = lambda: False, overlap.may_begin
        self(is_exposed=True)
        overlap.may_begin = may_begin

    def close(self) -> int:
        members = len(self._session.members)
        for step in self._steps:
            self._run(step)
        self._session.close()
        return members


class Theirs:
    """The same step without fabric."""

    def __init__(self, rows: torch.Tensor, micro_batches: int, world: int) -> None:
        self._rows, self._micro_batches, (model, self._optimizer) = rows, micro_batches, build()
        self._model = model
        self._no_sync: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if world > 1:
            ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
            self._model, self._no_sync = ddp, ddp.no_sync

    def __call__(self) -> None:
        for number in range(self._micro_batches):
            last = number == self._micro_batches - 1
            with contextlib.nullcontext() if last else self._no_sync():
                with torch.autocast("cuda", torch.bfloat16):
                    loss = self._model(self._rows).square().mean()
                loss.backward()
        update_past_hooks(self._optimizer)
        self._optimizer.zero_grad(set_to_none=False)


def turn_of(step: Callable[[], None], world: int, longest: list[float]) -> Callable[[], float]:
    """Return a turn: seconds per step of STEPS steps. ``longest`` gets the turn's longest step."""

    def turn() -> float:
        if world > 1:
            distributed.barrier()
        torch.cuda.synchronize()
        marks = [time.perf_counter()]
        for _ in range(STEPS):
            step()
            torch.cuda.synchronize()
            marks.append(time.perf_counter())
        longest.append(max(b - a for a, b in itertools.pairwise(marks)))
        return (marks[-1] - marks[0]) / STEPS

    return turn


def member() -> None:
    """One replica: both sides in turns."""
    world = int(os.environ["FABRIC_REPLICAS"])
    micro_batches = int(os.environ["BENCHMARK_MICRO_BATCHES"])
    rows = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    hides = "BENCHMARK_HIDES" in os.environ
    ours = Ours(rows, world * micro_batches, (1 + hides) * (ROUNDS + WARM_UP) * STEPS + 1)
    if world > 1:
        distributed.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{os.environ['BENCHMARK_PORT']}",
            rank=int(os.environ["FABRIC_REPLICA"][1:]),
            world_size=world,
        )
    sides: dict[str, Callable[[], None]] = {"ours": ours}
    if hides:
        sides |= {"exposed": ours.exposed, "alone": Theirs(rows, micro_batches, 1)}
    else:
        sides["theirs"] = Theirs(rows, micro_batches, world)
    longest: dict[str, list[float]] = {side: [] for side in sides}
    measured = interleave({name: turn_of(side, world, longest[name]) for name, side in sides.items()}, ROUNDS)
    exchanges = ours.exchanges[True]
    found = {"measured": measured, "longest": longest, "exchanges": exchanges, "members": ours.close()}
    Path(os.environ["BENCHMARK_OUT"]).write_text(json.dumps(found))


def run(world: int, micro_batches: int, **more: str) -> dict[str, Any]:
    """Run one job; return what r0 has measured."""
    environment = {"BENCHMARK_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", **more}
    environment["BENCHMARK_MICRO_BATCHES"] = str(micro_batches)
    with Fleet(__file__, world, environment) as fleet:
        for rank in range(world):
            fleet.start(f"r{rank}")
        found = fleet.results(LIMIT_S)["r0"]
        if found["members"] != world:
            fleet.fail(f"the job ran with {found['members']} of {world} replicas")
    for side, times in found["measured"].items():
        longest = max(found["longest"][side][WARM_UP:])
        say(
            f"{world} replicas, {micro_batches} micro-batches, {side}: {describe(times)} per step, "
            f"longest {longest:.3f} s"
        )
    return found


def compare(world: int, micro_batches: int) -> dict[str, float]:
    """Return our time over theirs, of a step in the middle and of a turn's longest step."""
    found = run(world, micro_batches)
    measured = found["measured"]
    ours, theirs = (found["longest"][side][WARM_UP:] for side in ("ours", "theirs"))
    return {
        f"step_ratio_{world}_{micro_batches}": paired(measured["ours"], measured["theirs"]),
        f"longest_ratio_{world}_{micro_batches}": paired(ours, theirs),
    }


def hidden() -> dict[str, float]:
    """Return the figures of an exchange that two replicas hide behind a backward of one micro-batch each."""
    found = run(2, 1, BENCHMARK_HIDES="1")
    ours, exposed, alone = (statistics.median(found["measured"][x]) for x in ("ours", "exposed", "alone"))
    exchange = statistics.median(found["exchanges"])
    return {
        "overlap_compute_ms": alone * 1e3,
        "overlap_exchange_ms": exchange * 1e3,
        "overlap_hidden_ms": (exposed - ours) * 1e3,
        "overlap_hides": (exposed - ours) / exchange,
    }


def steps() -> dict[str, float]:
    """Return the figures of all cases."""
    found = {name: value for case in CASES for name, value in compare(*case).items()}
    return {**found, **hidden()}


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: run this on a machine with a GPU and a torch that can use it")
    begin()
    finish(steps())


if __name__ == "__main__":
    member() if "--member" in sys.argv else main()
