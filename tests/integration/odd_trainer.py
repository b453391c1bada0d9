"""Unusual user's loops: mistakes by name, a plain loop, and a loop that prints its losses.

``ODD`` names what to do. Apart from its oddity, each loop equals ``tiny_trainer``'s.
"""

import os
import time
from collections.abc import Callable

import torch
from pace import leave_time
from tiny_trainer import Samples, build

import fabric.client
from fabric.client.loop.model_watch import LOOK_EVERY

ODD_STEP = 5


class Opaque:
    """Like a scheduler, but its state holds a function, which no file can store."""

    def __init__(self, opaque_from: int = 0) -> None:
        self.calls, self._opaque_from = 0, opaque_from

    def step(self) -> None:
        self.calls += 1

    def state_dict(self) -> dict:
        rule = (lambda step: step) if self.calls >= self._opaque_from else None
        return {"calls": self.calls, "schedule": {"rule": rule}}

    def load_state_dict(self, state: dict) -> None:
        self.calls = state["calls"]


def with_batch_norm() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    layers = torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=1e-2)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    state: dict | None = None,
    in_batch: Callable[[int], object] = lambda step: None,
    sizes: tuple[int, int, int] = (100, 24, 2),
    **arguments: object,
) -> None:
    """tiny_trainer's loop; ``in_batch(step)`` runs in every micro-batch; "break" leaves the inner loop."""
    session = fabric.client.attach(model, optimizer, state=state or {}, **arguments)
    samples, global_batch, micro_batch = sizes
    data = session.loader(
        Samples(samples), global_batch_size=global_batch, micro_batch_size=micro_batch, seed=3
    )
    for step in session.steps(data, until=int(os.environ.get("TINY_STEPS", "30"))):
        for x, y in step:
            time.sleep(float(os.environ.get("TINY_STEP_S", "0.02")) / 4)
            step.backward(torch.nn.functional.mse_loss(model(x), y))
            if in_batch(step.number) == "break":
                break
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for part in (state or {}).values():
            part.step()
        optimizer.zero_grad()
    session.close()


def train_as_everybody(in_batch: Callable[[int], object]) -> None:
    """Train as tiny_trainer does, as one replica among others."""
    model, optimizer, scheduler = build(64)
    train(model, optimizer, state={"scheduler": scheduler}, in_batch=in_batch)


def print_losses() -> None:
    """The mean loss of every step, and the state's digest at the end, one JSON-like line each."""
    model, optimizer, scheduler = build(64)
    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    data = session.loader(Samples(100), global_batch_size=24, micro_batch_size=2, seed=3)
    for step in session.steps(data, until=20):
        for x, y in step:
            loss = torch.nn.functional.mse_loss(model(x), y)
            step.backward(loss)
            session.metrics(loss=loss.item() * len(x))
        print(f"loss {step.number} {step.metrics['loss']:.9g}", flush=True)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    session.close()


def plain_loop() -> None:
    """A loop that fabric does not own: every replica has data of its own and averages with ``exchange``."""
    torch.manual_seed(1)
    model = torch.nn.Linear(16, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = fabric.client.attach(model, optimizer)
    until, mine = int(os.environ.get("TINY_STEPS", "30")), int(os.environ["FABRIC_REPLICA"][1:])
    while session.committed_step < until:
        # this pause stands for a device that computes
        time.sleep(float(os.environ.get("TINY_STEP_S", "0.02")))
        # Each replica's own gradient is a constant (its number + 1), so the average shows who contributed.
        (model.weight.sum() * (mine + 1)).backward()
        step = session.exchange(weight=float(os.environ.get("ODD_WEIGHT", "1")))
        average = model.weight.grad.flatten()
        same = bool((average == average[0]).all())
        print(f"exchange {step.number} {average[0].item():.9g} {same} {len(session.members)}", flush=True)
        optimizer.step()
        optimizer.zero_grad()
    session.close()


def another_dtype() -> None:
    """One tensor has another dtype than at the other replicas."""
    model, optimizer, scheduler = build(64)
    model[3].bias.data = model[3].bias.data.double()
    train(model, optimizer, state={"scheduler": scheduler})


def another_order() -> None:
    """The same tensors, registered in another order."""
    model, optimizer, scheduler = build(64)
    model._modules["0"] = model._modules.pop("0")
    train(model, optimizer, state={"scheduler": scheduler})


def change_the_model(change: Callable[[torch.nn.Module], object], when: int) -> None:
    """Train as tiny_trainer does, until ``change`` in step ``when``."""
    model, optimizer, scheduler = build(64)
    train(
        model,
        optimizer,
        state={"scheduler": scheduler},
        in_batch=lambda step: change(model) if step == when else None,
    )


def add_a_parameter(model: torch.nn.Module) -> None:
    model.register_parameter("late", torch.nn.Parameter(torch.zeros(3)))


def remove_a_parameter(model: torch.nn.Module) -> None:
    model[3].bias = None


def raise_at(step: int) -> None:
    if step == ODD_STEP:
        raise ValueError("the user's own mistake")


def no_gradients() -> None:
    model, optimizer, _ = build(64)
    train(model.requires_grad_(False), optimizer)


def leave_at(step: int) -> str:
    return "break" if step == ODD_STEP else ""


def iterate_twice() -> None:
    model, optimizer, scheduler = build(64)
    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    data = session.loader(Samples(100), global_batch_size=24, micro_batch_size=2, seed=3)
    for step in session.steps(data, until=int(os.environ.get("TINY_STEPS", "30"))):
        for _ in range(2):
            for x, y in step:
                step.backward(torch.nn.functional.mse_loss(model(x), y))


class Average:
    """A running mean in the shared state that wrongly changes during forward, not at the optimizer's step."""

    def __init__(self) -> None:
        self.mean = torch.zeros(32)

    def step(self) -> None:
        """Change the running mean at the right place."""

    def state_dict(self) -> dict:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict) -> None:
        self.mean.copy_(state["mean"])


def average_in_forward(written_to: Callable[[torch.Tensor], torch.Tensor]) -> None:
    average = Average()

    def update(step: int) -> None:
        if step == ODD_STEP:
            written_to(average.mean).mul_(0.9).add_(0.1)

    train(*build(64)[:2], state={"average": average}, in_batch=update)


def resumed() -> None:
    """Begin at the step of the script's own checkpoint, which is older on each further replica. Each step
    prints whether this replica is the writer.
    """
    model, optimizer, scheduler = build(64)
    mine = 40 - 10 * int(os.environ["FABRIC_REPLICA"][1:])
    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler}, step=mine)
    data = session.loader(Samples(100), global_batch_size=24, micro_batch_size=2, seed=3)
    until = int(os.environ["TINY_STEPS"])
    for step in session.steps(data, until=until):
        leave_time(session, until - step.number, 0.01)
        for x, y in step:
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        print(f"step {step.number} {step.contributed} {len(session.members)} {session.is_writer}", flush=True)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    session.close()


def scheduler_apart() -> None:
    """A deliberate mistake: a joining replica has its own learning rate."""
    model, optimizer, scheduler = build(64)
    session = fabric.client.attach(model, optimizer, unshared="ignore")
    data = session.loader(Samples(100), global_batch_size=24, micro_batch_size=2, seed=3)
    until = int(os.environ["TINY_STEPS"])
    for step in session.steps(data, until=until):
        leave_time(session, until - step.number, 0.01)
        for x, y in step:
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    session.close()


def empty_step() -> None:
    """Step 2 has no data: momentum must not move the model there."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = fabric.client.attach(model, optimizer)
    for number in range(4):
        before = model.weight.detach().clone()
        model.weight.sum().backward()
        step = session.exchange(weight=0.0 if number == 2 else 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step.number} {step.skipped} {torch.equal(before, model.weight)}", flush=True)
    session.close()


def with_scheduler_outside(**more: object) -> None:
    model, optimizer, scheduler = build(64)
    train(model, optimizer, **more)
    scheduler.step()


def ddp_of_a_plain_model() -> None:
    model, optimizer, scheduler = build(64)
    fabric.client.ddp(model, fabric.client.attach(model, optimizer, state={"scheduler": scheduler}))


ODDITIES: dict[str, Callable[[], None]] = {
    "a state with a function": lambda: train(*build(64)[:2], state={"scheduler": Opaque()}),
    "a state with a function later": lambda: train(*build(64)[:2], state={"scheduler": Opaque(ODD_STEP)}),
    "a state without state_dict": lambda: train(*build(64)[:2], state={"scheduler": object()}),
    "a state named model": lambda: train(*build(64)[:2], state={"model": Opaque(99)}),
    "batch norm": lambda: train(*with_batch_norm()),
    "batch norm ignored": lambda: train(*with_batch_norm(), buffers="ignore"),
    "another word for buffers": lambda: train(*with_batch_norm(), buffers="averaged"),
    "an unknown setting": lambda: train(*build(64)[:2], lighthouses="http://127.0.0.1:1"),
    "no gradients": no_gradients,
    "sizes that do not divide": lambda: train(*build(64)[:2], sizes=(100, 24, 5)),
    "no micro-batch": lambda: train(*build(64)[:2], sizes=(100, 24, 0)),
    "no data": lambda: train(*build(64)[:2], sizes=(0, 24, 2)),
    "other sizes": lambda: train(*build(64)[:2], sizes=(100, 24, 4)),
    "a state without the scheduler": lambda: train(*build(64)[:2]),
    "the inner loop left early": lambda: train_as_everybody(leave_at),
    "a step iterated twice": iterate_twice,
    "another dtype": another_dtype,
    "another order": another_order,
    "a parameter added": lambda: change_the_model(add_a_parameter, LOOK_EVERY),
    "a parameter removed": lambda: change_the_model(remove_a_parameter, LOOK_EVERY),
    "a parameter added between looks": lambda: change_the_model(add_a_parameter, ODD_STEP),
    "a parameter removed between looks": lambda: change_the_model(remove_a_parameter, ODD_STEP),
    "an average in forward": lambda: average_in_forward(lambda mean: mean),
    "an average in forward, by .data": lambda: average_in_forward(lambda mean: mean.data),
    "an exception": lambda: train_as_everybody(raise_at),
    "losses": print_losses,
    "resumed": resumed,
    "an empty step": empty_step,
    "a scheduler apart": scheduler_apart,
    "a scheduler outside the state": with_scheduler_outside,
    "another word for unshared": lambda: with_scheduler_outside(unshared="warn"),
    "a negative step": lambda: with_scheduler_outside(step=-1),
    "ddp of a plain model": ddp_of_a_plain_model,
    "plain": plain_loop,
}


def main() -> None:
    torch.set_num_threads(1)
    ODDITIES[os.environ["ODD"]]()


if __name__ == "__main__":
    main()
