"""Inner and outer steps on a tiny model. OUTER has the arguments of ``diloco`` as JSON; LocalSGD without it.

OUTER_KILL "3 1" kills the process in inner step 1 of outer step 3. With OUTER_OWN_DATA the replica draws its
own batches instead of its part of the job's. Where the file OUTER_HURRY exists the loop makes no pauses.
"""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from pace import leave_time

import fabric.client
from fabric.client import StepSampler
from fabric.runtime.config import Settings

SAMPLES = torch.randn(200, 8, generator=torch.Generator().manual_seed(5))
TARGETS = SAMPLES @ torch.randn(8, 2, generator=torch.Generator().manual_seed(6))
EVERY, BATCH = 4, 4


def make_model() -> torch.nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def make_inner(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_outer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def loss_of(model: torch.nn.Module, chosen: Sequence[int]) -> torch.Tensor:
    """Return the mean loss of these samples."""
    at = torch.as_tensor(chosen)
    return torch.nn.functional.mse_loss(model(SAMPLES[at]), TARGETS[at])


def make_sampler(outer: dict, replicas: int, settings: Settings | None = None) -> StepSampler:
    """Return the sampler of a replica that computes BATCH samples in each inner step."""
    span = outer.get("every", EVERY) // outer.get("fragments", 1)
    return StepSampler(len(SAMPLES), global_batch_size=BATCH * span * replicas, settings=settings)


def batches(sampler: StepSampler | None) -> Iterator[list[int]]:
    """Yield the samples of one inner step after the other, for ever."""
    while sampler is None:
        yield torch.randint(len(SAMPLES), (BATCH,)).tolist()
    while True:
        for chosen in torch.utils.data.DataLoader(range(len(SAMPLES)), batch_size=BATCH, sampler=sampler):
            yield chosen.tolist()


def name_of(tensors) -> str:
    return " ".join(f"{x.detach().double().sum().item():.17g}" for x in tensors)


def main() -> None:
    model = make_model()
    inner, until = make_inner(model), int(os.environ.get("TINY_STEPS", "12"))
    outer = json.loads(os.environ.get("OUTER", "{}"))
    own = "OUTER_OWN_DATA" in os.environ
    sampler = None if own else make_sampler(outer, int(os.environ["FABRIC_REPLICAS"]))
    if outer:
        run = fabric.client.diloco(model, inner, make_outer(model), sampler=sampler, until=until, **outer)
    else:
        run = fabric.client.local_sgd(model, inner, every=EVERY, sampler=sampler, until=until)
    kill = [int(x) for x in os.environ.get("OUTER_KILL", "-1 0").split()]
    step_s = float(os.environ.get("TINY_STEP_S", "0.02"))
    step, number, committed = run.drawing_step, 0, run.committed_step
    print(f"begins {committed}: {name_of(model.parameters())}", flush=True)
    for chosen in batches(sampler):
        hurry = Path(os.environ.get("OUTER_HURRY", "-")).exists()
        if number == 0 and not hurry:
            leave_time(run.session, until - step, step_s)
        if [step, number] == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if not hurry:
            time.sleep(step_s / 4)
        print(f"inner {step} {number}", flush=True)
        loss = loss_of(model, chosen)
        loss.backward()
        run.metrics(loss=loss.item())
        inner.step()
        inner.zero_grad()
        number += 1
        if run.drawing_step != step:
            step, number = run.drawing_step, 0
        elif not number % 2:
            print(f"local {step}: {name_of(model.parameters())}", flush=True)
        if run.committed_step != committed:
            committed = run.committed_step
            print(f"global {committed}: {name_of(run.shared.parameters())}", flush=True)
            print(f"loss {committed}: {run.step.metrics['loss']:.17g}", flush=True)
            if committed >= until:
                break
    run.close()


if __name__ == "__main__":
    main()
