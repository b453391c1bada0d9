"""What a loop changes in a later step is refused before the first one. A healthy loop is left alone."""

import textwrap

import pytest
import torch

from fabric.client.loop.later_changes import refuse_changed_batches, refuse_early_changes, refuse_later_hooks
from fabric.client.loop.unshared_objects import OptimizerWatch
from fabric.errors import ConfigError

BASE = """
import sys
import torch
from fabric.client.loop.later_changes import refuse_later_changes
from fabric.client.loop.unshared_objects import OptimizerWatch

body, head, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
model = torch.nn.Sequential(body, head)

def SGD(of=model, lr=0.1):
    return torch.optim.SGD(of.parameters(), lr=lr)

def exchange(optimizer):
    watch = OptimizerWatch(model.parameters(), [optimizer], [])
    refuse_later_changes(sys._getframe(1), model, watch)

def freeze(module, state=False):
    for p in module.parameters():
        p.requires_grad = state

def unfreeze_late(epoch):
    if epoch > 1:
        body.requires_grad_(True)

class Trainer:
    def __init__(self):
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def run(self):
        for _ in range(2): exchange(self.optimizer)

def train(lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(2): exchange(optimizer)
"""
NAMED = {
    "an optimizer of each pass": (
        """
        for lr in (0.1, 0.01):
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            for _ in range(2): exchange(optimizer)
        """,
        "script.py:36 makes a new SGD in each pass of a loop",
    ),
    "a function that trains": (
        """
        for lr in (0.1, 0.01): train(lr)
        """,
        "script.py:32 makes a new SGD",
    ),
    "an optimizer from a function": (
        """
        for fold in range(3):
            optimizer = SGD()
            exchange(optimizer)
        """,
        "makes a new SGD",
    ),
    "a trainer of each pass": (
        """
        for fold in range(3):
            trainer = Trainer()
            trainer.run()
        """,
        "script.py:36 makes a new Trainer in each pass",
    ),
    "unfrozen in a later epoch": (
        """
        freeze(body)
        optimizer = SGD()
        for epoch in range(3):
            if epoch == 2:
                for p in body.parameters(): p.requires_grad = True
            exchange(optimizer)
        """,
        "script.py:39 unfreezes a part of the model in a later step",
    ),
    "frozen after some steps, by a function": (
        """
        optimizer, step = SGD(), 0
        while step < 9:
            exchange(optimizer)
            step += 1
            if step == 5: freeze(body)
        """,
        "freezes a part of the model in a later step",
    ),
    "a part by its place, unfrozen by a function": (
        """
        freeze(body)
        optimizer = SGD()
        for epoch in range(3):
            if epoch == 2: freeze(model[0], True)
            exchange(optimizer)
        """,
        "script.py:38 unfreezes",
    ),
    "unfrozen by a function that asks for the epoch": (
        """
        body.requires_grad_(False)
        optimizer = SGD()
        for epoch in range(3):
            unfreeze_late(epoch)
            exchange(optimizer)
        """,
        "script.py:38 unfreezes",
    ),
    "a state that is made from the epoch": (
        """
        optimizer = SGD()
        for epoch in range(3):
            freeze(head, epoch < 2)
            exchange(optimizer)
        """,
        "freezes",
    ),
    "a second optimizer of the model": (
        """
        optimizer, second = SGD(body), SGD(head)
        for epoch in range(3):
            exchange(optimizer)
            optimizer.step()
            second.step()
        """,
        "an optimizer SGD changes parameters of the model and is not attached",
    ),
    "a second model": (
        """
        optimizer, second = SGD(), SGD(other)
        for epoch in range(3):
            exchange(optimizer)
            second.step()
        """,
        "parameters that are not in the attached model",
    ),
}
HEALTHY = {
    "a loop of one pass": "for fold in [0]: train(0.1)",
    "a range of one": "folds = 1\nfor fold in range(folds): train(0.1)",
    "a loop that ends after a training": """
        for attempt in range(3):
            try:
                train(0.1)
                break
            except MemoryError:
                pass
        """,
    "the loop of a server": """
        tasks = [0.1]
        while tasks:
            train(tasks.pop())
        """,
    "a loop that goes to one fold": """
        for fold in range(5):
            if fold != 3:
                continue
            train(0.1)
        """,
    "a fold that is made in a loop that goes to one": """
        for fold in range(5):
            if fold != 3:
                continue
            optimizer = SGD()
            for _ in range(2): exchange(optimizer)
        """,
    "a training under a test": """
        for fold in range(5):
            if fold == 3:
                train(0.1)
        """,
    "a training that is tried again": """
        for attempt in range(5):
            train(0.1)
            if attempt >= 0: break
        """,
    "an optimizer that is made once": """
        optimizer = None
        for epoch in range(3):
            if optimizer is None:
                optimizer = SGD()
            exchange(optimizer)
        """,
    "an inner loop of meta-learning": """
        optimizer = SGD()
        for task in range(3):
            inner = SGD(other)
            inner.step()
            exchange(optimizer)
            optimizer.step()
        """,
    "frozen at the start of each epoch": """
        optimizer = SGD()
        for epoch in range(3):
            freeze(body)
            exchange(optimizer)
        """,
    "to and fro, as in a GAN": """
        optimizer = SGD()
        for step in range(3):
            freeze(head, True)
            if step % 2 == 0:
                freeze(head)
                freeze(head, True)
            exchange(optimizer)
        """,
    "an input that requires gradients": """
        optimizer = SGD()
        for step in range(3):
            x = torch.ones(2)
            if step > 1: x.requires_grad_(True)
            exchange(optimizer)
        """,
    "another model that is frozen later": """
        optimizer = SGD()
        for step in range(3):
            if step > 1: freeze(other)
            exchange(optimizer)
        """,
    "the first epoch alone": """
        optimizer = SGD()
        for epoch in range(3):
            if epoch == 0: freeze(body)
            exchange(optimizer)
        """,
}


def run(folder, lines):
    script = folder / "script.py"
    script.write_text(BASE + textwrap.dedent(lines))
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", NAMED)
def test_a_later_change_is_refused_with_its_place(tmp_path, name):
    lines, words = NAMED[name]
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, lines)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loop_is_left_alone(tmp_path, name):
    run(tmp_path, HEALTHY[name])


FORKS = """
import os
for rank in range(2):
    pid = os.fork()
    if pid == 0:
        try:
            train(0.1)
        except Exception:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


def test_the_loop_of_a_process_that_forks_its_ranks_is_left_alone(tmp_path):
    run(tmp_path, FORKS)


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.current_epoch = torch.nn.Linear(2, 2), 0
        self.body.requires_grad_(False)


class Unfreezing(Module):
    def on_train_epoch_start(self):
        if self.current_epoch == 2:
            self.body.requires_grad_(True)


class Frozen(Module):
    def on_train_epoch_start(self):
        self.body.requires_grad_(False)


def test_a_hook_that_unfreezes_in_a_later_epoch_is_refused():
    module = Unfreezing()
    with pytest.raises(ConfigError, match="unfreezes a part of the model in a later step"):
        refuse_later_hooks([module], {}, module)
    frozen = Frozen()
    refuse_later_hooks([frozen], {}, frozen)


class Clipping(Module):
    def on_after_backward(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class Halving(Module):
    def backward(self, loss):
        loss.backward()
        for p in self.parameters():
            p.grad *= 0.5


class Measuring(Module):
    def on_after_backward(self):
        self.norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])

    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


def test_a_hook_that_changes_gradients_before_they_are_averaged_is_refused():
    for hooked, name in ((Clipping(), "Clipping.on_after_backward"), (Halving(), "Halving.backward")):
        with pytest.raises(ConfigError, match=rf"{name} \(test_later_changes.py:\d+\) changes gradients"):
            refuse_early_changes([Measuring(), hooked])
    refuse_early_changes([Measuring()])


class Mixing(Module):
    def on_train_batch_start(self, batch, batch_idx):
        x, _ = batch
        x.mul_(0.5)


class Masking(Module):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        batch["mask"][0] = 0


class Looking(Module):
    def on_train_batch_start(self, batch, batch_idx):
        self.seen = [x.mean() for x in batch]
        self.zero_grad()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        batch[0].mul_(0.5)
        return batch


def test_a_hook_that_changes_a_batch_at_its_start_is_refused():
    for hooked in (Mixing(), Masking()):
        with pytest.raises(ConfigError, match=r"on_train_batch_start \(test_later_changes.py:\d+\) changes"):
            refuse_changed_batches([Looking(), hooked])
    refuse_changed_batches([Looking()])


class Wrapper(torch.optim.SGD):
    """An optimizer that makes the steps of another one, as that of SAM does."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.base = torch.optim.Adam(self.param_groups)

    def step(self, closure=None):
        self.base.step()


def watched(attached, *, shared=()):
    model = torch.nn.Linear(2, 1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = attached(model.parameters())
    watch = OptimizerWatch(model.parameters(), [optimizer], shared)
    watch.begin()
    return model, optimizer, watch


def test_an_optimizer_that_is_made_in_mid_training_is_refused_at_its_first_step():
    model, optimizer, watch = watched(torch.optim.SGD)
    try:
        watch.step = 0
        optimizer.step()
        second = torch.optim.Adam(model.parameters())
        with pytest.raises(ConfigError, match="Adam changes parameters of the model and is not attached"):
            second.step()
    finally:
        watch.end()
    second.step()


def test_an_optimizer_of_another_model_is_refused_in_its_second_step():
    _, _, watch = watched(torch.optim.SGD)
    other = torch.nn.Linear(2, 1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    try:
        for watch.step in (0, 0):
            second.step()
        watch.step = 1
        with pytest.raises(ConfigError, match="not in the attached model"):
            second.step()
        torch.optim.SGD(other.parameters(), lr=0.1).step()  # it lives for one step
    finally:
        watch.end()


def test_wrappers_of_the_attached_optimizer_and_what_they_wrap_make_steps():
    _, optimizer, watch = watched(Wrapper)
    try:
        for watch.step in range(3):
            optimizer.step()
    finally:
        watch.end()


def test_an_optimizer_in_the_shared_state_makes_steps():
    other = torch.nn.Linear(2, 1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    _, _, watch = watched(torch.optim.SGD, shared=[{"second": second}])
    try:
        for watch.step in range(3):
            second.step()
    finally:
        watch.end()
