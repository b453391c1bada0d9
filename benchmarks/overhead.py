"""A whole training step with everything on, against the same model under plain DDP on gloo.

Both sides run in the same processes, in turns of a few steps, on one core's worth of threads each. Ours: a
session with its defaults (commit barrier, digest of the state every 10 steps, snapshots within their
share, the sessions with the lighthouse). Theirs: DDP with its default overlap and gradient_as_bucket_view,
which saves it a copy. Same model, same batches, same SGD. The compute of a step takes no longer than gloo
needs to exchange the same gradients, so that the exchange cannot hide behind it (both are measured here,
alone, and printed).

``step_ratio`` is our time over theirs: below 1 we are faster. Beside it stands the processor time of the
trainers per step, ours over theirs, which says more on a machine that has other work.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from common import (
    ROUNDS,
    WARM_UP,
    begin,
    describe,
    finish,
    interleave,
    paired,
    say,
    table,
    update_past_hooks,
    verdict,
)
from fleet import Fleet, free_port, need_gloo
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import fabric.client

# name -> (layers, width, samples in a micro-batch, steps in a turn)
SIZES = {"4MB": (4, 512, 8, 20), "128MB": (8, 2048, 1, 3)}
WORLDS = (2, 4)
PLANES = {"step_ratio": "", "step_ratio_tcp": "tcp", "step_ratio_unequal": "unequal"}
BOUNDS = {"4MB": 1.05, "128MB": 1.00}
LIMIT_S = 280.0


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Inputs that cost nothing to make, so that only the step is measured."""

    def __init__(self, width: int) -> None:
        self._rows = torch.randn(64, width, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


def build(layers: int, width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """``layers`` square matrices of ``width``, without biases."""
    torch.manual_seed(1)
    parts: list[torch.nn.Module] = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width, bias=False), torch.nn.Tanh()]
    model = torch.nn.Sequential(*parts)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(batch)
    return output.square().mean()


class Ours:
    """The session's loop, advanced by some steps at a time."""

    def __init__(self, layers: int, width: int, samples: int, world: int, until: int) -> None:
        self.model, self._optimizer = build(layers, width)
        self._session = fabric.client.attach(self.model, self._optimizer)
        data = self._session.loader(
            Rows(width), global_batch_size=samples * world, micro_batch_size=samples, seed=5
        )
        self._steps: Iterator[Any] = self._session.steps(data, until=until)

    def __call__(self) -> None:
        step = next(self._steps)
        for batch in step:
            step.backward(loss_of(self.model, batch))
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> int:
        """Run out; returns how many members the last epoch had."""
        members = len(self._session.members)
        for step in self._steps:
            for batch in step:
                step.backward(loss_of(self.model, batch))
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._session.close()
        return members


class DdpOnGloo:
    """DDP on gloo, with the same batches."""

    def __init__(self, layers: int, width: int, samples: int) -> None:
        self.model, self._optimizer = build(layers, width)
        self._ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self._rows, self._samples, self._at = Rows(width), samples, 0

    def _batch(self) -> torch.Tensor:
        self._at += self._samples
        rows = [self._rows[(self._at + i) % len(self._rows)] for i in range(self._samples)]
        batch: torch.Tensor = torch.utils.data.default_collate(rows)
        return batch

    def __call__(self) -> None:
        loss_of(self._ddp, self._batch()).backward()
        update_past_hooks(self._optimizer)
        self._optimizer.zero_grad(set_to_none=False)

    def compute(self) -> None:
        """Measure forward and backward alone."""
        with self._ddp.no_sync():
            loss_of(self._ddp, self._batch()).backward()


def turn_of(step: Callable[[], None], steps: int, processor: list[float]) -> Callable[[], float]:
    """Run one turn of ``steps`` steps, begun together; return seconds per step; ``processor`` gets the
    processor seconds.
    """

    def turn() -> float:
        distributed.barrier()
        began, spent = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        seconds = (time.perf_counter() - began) / steps
        processor.append((time.process_time() - spent) / steps)
        return seconds

    return turn


def member() -> None:
    """One replica: both sides in turns; writes seconds per step of every turn."""
    name, world = os.environ["BENCHMARK_SIZE"], int(os.environ["FABRIC_REPLICAS"])
    layers, width, samples, steps = SIZES[name]
    torch.set_num_threads(1)
    rounds = int(os.environ["BENCHMARK_ROUNDS"])
    until = (rounds + WARM_UP) * steps + 1
    # Attach before the process group exists, or ``attach`` would take these processes for ranks of one
    # replica.
    ours = Ours(layers, width, samples, world, until)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{os.environ['BENCHMARK_PORT']}",
        rank=int(os.environ["FABRIC_REPLICA"][1:]),
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    theirs = DdpOnGloo(layers, width, samples)
    flat = torch.zeros(layers * width * width)
    sides: dict[str, Callable[[], None]] = {"ours": ours, "ddp": theirs, "compute": theirs.compute}
    sides["gloo"] = lambda: _all_reduce(flat)
    processor: dict[str, list[float]] = {side: [] for side in sides}
    turns = {side: turn_of(step, steps, processor[side]) for side, step in sides.items()}
    measured = interleave(turns, rounds)
    spent = {side: seconds[-rounds:] for side, seconds in processor.items()}
    written = {"measured": measured, "processor": spent, "members": ours.close()}
    Path(os.environ["BENCHMARK_OUT"]).write_text(json.dumps(written))
    distributed.destroy_process_group()


def _all_reduce(flat: torch.Tensor) -> None:
    distributed.all_reduce(flat)


def compare(name: str, world: int, plane: str, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Run one job; the measures of its first replica (a step ends for all together), and the processor time
    of all trainers over that under DDP."""
    environment = {"BENCHMARK_SIZE": name, "BENCHMARK_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    environment["BENCHMARK_ROUNDS"] = str(rounds)
    if plane == "unequal":  # equal layouts, with FABRIC_UNEQUAL on
        environment["FABRIC_UNEQUAL"] = "1"
    elif plane:
        environment["FABRIC_DATA_PLANE"] = plane
    with Fleet(__file__, world, environment) as fleet:
        for rank in range(world):
            fleet.start(f"r{rank}")
        written: dict[str, Any] = fleet.results(LIMIT_S)
        if written["r0"]["members"] != world:
            fleet.fail(f"the job ran with {written['r0']['members']} of {world} replicas")
    ours, theirs = (
        [sum(spent) for spent in zip(*(each["processor"][side] for each in written.values()), strict=True)]
        for side in ("ours", "ddp")
    )
    return written["r0"]["measured"], paired(ours, theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description="a whole step against DDP on gloo")
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)), help="for a quick look")
    parser.add_argument("--sizes", default=",".join(BOUNDS), help="for a quick look")
    parser.add_argument("--planes", default="default,tcp", help="also: unequal")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    worlds, sizes = [int(x) for x in arguments.worlds.split(",")], arguments.sizes.split(",")
    planes = {
        key: plane for key, plane in PLANES.items() if (plane or "default") in arguments.planes.split(",")
    }
    need_gloo()
    begin()
    result: dict[str, dict[str, dict[str, float]]] = {key: {} for key in planes}
    rows, met = [], []
    for world in worlds:
        for name in sizes:
            for key, plane in planes.items():
                measured, processor = compare(name, world, plane, arguments.rounds)
                ratio = paired(measured["ours"], measured["ddp"])
                result[key].setdefault(str(world), {})[name] = ratio
                compute, gloo = (statistics.median(measured[side]) for side in ("compute", "gloo"))
                say(
                    f"{world} processes, {name}, {plane or 'default'} plane: computing takes "
                    f"{compute * 1000:.3g} ms, gloo's exchange {gloo * 1000:.3g} ms"
                    + (
                        ""
                        if compute <= gloo
                        else " (COMPUTING TAKES LONGER: not the comparison that was meant)"
                    )
                )
                rows.append(
                    [f"{world} x {name}", plane or "default"]
                    + [describe(measured[side]) for side in ("ours", "ddp", "compute", "gloo")]
                    + [f"{ratio:.3f}", f"{processor:.3f}"]
                )
                if key == "step_ratio":
                    met.append((f"step_ratio {world} processes {name}", ratio, BOUNDS[name]))
    columns = ["", "plane", "our step", "DDP step", "compute alone", "gloo exchange alone", "ours / DDP"]
    columns.append("processor time")
    table("seconds per step: median (lowest-highest) of the turns", columns, rows)
    for what, ratio, bound in met:
        verdict(what, ratio, at_most=bound)
    finish(result)


if __name__ == "__main__":
    member() if "--member" in sys.argv else main()
