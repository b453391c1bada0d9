"""The trainer of every replica of the demo: a byte-level GPT in the documented training loop.

No code in the loop handles failures. With ``FABRIC_DISABLE=1`` the same file runs alone. The option
``--drop-inherited`` is for the control run of the demo's own test: it leaves one micro-batch of a dead
replica out of the gradient, and the loss curve must show that.
"""

import argparse
import math

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

import fabric.client
from fabric.cli.demo.corpus import ByteWindows, read_corpus
from fabric.cli.demo.gpt import BYTES, ByteGPT

CONTEXT = 64
MICRO_BATCH = 2
# Divisible by two and by three: three replicas have equal shares, and after a death two replicas have, too.
MICRO_BATCHES = 12
LEARNING_RATE = 1e-3


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a tenth of the run warms up, then a cosine down to a tenth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    part = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, part)))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy of ``batch`` = (tokens, targets), each (samples, CONTEXT)."""
    tokens, targets = batch
    logits = model(tokens)
    return functional.cross_entropy(logits.view(-1, BYTES), targets.reshape(-1))


class ControlRun:
    """Drops the gradient of the first micro-batch after a failure, once, if armed.

    A failure has happened when the epoch is not the first that this process saw.
    """

    def __init__(self, *, armed: bool) -> None:
        self.armed = armed
        self._first_epoch = 0

    def scaled(self, loss: Tensor, epoch: int) -> Tensor:
        self._first_epoch = self._first_epoch or epoch
        if not self.armed or epoch == self._first_epoch:
            return loss
        self.armed = False
        return loss * 0.0


def train(steps: int, control: ControlRun) -> None:
    """Train to committed step ``steps``; returns when the job is complete."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ByteGPT(context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: schedule(step, steps))
    dataset = ByteWindows(read_corpus(), CONTEXT)

    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    data = session.loader(
        dataset,
        global_batch_size=MICRO_BATCHES * MICRO_BATCH,
        micro_batch_size=MICRO_BATCH,
        seed=0,
    )
    for step in session.steps(data, until=steps):
        for batch in step:
            loss = loss_of(model, batch)
            step.backward(control.scaled(loss, session.epoch))
            tokens = batch[1].numel()
            session.metrics(loss=loss.item() * tokens, tokens=tokens)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    session.close()


def main() -> None:
    """Run the command line of ``python -m fabric.cli.demo.trainer``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="train to this committed step")
    parser.add_argument("--drop-inherited", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    train(arguments.steps, ControlRun(armed=arguments.drop_inherited))


if __name__ == "__main__":
    main()
