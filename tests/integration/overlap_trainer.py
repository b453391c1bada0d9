"""tiny_trainer's loop with several small buckets. Backward waits in its middle until a bucket is exchanged,
which proves the overlap.

``OVERLAP``: ``plain``, ``ddp`` (with another bucket layout on every replica), ``averaged`` (with buffers
that forward changes), ``after`` (as ``averaged``, without overlap), or ``changed``, where the user's code
changes a gradient after the last backward. ``OVERLAP_DEVICE``: on a simulated device.
"""

import functools
import importlib
import os
import tempfile
import threading
import time

import device_trainer
import torch
from pace import leave_time
from tiny_trainer import Samples, build
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import fabric.client
from fabric.client.gradients.exchange_thread import ExchangeThread
from fabric.ftar.buckets import FlatGradients

BUCKET_BYTES = 1000
CHANGED_AT = 9
DEADLINE_S = 30.0

reduced, first = threading.Event(), threading.Event()


def watch_the_exchange() -> None:
    """``reduced`` is set when a bucket's reduction has ended, with or without an error."""
    reduce = ExchangeThread._reduce

    def watched(self, *arguments):
        try:
            reduce(self, *arguments)
        finally:
            reduced.set()

    ExchangeThread._reduce = watched


def wrapped(model: torch.nn.Module) -> torch.nn.Module:
    with tempfile.NamedTemporaryFile() as rendezvous:
        distributed.init_process_group("gloo", init_method=f"file://{rendezvous.name}", rank=0, world_size=1)
    # The last layer is a bucket at both replicas; the first layer's two parameters are one bucket at r1 only.
    bucket_bytes = 100 if os.environ["FABRIC_REPLICA"] == "r0" else 500
    return DistributedDataParallel(
        model, bucket_cap_mb=bucket_bytes / 2**20, gradient_as_bucket_view=bucket_bytes == 100
    )


def build_for(how: str):
    model, *rest = build(64)
    if how in ("averaged", "after"):
        model = torch.nn.Sequential(*model[:3], torch.nn.BatchNorm1d(64, affine=False), model[3])
    return model, *rest


def adapt(session: fabric.client.Session, model: torch.nn.Module, how: str) -> None:
    if how == "after":
        session.overlap.unwatch()
        session.overlap.may_begin = lambda: False
    if how == "ddp":
        fabric.client.ddp(model, session)


def main() -> None:
    torch.set_num_threads(1)
    # import by name, because the package has a function ``attach`` too
    attaching = importlib.import_module("fabric.client.attach")
    attaching.FlatGradients = functools.partial(FlatGradients, bucket_bytes=BUCKET_BYTES)
    watch_the_exchange()
    if "OVERLAP_DEVICE" in os.environ:
        device_trainer.simulate()
    how, me = os.environ["OVERLAP"], os.environ["FABRIC_REPLICA"]
    inner, optimizer, scheduler = build_for(how)
    device = os.environ.get("TINY_DEVICE", "cpu")
    inner.to(device)
    model = wrapped(inner) if how == "ddp" else inner
    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler}, buffers="average")
    adapt(session, model, how)

    def in_the_midst(*_: object) -> None:
        """Called when the last layer's gradient is final and the first layer's is not begun."""
        if session.overlap.stream is None:
            return
        if how == "ddp" and not first.is_set():
            first.set()  # DDP has its final buckets only from the second backward on
            return
        member, deadline = session._engine.member, time.monotonic() + DEADLINE_S
        while not reduced.wait(0.01) and time.monotonic() < deadline:
            round_ = member.rounds.round
            if round_ is None or len(session.members) == 1:
                return  # the round was aborted, or this member is alone: there is no exchange
            if round_.step == member.epochs.links.first_step:
                return  # a newcomer learns its first round from the others' contributions
        print(f"overlapped {reduced.is_set()}", flush=True)

    inner[1].register_full_backward_hook(in_the_midst)

    data = session.loader(Samples(100), global_batch_size=24, micro_batch_size=2, seed=3)
    until = int(os.environ.get("TINY_STEPS", "40"))
    for step in session.steps(data, until):
        leave_time(session, until - step.number, 0.03)
        for x, y in step:
            print(f"computes {step.number}", flush=True)
            reduced.clear()
            loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
            step.backward(loss)
            if how == "changed" and step.number == CHANGED_AT and me == "r0":
                next(inner.parameters()).grad.mul_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    session.close()
