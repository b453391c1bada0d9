"""A whole training step with everything on, against the same model under plain DDP or HSDP on gloo.

Both sides run in the same processes, in turns of a few steps, on one core's worth of threads each. Ours: a
session with its defaults (commit barrier, digest of the state every 10 steps, snapshots within their
share of our own turns, the sessions with the lighthouse). Theirs: DDP with its default overlap and
gradient_as_bucket_view, which saves it a copy. Same model, same batches, same SGD. The compute of a step
takes no longer than gloo needs to exchange the same gradients, so that the exchange cannot hide behind it
(both are measured here, alone, and printed).

The plane ``hsdp`` has replicas of two ranks. Ours shards the model inside a replica (FSDP2), and fabric
averages between the replicas over TCP. Theirs is torch's HSDP: ``fully_shard`` on a mesh of two dimensions.

``step_ratio`` is our time over theirs: below 1 we are faster. Beside it stands the processor time of the
trainers per step, ours over theirs, which says more on a machine that has other work.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fabric.client
from fabric.client.process import rank_group

# name -> (layers, width, samples in a micro-batch, steps in a turn)
SIZES = {"4MB": (4, 512, 8, 20), "128MB": (8, 2048, 1, 3)}
WORLDS = (2, 4)
# The network comes first: few people train on one host.
PLANES = {
    "step_ratio_tcp": "tcp",
    "step_ratio_hsdp": "hsdp",
    "step_ratio": "default",
    "step_ratio_unequal": "unequal",
}
SETTINGS = {
    "tcp": {"FABRIC_DATA_PLANE": "tcp"},
    "hsdp": {"FABRIC_DATA_PLANE": "tcp"},
    "unequal": {"FABRIC_UNEQUAL": "1"},  # equal layouts, with FABRIC_UNEQUAL on
}
BOUNDS = {
    "tcp": {"4MB": 1.05, "128MB": 1.05},
    "hsdp": {"128MB": 1.05},
    "default": {"4MB": 1.05, "128MB": 1.00},
}
RANKS = {"hsdp": 2}  # of a replica
LIMIT_S = 280.0


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Inputs that cost nothing to make, so that only the step is measured."""

    def __init__(self, width: int) -> None:
        self._rows = torch.randn(64, width, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


def build(layers: int, width: int, mesh: DeviceMesh | None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """``layers`` square matrices of ``width``, without biases, sharded over ``mesh`` where one is given."""
    torch.manual_seed(1)
    parts: list[torch.nn.Module] = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width, bias=False), torch.nn.Tanh()]
    model = torch.nn.Sequential(*parts)
    if mesh is not None:
        for module in (*parts[::2], model):
            fully_shard(module, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(batch)
    return output.square().mean()


class OwnTime:
    """The default budget of snapshots, by the time of our own turns: other turns must not pay for ours."""

    def __init__(self) -> None:
        self._budget = fabric.client.OverheadBudget()
        self._away_s, self._left = 0.0, time.monotonic()

    def enter(self) -> None:
        """A step of ours begins."""
        self._away_s += time.monotonic() - self._left

    def leave(self) -> None:
        """A step of ours has ended."""
        self._left = time.monotonic()

    def is_due(self, step: int, now: float) -> bool:
        return self._budget.is_due(step, now - self._away_s)

    def taken(self, step: int, now: float, cost_s: float) -> None:
        self._budget.taken(step, now - self._away_s, cost_s)


class Ours:
    """The session's loop, advanced by some steps at a time."""

    def __init__(self, size: str, world: int, until: int, mesh: DeviceMesh | None) -> None:
        layers, width, samples, _ = SIZES[size]
        samples *= mesh.size() if mesh is not None else 1
        self.model, self._optimizer = build(layers, width, mesh)
        self._time = OwnTime()
        self._session = fabric.client.attach(self.model, self._optimizer, snapshots=self._time)
        data = self._session.loader(
            Rows(width), global_batch_size=samples * world, micro_batch_size=samples, seed=5, mesh=mesh
        )
        self._steps: Iterator[Any] = self._session.steps(data, until=until)

    def __call__(self) -> None:
        self._time.enter()
        step = next(self._steps)
        for batch in step:
            step.backward(loss_of(self.model, batch))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._time.leave()

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


class OnGloo:
    """DDP on gloo, or HSDP over ``mesh``, with the same batches."""

    def __init__(self, size: str, mesh: DeviceMesh | None) -> None:
        layers, width, self._samples, _ = SIZES[size]
        self.model, self._optimizer = build(layers, width, mesh)
        self._keeps_gradients = mesh is None
        self._wrapped = self.model
        if mesh is None:
            self._wrapped = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self._rows, self._at = Rows(width), 0

    def _batch(self) -> torch.Tensor:
        self._at += self._samples
        rows = [self._rows[(self._at + i) % len(self._rows)] for i in range(self._samples)]
        batch: torch.Tensor = torch.utils.data.default_collate(rows)
        return batch

    def __call__(self) -> None:
        loss_of(self._wrapped, self._batch()).backward()
        update_past_hooks(self._optimizer)
        self._optimizer.zero_grad(set_to_none=not self._keeps_gradients)

    def compute(self) -> None:
        """Measure forward and backward of DDP alone."""
        assert isinstance(self._wrapped, DistributedDataParallel)
        with self._wrapped.no_sync():
            loss_of(self._wrapped, self._batch()).backward()


class OneReplica:
    """torch.distributed for fabric's start: ``group`` is the world of a replica.

    Torch has one world in a process, and here it has the ranks of all replicas, for HSDP.
    """

    _OF_A_GROUP = (
        "get_rank",
        "get_world_size",
        "get_backend",
        "all_reduce",
        "all_gather",
        "gather",
        "scatter",
    )

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        value = getattr(distributed, name)
        return partial(self._call, value) if name in self._OF_A_GROUP else value

    def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        named = {f"group_{name}" if name in ("src", "dst") else name: x for name, x in named.items()}
        return function(*arguments, group=self._group, **named)


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


def begin_world(ranks: int, world: int) -> None:
    """Make the process group of all ranks of all replicas."""
    number = int(os.environ["FABRIC_REPLICA"][1:]) * ranks + int(os.environ["RANK"])
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{os.environ['BENCHMARK_PORT']}",
        rank=number,
        world_size=world * ranks,
        timeout=timedelta(seconds=60),
    )


def member() -> None:
    """One rank of a replica: both sides in turns; writes seconds per step of every turn."""
    name, world = os.environ["BENCHMARK_SIZE"], int(os.environ["FABRIC_REPLICAS"])
    layers, width, _, steps = SIZES[name]
    torch.set_num_threads(1)
    rounds, ranks = int(os.environ["BENCHMARK_ROUNDS"]), int(os.environ["WORLD_SIZE"])
    until = (rounds + WARM_UP) * steps + 1
    sides: dict[str, Callable[[], None]] = {}
    if ranks > 1:
        begin_world(ranks, world)
        mesh = init_device_mesh("cpu", (world, ranks), mesh_dim_names=("replicate", "shard"))
        rank_group.dist = OneReplica(mesh["shard"].get_group())  # type: ignore[assignment, attr-defined]
        ours = Ours(name, world, until, mesh["shard"])
        sides = {"ours": ours, "theirs": OnGloo(name, mesh)}
    else:
        # Attach before the process group exists, or ``attach`` would take these processes for ranks of one
        # replica.
        ours = Ours(name, world, until, None)
        begin_world(ranks, world)
        theirs, flat = OnGloo(name, None), torch.zeros(layers * width * width)
        sides = {"ours": ours, "theirs": theirs, "compute": theirs.compute}
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
    """Run one job; the measures of its first rank (a step ends for all together), and the processor time
    of all trainers over that of the other side."""
    ranks = RANKS.get(plane, 1)
    environment = {"BENCHMARK_SIZE": name, "BENCHMARK_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"BENCHMARK_ROUNDS": str(rounds), "WORLD_SIZE": str(ranks), **SETTINGS.get(plane, {})}
    with Fleet(__file__, world, environment) as fleet:
        for replica, rank in itertools.product(range(world), range(ranks)):
            folder = str(fleet.folder / "run" / f"r{replica}")
            own = {"FABRIC_REPLICA": f"r{replica}", "FABRIC_RUN_DIR": folder, "RANK": str(rank)}
            fleet.start(f"r{replica}.{rank}", **own)
        written: dict[str, Any] = fleet.results(LIMIT_S)
        if written["r0.0"]["members"] != world:
            fleet.fail(f"the job ran with {written['r0.0']['members']} of {world} replicas")
    ours, theirs = (
        [sum(spent) for spent in zip(*(each["processor"][side] for each in written.values()), strict=True)]
        for side in ("ours", "theirs")
    )
    return written["r0.0"]["measured"], paired(ours, theirs)


def say_compute(what: str, measured: dict[str, list[float]]) -> None:
    """Say whether an exchange can hide behind the computing of a step."""
    compute, gloo = (statistics.median(measured[side]) for side in ("compute", "gloo"))
    longer = " (COMPUTING TAKES LONGER: not the comparison that was meant)" if compute > gloo else ""
    say(f"{what}: computing takes {compute * 1000:.3g} ms, gloo's exchange {gloo * 1000:.3g} ms{longer}")


def main() -> None:
    parser = argparse.ArgumentParser(description="a whole step against DDP or HSDP on gloo")
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)), help="for a quick look")
    parser.add_argument("--sizes", default=",".join(SIZES), help="for a quick look")
    parser.add_argument("--planes", default=",".join(BOUNDS), help="also: unequal")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    worlds, sizes = [int(x) for x in arguments.worlds.split(",")], arguments.sizes.split(",")
    planes = {key: plane for key, plane in PLANES.items() if plane in arguments.planes.split(",")}
    need_gloo()
    begin()
    result: dict[str, dict[str, dict[str, float]]] = {key: {} for key in planes}
    rows, met = [], []
    for (key, plane), world, name in itertools.product(planes.items(), worlds, sizes):
        if plane == "hsdp" and (world, name) != (2, "128MB"):
            continue  # four processes share the machine in that one already
        measured, processor = compare(name, world, plane, arguments.rounds)
        ratio = paired(measured["ours"], measured["theirs"])
        result[key].setdefault(str(world), {})[name] = ratio
        if "compute" in measured:
            say_compute(f"{world} processes, {name}, {plane} plane", measured)
        cells = [
            describe(measured[x]) if x in measured else "" for x in ("ours", "theirs", "compute", "gloo")
        ]
        rows.append([f"{world} x {name}", plane, *cells, f"{ratio:.3f}", f"{processor:.3f}"])
        if plane in BOUNDS:
            met.append((f"{key} {world} replicas {name}", ratio, BOUNDS[plane][name]))
    columns = ["", "plane", "our step", "their step", "compute alone", "gloo exchange alone", "ours / theirs"]
    columns.append("processor time")
    table("seconds per step: median (lowest-highest) of the turns", columns, rows)
    for what, ratio, bound in met:
        verdict(what, ratio, at_most=bound)
    finish(result)


if __name__ == "__main__":
    member() if "--member" in sys.argv else main()
