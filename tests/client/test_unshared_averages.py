"""An average of the model that a training keeps by hand is refused where no shared state has it."""

import copy
import itertools
import re
import textwrap
from collections import OrderedDict

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fabric.client.loop.unshared_objects import AverageWatch
from fabric.errors import ConfigError


class Shadow:
    """Keeps the average as diffusers' EMAModel does."""

    def __init__(self, tensors):
        self.shadow_params = [x.detach().clone() for x in tensors]
        self.steps = 0

    def state_dict(self):
        return {"shadow_params": [x.clone() for x in self.shadow_params]}


def in_list(model):
    shadow = Shadow(model.parameters())
    return shadow, shadow.shadow_params


def in_dict(model):
    average = {name: x.detach().clone() for name, x in model.named_parameters()}
    return average, list(average.values())


def in_state_dict(model):
    average = OrderedDict((k, v.clone()) for k, v in model.state_dict().items())
    return average, [average[name] for name, _ in model.named_parameters()]


def in_module(model):
    average = copy.deepcopy(model).requires_grad_(False)
    return average, list(average.parameters())


WAYS = [in_list, in_dict, in_state_dict, in_module]


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))


def move(old, new):
    """Average without a call that the search through the source knows."""
    torch.Tensor.lerp_(old, new, 0.1)


def train(model, watch, after_update, steps=5, rate=0.01):
    for step in range(steps):
        watch.look(step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += rate * (step + 1)
            after_update()


def test_fast_weights_that_each_step_makes_for_its_loss_are_no_average():
    model = network()
    held = []

    def update():
        with torch.enable_grad():
            held[:] = [{name: x - 0.01 * x.detach() for name, x in model.named_parameters()}]

    train(model, AverageWatch(list(model.parameters()), [model]), update)


def test_an_average_that_was_copied_with_its_graph_is_one():
    model = network()
    copies = {name: x.clone() for name, x in model.named_parameters()}

    def update():
        for old, new in zip(copies.values(), model.parameters(), strict=True):
            move(old, new)

    with pytest.raises(ConfigError, match="keeps an average of the model in a dict of"):
        train(model, AverageWatch(list(model.parameters()), [model]), update)


@pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)
def test_an_average_that_moves_is_refused_with_what_holds_it(make):
    model = network()
    holder, average = make(model)

    def update():
        for old, new in zip(average, model.parameters(), strict=True):
            move(old, new)

    watch = AverageWatch(list(model.parameters()), [model])
    kind = "a module Sequential" if make is in_module else "a (list|dict|OrderedDict) of"
    with pytest.raises(ConfigError, match=f"keeps an average of the model in {kind}.* pass it in state="):
        train(model, watch, update)
    assert holder is not None


def test_an_average_that_is_made_anew_at_each_step_is_refused():
    model, kept = network(), {}
    kept.update((name, x.detach().clone()) for name, x in model.named_parameters())

    def update():
        new = {name: 0.9 * kept[name] + 0.1 * x for name, x in model.named_parameters()}
        kept.clear()
        kept.update(new)

    with pytest.raises(ConfigError, match="an average of the model in a dict of 6 values"):
        train(model, AverageWatch(list(model.parameters()), [model]), update)


def test_an_average_that_begins_late_is_refused_at_a_later_look():
    model = network()
    shadow, average = in_list(model)
    seen = []

    def update():
        seen.append(None)
        for old, new in zip(average, model.parameters(), strict=True):
            old.copy_(new) if len(seen) < 10 else move(old, new)

    with pytest.raises(ConfigError, match="an average of the model"):
        train(model, AverageWatch(list(model.parameters()), [model]), update, steps=40)
    assert len(seen) == 30 and shadow


@pytest.mark.parametrize("phase", range(10))
def test_an_average_that_moves_at_every_tenth_step_is_refused(phase):
    model = network()
    shadow, average = in_list(model)
    seen = itertools.count()

    def update():
        if next(seen) % 10 == phase:
            for old, new in zip(average, model.parameters(), strict=True):
                move(old, new)

    with pytest.raises(ConfigError, match="an average of the model"):
        train(model, AverageWatch(list(model.parameters()), [model]), update, steps=50, rate=0.0001)
    assert shadow


def test_an_average_whose_state_is_shared_is_accepted():
    model = network()
    shadow, average = in_list(model)

    def update():
        for old, new in zip(average, model.parameters(), strict=True):
            old.lerp_(new, 0.1)

    train(model, AverageWatch(list(model.parameters()), [model, shadow]), update, steps=40)


def test_other_copies_of_the_model_are_accepted():
    """A frozen teacher, the weights before the update or five updates ago, the best weights, and moments."""
    model = network()
    frozen = copy.deepcopy(model)
    near = [x.detach() * 1.01 for x in model.parameters()]
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    best, far, older = {}, [torch.randn_like(x) for x in model.parameters()], {}
    seen = itertools.count()

    def update():
        best.update(copy.deepcopy(model.state_dict()))
        if next(seen) % 5 == 0:
            older.update(copy.deepcopy(dict(model.named_parameters())))
        for name, parameter in model.named_parameters():
            before[name].copy_(parameter - 0.0)
        for tensor in far:
            tensor.neg_()

    train(model, AverageWatch(list(model.parameters()), [model]), update, steps=50)
    assert frozen and near and best and older


def test_a_copy_of_the_shared_average_that_is_made_in_replayed_steps_is_accepted():
    model = network()
    average = Shadow(model.parameters())
    shown = in_module(model)[0]
    watch = AverageWatch(list(model.parameters()), [average])
    for step in range(12):
        if step not in (3, 4):  # this process replays two steps
            watch.look(step)
        with torch.no_grad():
            for parameter, mean in zip(model.parameters(), average.shadow_params, strict=True):
                parameter += 0.01 * (step + 1)
                mean.lerp_(parameter, 0.1)
            if step == 3:  # for an evaluation
                for parameter, mean in zip(shown.parameters(), average.shadow_params, strict=True):
                    parameter.copy_(mean)


def test_a_model_of_few_numbers_is_not_searched():
    model = torch.nn.Linear(1, 1)
    average = {name: x.detach().clone() for name, x in model.named_parameters()}

    def update():
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter, 0.1)

    train(model, AverageWatch(list(model.parameters()), [model]), update, steps=40)


def fake(model):
    with FakeTensorMode() as mode:
        return [mode.from_tensor(x) for x in model.parameters()]


def freed(model):
    copies = [x.detach().clone() for x in model.parameters()]
    for tensor in copies:
        tensor.untyped_storage().resize_(0)
    return copies


UNREADABLE = {
    "fake tensors of a compiler": fake,
    "tensors without memory": lambda model: [x.to("meta") for x in model.parameters()],
    "tensors whose memory is freed": freed,
    "a module that has no shapes yet": lambda _: torch.nn.LazyLinear(3),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_tensors_that_cannot_be_read_end_no_training(name):
    model = network()
    held = UNREADABLE[name](model)
    train(model, AverageWatch(list(model.parameters()), [model]), lambda: None)
    assert held is not None


def test_a_second_model_that_an_optimizer_moves_is_no_average():
    model = network()
    other = copy.deepcopy(model)
    moving = torch.optim.SGD(other.parameters(), lr=0.01)

    def after_update():
        for parameter in other.parameters():
            parameter.grad = torch.ones_like(parameter)
        moving.step()

    train(model, AverageWatch(list(model.parameters()), [model]), after_update)


# --- before the first step, by the source -------------------------------------------------------------------

BASE = """
import copy
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = []
def compute():
    optimizer.zero_grad()
    model(torch.randn(4, 4)).sum().backward()
"""
SHOWN = {
    "a copy of the module": """
        ema = copy.deepcopy(model)
        def loop(look):
            for step in range(2):
                compute()
                look(step)
                optimizer.step()
                with torch.no_grad():
                    for e, p in zip(ema.parameters(), model.parameters()):
                        e.mul_(0.99).add_(p, alpha=0.01)
        # a module Sequential (script.py:19)
    """,
    "a dict, by two statements and the data": """
        ema = {k: v.clone() for k, v in model.named_parameters()}
        def loop(look):
            for step in range(2):
                look(step)
                for name, p in model.named_parameters():
                    ema[name].data.mul_(0.99)
                    ema[name].data.add_(p.data, alpha=0.01)
        # a dict of 6 values (script.py:17)
    """,
    "entries of a dict that are set again": """
        ema = {k: v.clone() for k, v in model.state_dict().items()}
        def loop(look):
            for step in range(2):
                look(step)
                for k, v in model.state_dict().items():
                    ema[k] = 0.9 * ema[k] + 0.1 * v
        # a dict of 9 values (script.py:16)
    """,
    "a dict that is made again": """
        def loop(look):
            ema = {k: v.clone() for k, v in model.named_parameters()}
            for step in range(2):
                look(step)
                ema = {k: 0.9 * ema[k] + 0.1 * v.detach() for k, v in model.named_parameters()}
        # a dict of 6 values (script.py:15)
    """,
    "the data of each tensor": """
        ema = [p.detach().clone() for p in model.parameters()]
        def loop(look):
            for step in range(2):
                look(step)
                for e, p in zip(ema, model.parameters()): e.data = 0.9 * e.data + 0.1 * p.data
        # a list of 6 values (script.py:15)
    """,
    "a function of the script, with the foreach calls": """
        ema = [p.detach().clone() for p in model.parameters()]
        def update(average, source, decay=0.9):
            values = list(source)
            torch._foreach_mul_(average, decay)
            torch._foreach_add_(average, values, alpha=1 - decay)
        def loop(look):
            for step in range(2):
                look(step)
                update(ema, model.parameters())
        # a list of 6 values (script.py:15)
    """,
    "an object of the script's, by a difference": """
        class Average:
            def __init__(self, parameters): self.shadow = [p.detach().clone() for p in parameters]
            def step(self, parameters):
                for s, p in zip(self.shadow, parameters, strict=True):
                    apart = s - p
                    s.sub_(0.1 * apart)
        ema = Average(model.parameters())
        def loop(look):
            for step in range(2):
                look(step)
                if step > 9: ema.step(model.parameters())
        # a list of 6 values (script.py:16)
    """,
    "an object that has the model itself": """
        class Average:
            def __init__(self, model):
                self.model, self.module = model, copy.deepcopy(model).requires_grad_(False)
            def update(self): self._move()
            def _move(self):
                for i, (e, p) in enumerate(zip(self.module.parameters(), self.model.parameters())):
                    e += (p - e) / (i + 2)
        ema = Average(model)
        def loop(look):
            for step in range(2):
                look(step)
                ema.update()
        # a module Sequential (script.py:17)
    """,
    "a hook of a callback": """
        class Average:
            def on_fit_start(self, model): self.values = {k: v.clone() for k, v in model.named_parameters()}
            def on_train_batch_end(self, trainer, module, *_):
                for name, x in module.named_parameters(): self.values[name].lerp_(x, 0.1)
        callback = Average()
        callback.on_fit_start(model)
        def loop(look): look(0)
        # a dict of 6 values (script.py:14)
    """,
}
NOT_SHOWN = {
    "a copy of the newest weights": """
        before = [p.detach().clone() for p in model.parameters()]
        def loop(look):
            for step in range(2):
                look(step)
                for b, p in zip(before, model.parameters()): b.copy_(p)
    """,
    "a frozen teacher and distances from it": """
        teacher = copy.deepcopy(model)
        drift = []
        def loop(look):
            for step in range(2):
                look(step)
                for t, p in zip(teacher.parameters(), model.parameters()):
                    apart = t - p
                    apart.mul_(2).add_(p)
                    far = t.clone().mul_(0.5).add_(p)
                    drift.append(apart.norm() + far.norm())
    """,
    "an average that state= has": """
        class Average:
            def __init__(self): self.shadow = [p.detach().clone() for p in model.parameters()]
            def update(self):
                for s, p in zip(self.shadow, model.parameters()): s.lerp_(p, 0.1)
            def state_dict(self): return {"shadow": [x.clone() for x in self.shadow]}
        ema = Average()
        state.append(ema)
        def loop(look):
            for step in range(2):
                look(step)
                ema.update()
    """,
    "gradients and moments": """
        moments = {k: torch.zeros_like(v) for k, v in model.named_parameters()}
        held = {k: v.clone() for k, v in model.named_parameters()}
        def loop(look):
            for step in range(2):
                compute()
                look(step)
                for name, p in model.named_parameters():
                    moments[name].mul_(0.9).add_(p.grad)
                    held[name].mul_(0.9).add_(p.grad)
                    p.grad.mul_(0.9).add_(p)
                    p.data.mul_(0.9).add_(held[name])
    """,
    "copies within a step": """
        def loop(look):
            for step in range(2):
                ahead = [p.detach().clone() for p in model.parameters()]
                look(step)
                for a, p in zip(ahead, model.parameters()): a.mul_(0.5).add_(p)
    """,
    "a method that the loop does not call": """
        class Average:
            def __init__(self): self.shadow = [p.detach().clone() for p in model.parameters()]
            def update(self):
                for s, p in zip(self.shadow, model.parameters()): s.lerp_(p, 0.1)
        teacher = Average()
        def loop(look):
            for step in range(2): look(step)
    """,
    "names that a loop gives again": """
        held = [p.detach().clone() for p in model.parameters()]
        def loop(look):
            for step in range(2):
                look(step)
                for h, p in zip(held, model.parameters()):
                    h = 0.5 * h + 0.5 * p
                    h.distance = h - p
    """,
    "averages of figures of the weights": """
        norms = {k: v.detach().norm() for k, v in model.named_parameters()}
        def loop(look):
            for step in range(2):
                look(step)
                for k, v in model.named_parameters(): norms[k] = 0.9 * norms[k] + 0.1 * v.norm()
    """,
}


def run(text, tmp_path):
    """Run a script, and its loop with a watch. Return the names of the script."""
    path, names = tmp_path / "script.py", {"__name__": "script"}
    path.write_text(BASE + textwrap.dedent(text))
    exec(compile(path.read_text(), str(path), "exec"), names)
    model = names["model"]
    names["loop"](AverageWatch(list(model.parameters()), [model, *names["state"]]).look)
    return names


@pytest.mark.parametrize("text", SHOWN.values(), ids=SHOWN)
def test_an_average_that_the_source_shows_is_refused_before_the_first_step(text, tmp_path):
    expected = text.rpartition("# ")[2].strip()
    with pytest.raises(ConfigError, match=re.escape(f"keeps an average of the model in {expected}, and a")):
        run(text, tmp_path)


@pytest.mark.parametrize("text", NOT_SHOWN.values(), ids=NOT_SHOWN)
def test_other_uses_of_the_weights_are_not_refused_by_their_source(text, tmp_path):
    assert run(text, tmp_path)
