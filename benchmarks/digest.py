"""The cost of the digest that members compare at the commit every FABRIC_DIGEST_EVERY steps.

The state is that of a model with AdamW, 1 GiB in tensors of mixed sizes, on the CPU. A digest reads all of
it: it is compared with a copy of the same bytes into memory that is present already, and with the optimizer's
own step. FABRIC_DIGEST_EVERY steps share one digest. The digest is taken while forward and backward run. The
benchmark also measures the main thread's work before and after it, and its duration beside a sleeping main
thread. ``snapshot.py`` measures the steps of a real job.
"""

import statistics
import time

import torch
from common import begin, describe, finish, interleave, no_options, paired, say, table

from fabric.ckpt_server.state.snapshot import CpuCopier
from fabric.ckpt_server.state.training_state import StateDescriber
from fabric.client.state.mutation_guard import MutationGuard
from fabric.runtime.config import Settings

GB = 2**30
WIDTHS = (64, 256, 1024, 2048)
MAIN_PART = "main thread's part of a digest beside it"


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose parameters and AdamW's two moments of each take about 1 GiB, after one step."""
    layers: list[torch.nn.Module] = []
    left = GB // 3 // 4
    while left > 0:
        width = WIDTHS[len(layers) % len(WIDTHS)]
        layers.append(torch.nn.Linear(width, 2048))
        left -= sum(p.numel() for p in layers[-1].parameters())
    model = torch.nn.ModuleList(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    return model, optimizer


def main() -> None:
    no_options(__doc__)
    torch.set_num_threads(1)
    begin()
    model, optimizer = build()
    state = StateDescriber({"model": model, "optimizer": optimizer})
    view = state.capture(0)
    nbytes = sum(tensor.nbytes for _, tensor in view.tensors)
    copies = [torch.zeros_like(tensor) for _, tensor in view.tensors]

    def digest() -> None:
        state.capture(0).digest()

    def copy() -> None:
        for (_, tensor), target in zip(view.tensors, copies, strict=True):
            target.copy_(tensor)

    def describe_alone() -> None:
        state.capture(0)

    def step() -> None:
        optimizer.step()

    copier = CpuCopier()
    under_way: list[float] = []

    def beside() -> float:
        """Do the main thread's part: begin, and check at the end for writes."""
        began = time.perf_counter()
        view = state.capture(0)
        guard, reading = MutationGuard(view), copier.digest(view)
        begun = time.perf_counter()
        reading.blocks.wait()
        asked = time.perf_counter()
        reading.help()
        if guard.written() or not reading.digest():
            raise SystemExit("digest.py: the state was changed")
        under_way.append(asked - began)
        return begun - began + time.perf_counter() - asked

    sides = {
        "digest": digest,
        "copy": copy,
        "describing alone": describe_alone,
        "optimizer step": step,
        MAIN_PART: beside,
    }
    began = time.perf_counter()
    found = interleave(sides)
    copier.close()
    found["that digest, until it is there"] = under_way
    rows = [(name, describe(seconds)) for name, seconds in found.items()]
    table(
        f"{nbytes / GB:.2f} GiB in {len(copies)} tensors, {time.perf_counter() - began:.0f} s",
        ("what", "time"),
        rows,
    )
    every = Settings().digest_steps
    digest_s = statistics.median(found["digest"])
    per_gb_ms = digest_s * 1000 * GB / nbytes
    say(f"shared by {every} steps, that is {per_gb_ms / every:.1f} ms per step and GiB")
    finish(
        {
            "ms_per_gb": round(per_gb_ms, 2),
            "vs_copy": paired(found["digest"], found["copy"]),
            "vs_optimizer_step": paired(found["digest"], found["optimizer step"]),
            "digest_every": every,
            "ms_per_step_and_gb": round(per_gb_ms / every, 2),
            "beside_main_thread_ms": round(statistics.median(found[MAIN_PART]) * 1000, 3),
        }
    )


if __name__ == "__main__":
    main()
