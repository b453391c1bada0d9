"""The error names a scheduler or scaler that is missing in ``state=``, but none that ``state=`` contains in
any form.
"""

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from fabric.client.attach import Choices
from fabric.client.loop.model_watch import LOOK_EVERY, ModelWatch, accept_optimizers
from fabric.client.loop.shared_state import SharedValue, with_state
from fabric.client.loop.unshared_objects import UnsharedWatch
from fabric.errors import ConfigError


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    # For this scheduler torch does not wrap the optimizer's ``step``.
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_is_not_in_the_state_is_refused_by_its_name(name):
    steered = optimizer()
    scheduler = SCHEDULERS[name](steered)
    with pytest.raises(ConfigError, match=f"an? {name} steers the optimizer and is not in state=") as refusal:
        UnsharedWatch([steered], {}).check()
    assert 'state={"scheduler": scheduler}' in str(refusal.value)
    assert 'unshared="ignore"' in str(refusal.value)
    UnsharedWatch([steered], {"scheduler": scheduler}).check()
    UnsharedWatch([steered], {}, ignored=True).check()


class Progress:
    """A user's object whose own state contains the scheduler's."""

    def __init__(self, scheduler):
        self.parts = {"schedulers": [scheduler]}


class Handle:
    """A wrapper of an optimizer like Accelerate's."""

    def __init__(self, inner):
        self.inner = inner

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def step(self):
        return self.inner.step


def test_a_scheduler_counts_wherever_an_object_of_the_state_holds_it():
    steered = optimizer()
    UnsharedWatch([steered], {"progress": Progress(lr_scheduler.StepLR(steered, 3))}).check()


def test_an_optimizer_may_be_given_in_a_wrapper():
    steered = optimizer()
    scheduler = lr_scheduler.StepLR(steered, 3)
    with pytest.raises(ConfigError, match="a StepLR steers"):
        UnsharedWatch([Handle(steered)], {}).check()
    UnsharedWatch([Handle(steered)], {"scheduler": scheduler}).check()


def test_schedulers_of_other_optimizers_and_deleted_ones_do_not_count():
    steered, other = optimizer(), optimizer()
    theirs = lr_scheduler.StepLR(other, 3)
    gone = lr_scheduler.StepLR(steered, 3)
    gone.itself = gone
    del gone
    UnsharedWatch([steered], {}).check()
    assert theirs.optimizer is other


def test_a_scaler_counts_from_its_first_loss_on():
    scaler = torch.amp.GradScaler("cpu")
    watch = UnsharedWatch([optimizer()], {})
    watch.check()
    scaler.scale(torch.ones(()))
    with pytest.raises(ConfigError, match=r'a GradScaler scales the loss .* state=\{"scaler": scaler\}'):
        watch.check()
    UnsharedWatch([optimizer()], {"scaler": scaler}).check()


def test_an_averaged_model_counts_unless_it_is_in_the_state_or_of_another_model():
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(3, 1)
    steered = torch.optim.SGD(model.parameters(), lr=0.1)
    elsewhere = AveragedModel(other)
    UnsharedWatch([steered], {"elsewhere": elsewhere}).check()
    UnsharedWatch([steered], {}).check()
    ema = AveragedModel(model)
    with pytest.raises(ConfigError, match=r'an AveragedModel averages .* state=\{"ema": ema_model\}'):
        UnsharedWatch([steered], {}).check()
    UnsharedWatch([steered], {"ema": ema}).check()
    UnsharedWatch([steered], {"teacher": torch.nn.ModuleDict({"ema": ema})}).check()
    UnsharedWatch([steered], {}, ignored=True).check()


def test_a_parameter_outside_the_model_is_refused_unless_the_state_has_it():
    model, temperature = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(1))
    steered = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    with pytest.raises(ConfigError, match=r"optimizer has a parameter of shape \[1\] .* not in the model"):
        accept_optimizers(model, {"optimizer": steered}, {})
    outside = accept_optimizers(model, {"optimizer": steered}, {"masters": {"temperature": [temperature]}})
    assert [x is temperature for x in outside] == [True]
    temperature.requires_grad = False
    assert accept_optimizers(model, {"optimizer": steered}, {}) == []


def test_a_parameter_outside_the_model_gets_no_gradient_from_backward():
    model, master = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(1))
    named = list(model.named_parameters())
    watch = ModelWatch(model, named, UnsharedWatch([], {}), [master])
    master.grad = torch.zeros(1)  # as zero_grad(set_to_none=False) leaves it
    watch.check(0)
    watch = ModelWatch(model, named, UnsharedWatch([], {}), [master])
    master.sum().backward()
    with pytest.raises(ConfigError, match=r"backward gave a gradient to a parameter of shape \[1\]"):
        watch.check(0)


class Counter:
    """An object of a script, with a state of its own."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_micro_batches_change_no_object_of_the_state_for_good():
    model, counter = torch.nn.Linear(2, 2), Counter()
    carry, noise = {"hidden": torch.zeros(2)}, torch.Generator()
    state = {"counter": counter, "carry": with_state(carry), "noise": with_state(noise)}
    changes = {
        "counter": lambda: setattr(counter, "count", counter.count + 1),
        "carry": lambda: carry.update(hidden=carry["hidden"] + 1),
        "noise": lambda: torch.rand(1, generator=noise),
    }
    named = list(model.named_parameters())
    for name, change in changes.items():
        watch = ModelWatch(model, named, UnsharedWatch([], {}), shared={"model": model, **state})
        change()
        watch.begin_step()
        counter.count += 1
        model.weight.data.add_(1)  # other watches look at the model
        counter.count -= 1
        watch.check(0)
        change()  # in an update
        watch.check(0)
        watch.begin_step()
        change()
        with pytest.raises(ConfigError, match=rf"the micro-batches of step 1 change state\['{name}'\]"):
            watch.check(1)


def test_a_dict_of_the_state_keeps_its_tensors_and_takes_new_values():
    centers, counts = torch.zeros(2), np.zeros(2)
    values = {"centers": centers, "counts": counts, "seen": 0, "nested": [{"queue": centers.clone()}]}
    queue = values["nested"][0]["queue"]
    wanted = {"centers": torch.ones(2), "counts": np.ones(2), "seen": 7, "nested": [{"queue": torch.ones(2)}]}
    SharedValue(values).load_state_dict(wanted)
    assert values["seen"] == 7
    assert values["centers"] is centers
    assert values["nested"][0]["queue"] is queue
    for held in (centers, counts, queue):
        assert held.sum() == 2, "the loop's own name for it sees the loaded value"


def test_objects_made_after_attach_are_noticed_before_the_first_contribution():
    model = torch.nn.Linear(2, 2)
    steered = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = ModelWatch(model, list(model.named_parameters()), UnsharedWatch([steered], {}))
    watch.begin()
    scheduler = lr_scheduler.StepLR(steered, 3)
    for look in (watch.begin, lambda: watch.check(1), lambda: watch.check(LOOK_EVERY)):
        with pytest.raises(ConfigError, match="a StepLR steers"):
            look()
        watch._unshared._wrapped = 0
    assert scheduler.optimizer is steered


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ({"unshared": "warn"}, 'it must be "refuse" or "ignore"'),
        ({"step": -1}, "step is -1: give the number"),
    ],
)
def test_impossible_values_of_attach_arguments_are_refused(choice, why):
    with pytest.raises(ConfigError, match=why):
        Choices(**choice)
