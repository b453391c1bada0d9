"""One rank of a replica of several: runs the ``train`` of the example that ``SHARDED`` names, paced.

The pauses stand for a device that computes; without them the job would end before a replica rejoins.

The buckets are small, so that the exchange overlaps with backward. ``SHARDED_OVERLAP``: ``proven``, where the
backward of an FSDP2 model waits in its middle until a bucket is exchanged, ``handed over``, which prints each
bucket that is handed over before the order ends, ``off``, or ``changed@STEP``: rank 1 of r0 changes a
gradient after that step's last backward.
"""

import faulthandler
import functools
import importlib
import importlib.util
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

# Import this module before any fork, because the import takes a second.
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from pace import leave_time

import fabric.client
from fabric.client.gradients.bucket_stream import BucketReadiness, Overlap
from fabric.client.gradients.exchange_thread import ExchangeThread
from fabric.client.loop.step import Step
from fabric.ftar.buckets import FlatGradients

BUCKET_BYTES = 200  # so the last layer is a bucket
DEADLINE_S = 30.0
EXAMPLES = Path(__file__).parents[2] / "examples"
MICRO_BATCH = 4


def example(name: str):
    """Return the module of one example."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class Paced(torch.utils.data.Dataset):
    """The examples' samples; while a replica is away, rank 0 pauses to let it come back."""

    def __init__(self, samples) -> None:
        self.samples = samples
        self.step_s = float(os.environ.get("TINY_STEP_S", "0.03"))
        self.until = int(os.environ.get("TINY_STEPS", "60"))
        self.left_to = -1  # the last step in which this trainer paused for an absent replica
        rank, _, step = os.environ.get("SHARDED_RAISES", "").partition("@")
        self.raises_at = int(step) if rank == os.environ["SHARDED_RANK"] else -1
        self.sessions: list = []
        attach = fabric.client.attach
        fabric.client.attach = lambda *a, **k: self.sessions.append(attach(*a, **k)) or self.sessions[-1]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        session = self.sessions[0]
        if self.raises_at == (step := session.committed_step):
            raise ValueError("the user's own mistake")
        if os.environ["SHARDED_RANK"] == "0" and step != self.left_to:
            self.left_to = step
            leave_time(session, self.until - step, self.step_s)
        time.sleep(self.step_s / 4 / MICRO_BATCH)
        return self.samples[index]


def prove_overlap(samples: Paced) -> None:
    """Let the backward of the second layer wait until a bucket is reduced, once the exchange has begun."""
    reduced, reduce = threading.Event(), ExchangeThread._reduce

    def watched(self, *arguments):
        reduce(self, *arguments)
        reduced.set()

    def in_the_midst(layer: torch.nn.Module, *_: object) -> None:
        session = samples.sessions[0]
        # The members learn their first round from the others' contributions.
        if isinstance(layer, torch.nn.ReLU) and session.committed_step and session.overlap.stream is not None:
            print(f"overlapped {reduced.wait(DEADLINE_S)}", flush=True)

    def backward(self, *arguments, **options):
        reduced.clear()
        run(self, *arguments, **options)

    run, Step.backward, ExchangeThread._reduce = Step.backward, backward, watched
    torch.nn.modules.module.register_module_full_backward_hook(in_the_midst)


def change_a_gradient(samples: Paced, at: int) -> None:
    """As ``torch.nn.utils.clip_grad_norm_`` does, which changes no version of a sharded gradient."""
    run = Step.backward

    def backward(self, *arguments, **options):
        run(self, *arguments, **options)
        session = samples.sessions[0]
        if (session.settings.replica, os.environ["SHARDED_RANK"], self.number) == ("r0", "1", at):
            torch._foreach_mul_([session.overlap._parameters[0].grad], 1.0)

    Step.backward = backward


def main() -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    rank, size = int(os.environ["SHARDED_RANK"]), int(os.environ["SHARDED_RANKS"])
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['SHARDED_STORE']}", rank=rank, world_size=size
    )
    module = example(os.environ["SHARDED"])
    # import by name, because the package has a function ``attach`` too
    attaching = importlib.import_module("fabric.client.attach")
    attaching.FlatGradients = functools.partial(FlatGradients, bucket_bytes=BUCKET_BYTES)
    samples = Paced(example("fsdp2").samples(64))
    overlap, _, step = os.environ.get("SHARDED_OVERLAP", "").partition("@")
    if overlap == "proven":
        prove_overlap(samples)
    elif overlap == "handed over":
        finish = BucketReadiness.finish
        BucketReadiness.finish = lambda *given: (print("overlapped True", flush=True), finish(*given))
    elif overlap == "changed":
        change_a_gradient(samples, int(step))
    elif overlap == "off":
        Overlap.ready, Overlap.backward = lambda *_: None, lambda self, step, weight, run: run()
    module.train(samples, int(os.environ.get("TINY_STEPS", "60")))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
