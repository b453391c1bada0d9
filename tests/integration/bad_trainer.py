"""User's loops with wrong values: a bit flips in memory, a gradient is NaN, a replay is too slow, the model
changes. ``BAD`` names the fault, ``BAD_STEP`` its step.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from pace import leave_time
from tiny_trainer import Samples, build

import fabric.client
from fabric.client.loop.step import Step

STEP = int(os.environ.get("BAD_STEP", "6"))
STEP_S = float(os.environ.get("TINY_STEP_S", "0.02"))


def flip_a_bit(model: torch.nn.Module) -> None:
    """Flip one bit of one weight, as a bad memory cell would."""
    bits = next(model.parameters()).detach().view(torch.int32).flatten()
    bits[3] ^= 1 << 20


def train(
    after_update: Callable[[Step, torch.nn.Module], None] = lambda step, model: None,
    loss_of: Callable[[Step, torch.Tensor], torch.Tensor] = lambda step, loss: loss,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    on_model: Callable[[torch.nn.Module], None] = lambda model: None,
    scheduler_class: type[torch.optim.lr_scheduler.LambdaLR] = torch.optim.lr_scheduler.LambdaLR,
) -> None:
    """tiny_trainer's loop. ``after_update(step, model)`` runs behind the optimizer, ``loss_of(step, loss)``
    makes the loss of every micro-batch."""
    model, _, _ = build(int(os.environ.get("TINY_WIDTH", "64")))
    on_model(model)
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    scheduler = scheduler_class(optimizer, lambda step: 1 / (1 + step / 50))
    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    data = session.loader(Samples(100), global_batch_size=24, micro_batch_size=2, seed=3)
    until = int(os.environ.get("TINY_STEPS", "30"))
    for step in session.steps(data, until):
        leave_time(session, until - step.number, STEP_S)
        for x, y in step:
            time.sleep(STEP_S / 4)
            loss = loss_of(step, torch.nn.functional.mse_loss(model(x), y))
            step.backward(loss)
            session.metrics(loss=loss.item() * len(x), samples=len(x))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        after_update(step, model)
        optimizer.zero_grad()
    session.close()


def a_flipped_bit() -> None:
    """Flip the bit once, and not again if the same step is repeated."""
    to_come = {STEP}

    def flip(step: Step, model: torch.nn.Module) -> None:
        if step.number in to_come:
            to_come.clear()
            flip_a_bit(model)

    train(after_update=flip)


def let_r0_get_ahead(steps: int) -> None:
    """Return when r0 has committed this many more steps, or lists this replica, or has finished."""
    journal = Path(os.environ["FABRIC_JOURNAL"]).with_name("r0.jsonl")
    begun = journal.read_text().count('"event":"commit"')
    while True:
        lines = journal.read_text().splitlines()
        roster = next((x for x in reversed(lines) if '"event":"epoch"' in x), "")
        if f'"{os.environ["FABRIC_REPLICA"]}"' in roster.partition('"roster":')[2].partition("]")[0]:
            return
        if sum('"event":"commit"' in x for x in lines) >= begun + steps or '"event":"finish"' in lines[-1]:
            return
        time.sleep(0.01)


class SlowLoading(torch.optim.lr_scheduler.LambdaLR):
    """A state whose loading takes as long as three steps of the other members."""

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        let_r0_get_ahead(3)
        super().load_state_dict(state_dict)


def a_slow_replay() -> None:
    """While this replica replays, its update takes as long as two steps of the other members."""
    train(
        after_update=lambda step, model: None if step.contributed else let_r0_get_ahead(2),
        scheduler_class=SlowLoading,
    )


def not_a_number() -> None:
    train(loss_of=lambda step, loss: loss * torch.nan if step.number == STEP else loss)


def a_sparse_gradient() -> None:
    """Give the embedding a sparse gradient, as sparse=True does. At attach such a hook is refused."""
    models: list[torch.nn.Module] = []

    def sparsen(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to_sparse()

    def watch(step: Step, loss: torch.Tensor) -> torch.Tensor:
        if step.number == STEP and models:
            next(models.pop().parameters()).register_post_accumulate_grad_hook(sparsen)
        return loss

    train(loss_of=watch, on_model=models.append)


def a_frozen_layer() -> None:
    def freeze(step: Step, model: torch.nn.Module) -> None:
        if step.number == STEP:
            model[3].bias.requires_grad_(False)

    train(after_update=freeze)


class Drifting(torch.optim.AdamW):
    """An optimizer whose states differ after equal gradients, as on unlike devices."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 + 1e-6 * int(os.environ["FABRIC_REPLICA"][1:]))


BAD: dict[str, Callable[[], object]] = {
    "": train,
    "a flipped bit": a_flipped_bit,
    "not a number": not_a_number,
    "a sparse gradient": a_sparse_gradient,
    "a frozen layer": a_frozen_layer,
    "an optimizer that evaluates": lambda: train(optimizer_class=torch.optim.LBFGS),
    "a slow replay": a_slow_replay,
    "states that drift": lambda: train(optimizer_class=Drifting),
}


def main() -> None:
    torch.set_num_threads(1)
    BAD[os.environ.get("BAD", "")]()


if __name__ == "__main__":
    main()
