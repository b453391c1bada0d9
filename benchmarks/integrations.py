"""A step in each training framework with fabric, against the same step in the framework alone.

Both sides of a framework are processes of their own, and one replica is the whole job. The sides train in
turns of ten steps. At the end of its turn a side stands still until its next turn. A wait of 50 ms in the
model's forward stands for compute, so what is left is the overhead. Same model (1 MB), same batches, same
optimizer, and all of fabric's settings are the defaults. ``adopt`` is a plain loop with DDP, run by
``fabric run --adopt``. ``own`` is a loop around ``session.steps`` without an adapter: its ratio is the
session's part of the other ratios, and has no aim.

A ratio is fabric's time over the framework's, the median over the rounds. The exit code is 1 where a
ratio misses its aim.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
from common import WARM_UP, begin, describe, finish, interleave, need, paired, say, table, verdict
from fleet import Fleet, free_port, need_gloo

import fabric.client

COMPUTE_S = 0.05
TURN = 10  # steps
BATCH = 8
WIDTH, LAYERS = 256, 4
AIM = 1.01
LIMIT_S = 60.0
NEEDS = {
    "transformers": "transformers",
    "accelerate": "accelerate",
    "lightning": "pytorch_lightning",
}
SIDES = ("fabric", "alone")


class Turns:
    """The turns of one side, which the benchmark's own process gives out."""

    def __init__(self) -> None:
        self._link = Client(os.environ["BENCHMARK_TURNS"], "AF_UNIX")
        self._link.send(os.environ["BENCHMARK_SIDE"])
        self._steps = 0
        self._began = 0.0

    def note_step(self) -> None:
        """A step begins: at the first of a turn wait for that turn, and report the one before."""
        if self._steps % TURN == 0:
            if self._steps:
                self._link.send((time.perf_counter() - self._began) / TURN)
            self._link.recv()
            self._began = time.perf_counter()
        self._steps += 1


class Net(torch.nn.Module):
    """Square matrices, and the wait that stands for compute."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        torch.manual_seed(1)
        parts = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.layers = torch.nn.Sequential(*parts)
        self._turns = turns

    def forward(self, rows: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return the loss as frameworks expect it."""
        self._turns.note_step()
        time.sleep(COMPUTE_S)
        return {"loss": self.layers(rows).square().mean()}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows for ``steps`` steps, which cost nothing to make."""

    def __init__(self, steps: int) -> None:
        self._rows = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))
        self._size = steps * BATCH

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"rows": self._rows[index % 64], "labels": torch.zeros(1)}


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def train_transformers(with_fabric: bool, model: Net, steps: int) -> None:
    transformers: Any = importlib.import_module("transformers")
    trainer: Any = transformers.Trainer
    if with_fabric:
        trainer = importlib.import_module("fabric.integrations.transformers").FabricTrainer
    arguments = transformers.TrainingArguments(
        output_dir=os.environ["BENCHMARK_OUT"] + ".folder",
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        logging_steps=TURN,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    made = trainer(model, arguments, train_dataset=Rows(steps), optimizers=(sgd(model), None))
    made.train()


def train_accelerate(with_fabric: bool, model: Net, steps: int) -> None:
    maker: Any = importlib.import_module("accelerate").Accelerator
    if with_fabric:
        maker = importlib.import_module("fabric.integrations.accelerate").FabricAccelerator
    accelerator = maker(cpu=True)
    loader = torch.utils.data.DataLoader(Rows(steps), batch_size=BATCH, shuffle=True)
    prepared, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    for batch in loader:
        accelerator.backward(prepared(**batch)["loss"])
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def train_lightning(with_fabric: bool, model: Net, steps: int) -> None:
    lightning: Any = importlib.import_module("pytorch_lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    strategy: Any = "auto"
    if with_fabric:
        strategy = importlib.import_module("fabric.integrations.lightning").FabricStrategy()
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Rows(steps), batch_size=BATCH, shuffle=True))


def train_plain(model: Net, steps: int) -> None:
    """A loop with DDP, as in PyTorch's tutorial."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
    )
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = sgd(ddp)
    dataset = Rows(steps)
    sampler: Any = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0)
    for batch in torch.utils.data.DataLoader(dataset, batch_size=BATCH, sampler=sampler):
        optimizer.zero_grad()
        ddp(**batch)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
    torch.distributed.destroy_process_group()


def train_adopt(with_fabric: bool, model: Net, steps: int) -> None:
    if not with_fabric:
        train_plain(model, steps)
        return
    adoption = importlib.import_module("fabric.integrations.adopt.adoption")
    adoption.run_adopted(lambda: train_plain(model, steps))


def train_own(with_fabric: bool, model: Net, steps: int) -> None:
    optimizer, dataset = sgd(model), Rows(steps)
    if with_fabric:
        session = fabric.client.attach(model, optimizer)
        data = session.loader(dataset, global_batch_size=BATCH, micro_batch_size=BATCH, seed=5)
        for step in session.steps(data, until=steps):
            for batch in step:
                step.backward(model(**batch)["loss"])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        session.close()
        return
    for batch in torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True):
        model(**batch)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


TRAIN: dict[str, Callable[[bool, Net, int], None]] = {
    "transformers": train_transformers,
    "accelerate": train_accelerate,
    "lightning": train_lightning,
    "adopt": train_adopt,
    "own": train_own,
}


def member() -> None:
    """One side: train, and write how many steps the job has committed."""
    sessions: list[Any] = []
    attach = fabric.client.attach

    def noted(*arguments: Any, **named: Any) -> Any:
        sessions.append(attach(*arguments, **named))
        return sessions[-1]

    fabric.client.attach = noted
    steps = int(os.environ["BENCHMARK_STEPS"])
    train = TRAIN[os.environ["BENCHMARK_FRAMEWORK"]]
    train(os.environ["BENCHMARK_SIDE"] == "fabric", Net(Turns()), steps)
    committed = [x.committed_step for x in sessions]
    Path(os.environ["BENCHMARK_OUT"]).write_text(json.dumps({"committed": committed}))


@contextmanager
def started(framework: str, steps: int) -> Iterator[tuple[Fleet, dict[str, Connection]]]:
    """Both sides, each waiting for its first turn."""
    with Fleet(__file__, 1, {"BENCHMARK_FRAMEWORK": framework, "BENCHMARK_STEPS": str(steps)}) as fleet:
        place = str(fleet.folder / "turns")
        links: dict[str, Connection] = {}
        with Listener(place, "AF_UNIX") as listener:
            for side, replica in zip(SIDES, ("r0", "alone"), strict=True):
                fleet.start(replica, BENCHMARK_SIDE=side, BENCHMARK_TURNS=place)
            for _ in SIDES:
                link = listener.accept()
                links[link.recv()] = link
        yield fleet, links


def turn_of(link: Connection) -> Callable[[], float]:
    """Let a side make one turn; return its seconds per step."""

    def turn() -> float:
        link.send("go")
        return float(link.recv())

    return turn


def compare(framework: str, rounds: int) -> dict[str, list[float]]:
    """Return seconds per step by side, one per round."""
    steps = (rounds + WARM_UP) * TURN + 1
    with started(framework, steps) as (fleet, links):
        try:
            measured = interleave({side: turn_of(links[side]) for side in SIDES}, rounds)
            for link in links.values():
                link.send("end")
        except (EOFError, OSError):
            fleet.fail(f"{framework}: a side ended before its last turn")
        written: dict[str, Any] = fleet.results(LIMIT_S)
        if written["r0"]["committed"] != [steps] or written["alone"]["committed"]:
            fleet.fail(f"{framework}: not the job that was meant: {written}")
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description="the overhead of each adapter against its framework alone")
    parser.add_argument("--only", default=",".join(TRAIN), help="for a quick look")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    frameworks = arguments.only.split(",")
    for framework in NEEDS.keys() & frameworks:
        need(NEEDS[framework], "the benchmark of its adapter")
    need_gloo()
    begin()
    ratios, rows = {}, []
    for framework in frameworks:
        measured = compare(framework, arguments.rounds)
        ratios[framework] = paired(measured["fabric"], measured["alone"])
        rows.append([framework, *(describe(measured[side]) for side in SIDES), f"{ratios[framework]:.4f}"])
        say(f"{framework}: {ratios[framework]:.4f}")
    table("seconds per step: median (lowest-highest) of the turns", ["", *SIDES, "ratio"], rows)
    met = [
        verdict(f"step_ratio {name}", ratio, at_most=AIM) for name, ratio in ratios.items() if name != "own"
    ]
    finish({"step_ratio": ratios})
    raise SystemExit(0 if all(met) else 1)


if __name__ == "__main__":
    member() if "--member" in sys.argv else main()
