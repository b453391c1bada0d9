"""A value that hooks keep by hand and of which the loss is made is named; other values are left alone."""

import sys
import textwrap
from types import ModuleType

import pytest
import torch

from fabric.integrations.user_source import Hooks, collective, kept_value, skips

RUNNING = ("on_step_end", "on_epoch_begin", "compute_loss", "forward")
BASE = """
class Exported: pass
class Thing: pass
import torch.distributed as dist
class Out: loss = 1.0
out = Out()
"""
REFUSED = {
    "a count of a callback": (
        """
        class Count(Thing):
            n = 0
            def on_step_end(self): self.n += 1
        class Trainer(Thing):
            def compute_loss(self): return out.loss * count.n
        """,
        "Trainer.compute_loss uses n, which Count.on_step_end (script.py:10) makes from its own old value",
    ),
    "a weight that is made from a count": (
        """
        class Count(Thing):
            n, beta = 0, 0.0
            def on_step_end(self):
                self.n += 1
                self.beta = min(1.0, self.n / 20)
        class Trainer(Thing):
            def compute_loss(self):
                loss = out.loss + count.beta
                return (loss, out)
        """,
        "Trainer.compute_loss uses n",
    ),
    "a moving average of the loss": (
        """
        class Count(Thing): pass
        class Trainer(Thing):
            average = 0.0
            def compute_loss(self):
                self.average = 0.9 * self.average + 0.1 * out.loss
                if self.average > 1: loss = out.loss * 2
                else: loss = out.loss
                return {"loss": loss, "out": out}
        """,
        "Trainer.compute_loss uses average",
    ),
    "a method that the loss calls": (
        """
        class Count(Thing):
            n = 0
            def on_step_end(self): self.count()
            def count(self): self.n = self.n + 1
        class Trainer(Thing):
            def weight(self): return count.n / 2
            def compute_loss(self):
                loss = out.loss
                self.backward(loss * self.weight())
                return loss
        """,
        "Trainer.compute_loss uses n, which Count.count",
    ),
    "a hook that sets an attribute of another object": (
        """
        class Count(Thing):
            n = 0
            def on_step_end(self, trainer=None):
                self.n += 1
                trainer.beta = self.n
        class Trainer(Thing):
            beta = 0
            def compute_loss(self): return out.loss * self.beta
        """,
        "Trainer.compute_loss uses n",
    ),
    "a weight that an evaluation sets": (
        """
        class Count(Thing):
            weight = 1.0
            def on_evaluate(self, measured=0.5): self.weight = 1 - measured
        class Trainer(Thing):
            def compute_loss(self): return out.loss * count.weight
        """,
        "Trainer.compute_loss uses weight, which Count.on_evaluate (script.py:10) sets in an evaluation",
    ),
    "a count that begins anew in each epoch": (
        """
        class Count(Thing):
            n = 0
            def on_epoch_begin(self): self.n = 0
            def on_step_end(self): self.n += 1
        class Trainer(Thing):
            def compute_loss(self): return out.loss * count.n
        """,
        "Trainer.compute_loss uses n",
    ),
    "an array that a function for figures fills": (
        """
        import torch
        weights = torch.ones(3)
        class Count(Thing):
            def on_evaluate(self, rows=()):
                for c in rows: weights[c] = 2 - rows[c]
        class Trainer(Thing):
            def compute_loss(self): return out.loss * weights.mean()
        """,
        "Trainer.compute_loss uses weights, which Count.on_evaluate (script.py:12) sets in an evaluation",
    ),
    "a count in a global name": (
        """
        n = 0
        class Count(Thing):
            def on_step_end(self):
                global n
                n += 1
        class Trainer(Thing):
            def compute_loss(self): return out.loss * n
        """,
        "Trainer.compute_loss uses n, which Count.on_step_end (script.py:12) makes from its own old value",
    ),
    "a table of losses by sample": (
        """
        import torch
        class Count(Thing): pass
        class Trainer(Thing):
            def __init__(self): self.hard = torch.zeros(9)
            def compute_loss(self, inputs=None):
                self.hard[inputs] = out.loss
                return out.loss * self.hard.mean()
        """,
        "Trainer.compute_loss uses hard",
    ),
    "a generator of random numbers": (
        """
        import torch
        class Count(Thing): pass
        class Trainer(Thing):
            def __init__(self): self.noise = torch.Generator()
            def compute_loss(self):
                x = torch.randn(3, generator=self.noise)
                return out.loss + x
        """,
        "Trainer.compute_loss uses noise",
    ),
    "a limit for the gradient by a list of norms": (
        """
        import torch
        class Count(Thing):
            def __init__(self): self.norms = []
            def on_step_end(self, model=None):
                self.norms.append(1.0)
                torch.nn.utils.clip_grad_norm_(model.parameters(), sum(self.norms))
        class Trainer(Thing): pass
        """,
        "Count.on_step_end uses norms, which Count.on_step_end (script.py:12) makes from its own old value",
    ),
    "noise on the gradient by a generator of its own": (
        """
        import torch
        class Count(Thing):
            def __init__(self): self.noise = torch.Generator()
            def on_step_end(self, model=None):
                for p in model: p.grad.add_(torch.randn(3, generator=self.noise))
        class Trainer(Thing): pass
        """,
        "Count.on_step_end uses noise",
    ),
    "a slow average of the gradient": (
        """
        class Count(Thing):
            slow = 0.0
            def on_step_end(self, model=None):
                self.slow = 0.9 * self.slow + model.grad
                model.grad = self.slow * 1
        class Trainer(Thing): pass
        """,
        "Count.on_step_end uses slow",
    ),
    "a list of losses": (
        """
        class Count(Thing): pass
        class Trainer(Thing):
            def __init__(self): self.losses = []
            def compute_loss(self):
                self.losses.append(out.loss)
                return out.loss / sum(self.losses)
        """,
        "Trainer.compute_loss uses losses",
    ),
    "a rate of dropout": (
        """
        import torch
        drop = torch.nn.Dropout(0.1)
        class Count(Thing):
            def on_step_end(self, model=None): drop.p = drop.p * 0.9
        class Trainer(Thing): pass
        """,
        "Count.on_step_end uses p",
    ),
    "a learning rate that a callback halves": (
        """
        class Count(Thing):
            best = None
            def on_evaluate(self, value=1.0, scheduler=None):
                if self.best is None or value < self.best: self.best = value
                else: scheduler.base_lrs = [x / 2 for x in scheduler.base_lrs]
        class Trainer(Thing): pass
        """,
        "Count.on_evaluate uses best, which Count.on_evaluate (script.py:11) sets in an evaluation",
    ),
    "weights that a callback keeps": (
        """
        class Count(Thing):
            best, keep = 9.0, None
            def on_evaluate(self, value=1.0, model=None):
                if value < self.best: self.best, self.keep = value, model.state_dict()
            def on_train_end(self, model=None): model.load_state_dict(self.keep)
        class Trainer(Thing): pass
        """,
        "Count.on_train_end uses best",
    ),
}
ACCEPTED = {
    "a callback that stops by what it measures": """
        class Count(Thing):
            best, bad = 9.0, 0
            def on_evaluate(self, value=1.0, control=None):
                if value < self.best: self.best, self.bad = value, 0
                else: self.bad += 1
                if self.bad > 3: control.should_training_stop = True
        class Trainer(Thing):
            def compute_loss(self): return out.loss
        """,
    "a dict of what each layer gave": """
        import torch
        class Count(Thing): pass
        class Trainer(Thing):
            def __init__(self): self.seen, self.rows = {}, torch.ones(3)
            def compute_loss(self):
                for name in "ab": self.seen[name] = out.loss
                self.rows[:] = 1.0
                return sum(self.seen.values()) + self.rows.sum()
        """,
    "a count that the class of a framework saves": """
        from fabric_test_framework import Stopping
        class Count(Stopping):
            def on_step_end(self): self.waits += 1
        class Trainer(Thing):
            def compute_loss(self): return out.loss * count.waits
        """,
    "an object that has parts of its own by a framework's name": """
        class Count(Thing):
            def __init__(self): self._modules = {"one"}
            def on_step_end(self): print(self.one)
        class Trainer(Thing):
            def compute_loss(self): return out.loss + count.one.size
        """,
    "torch's own generator": """
        import torch
        class Count(Thing): pass
        class Trainer(Thing):
            def compute_loss(self): return out.loss + torch.randn(3, generator=torch.default_generator)
        """,
    "a count for prints": """
        class Count(Thing):
            n, total = 0, 0.0
            def on_step_end(self): self.n += 1
        class Trainer(Thing):
            def compute_loss(self):
                count.total += out.loss
                if count.n % 100 == 0: print(count.total / count.n)
                return out.loss
        """,
    "a sum that every call begins": """
        class Count(Thing): pass
        class Trainer(Thing):
            def compute_loss(self):
                self.auxiliary = 0
                for x in (1, 2): self.auxiliary += x
                return out.loss + self.auxiliary
        """,
    "an attribute of that name of another object": """
        class Count(Thing):
            loss = 0.0
            def on_step_end(self): self.loss += 1
        class Trainer(Thing):
            def compute_loss(self): return out.loss
        """,
    "a count that its object saves": """
        class Count(Thing):
            n = 0
            def on_step_end(self): self.n += 1
            def state(self): return {"n": self.n}
        class Trainer(Thing):
            def compute_loss(self): return out.loss * count.n
        """,
    "a count that another object saves": """
        class Count(Thing):
            n = 0
            def on_step_end(self): self.n += 1
        class Trainer(Thing):
            def state(self): return {"count": {"n": count.n}}
            def compute_loss(self): return out.loss * count.n
        """,
    "a method that runs before the training": """
        class Count(Thing):
            n = 0
            def add_layer(self): self.n += 1
        class Trainer(Thing):
            def compute_loss(self): return out.loss * count.n
        """,
    "a value made from what is shared": """
        class Count(Thing):
            beta = 0.0
            def on_step_end(self): self.beta = shared.step / 20
        class Trainer(Thing):
            def compute_loss(self): return out.loss * count.beta
        """,
    "an attribute that training and evaluation set alike": """
        class Count(Thing): pass
        class Trainer(Thing):
            def on_evaluate(self): self.encode()
            def encode(self): self.hidden = out.loss * 2
            def compute_loss(self):
                self.encode()
                return self.hidden
        """,
    "a list that is printed, and noise of torch's own generator": """
        import torch
        class Count(Thing):
            def __init__(self): self.losses = []
            def on_step_end(self, model=None):
                self.losses.append(out.loss)
                print(sum(self.losses))
                for p in model: p.grad.add_(torch.randn_like(p.grad))
                model.clip_gradients(p, gradient_clip_val=1.0)
        class Trainer(Thing):
            def compute_loss(self): return out.loss
        """,
    "a value beside the loss": """
        class Count(Thing): pass
        class Trainer(Thing):
            n = 0
            def compute_loss(self):
                self.n += 1
                return {"loss": out.loss, "calls": self.n}
        """,
}


@pytest.fixture
def found(tmp_path, monkeypatch):
    framework = ModuleType("fabric_test_framework")
    exec("class Stopping:\n waits = 0\n def state(self): return {'waits': self.waits}", vars(framework))
    monkeypatch.setitem(sys.modules, framework.__name__, framework)

    def search(text, find=kept_value):
        path = tmp_path / "script.py"
        path.write_text(BASE + textwrap.dedent(text) + "\ncount, trainer = Count(), Trainer()\n")
        names = {"__name__": "script"}
        exec(compile(path.read_text(), str(path), "exec"), names)
        hooks = Hooks(RUNNING, ("on_evaluate",), ("compute_loss",), ("state",), {"trainer": names["trainer"]})
        things = [x for x in names.values() if isinstance(x, torch.nn.Module)]
        return find([names["count"], names["trainer"], *things], hooks)

    return search


@pytest.mark.parametrize("name", REFUSED)
def test_a_kept_value_of_which_a_loss_is_made_is_named(found, name):
    text, expected = REFUSED[name]
    assert expected in found(text)


@pytest.mark.parametrize("name", ACCEPTED)
def test_other_values_are_accepted(found, name):
    assert found(ACCEPTED[name]) == ""
    assert "script" not in sys.modules


COLLECTIVES = {
    "of the framework": """
        class Count(Thing): pass
        class Trainer(Thing):
            def compute_loss(self):
                print(self.accelerator.gather(out.loss))
                return out.loss
        """,
    "of torch, whose result is in the loss": """
        class Count(Thing): pass
        class Trainer(Thing):
            def compute_loss(self):
                parts = [out.loss]
                dist.all_gather(parts, out.loss)
                return sum(parts)
        """,
    "of torch, by its value": """
        class Count(Thing): pass
        class Trainer(Thing):
            def gathered(self, x):
                return dist.nn.all_gather(x)
            def compute_loss(self):
                every = dist.nn.all_gather(out.loss)
                return every[0]
        """,
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_in_a_loss_is_named(found, name):
    assert "Trainer.compute_loss calls" in found(COLLECTIVES[name], collective)
    assert "(script.py:" in found(COLLECTIVES[name], collective)


def test_a_collective_for_a_print_and_one_of_an_evaluation_are_left_alone(found):
    text = """
        class Count(Thing): pass
        class Trainer(Thing):
            def evaluate(self): return self.accelerator.gather(out.loss)
            def compute_loss(self):
                shown = out.loss * 1
                dist.all_reduce(shown)
                print(shown)
                return out.loss
        """
    assert found(text, collective) == ""


def test_a_tensor_that_gathers_its_own_elements_is_no_collective(found):
    text = """
        import torch
        class Count(Thing):
            def forward(self, x, y): return x.gather(1, y).reduce(x).scatter(x)
        class Trainer(Thing):
            def compute_loss(self, logits, labels):
                logits = logits.gather(1, labels)
                return torch.gather(logits, 1, labels).broadcast(x)
        """
    assert found(text, collective) == ""


def test_a_gather_of_torch_distributed_in_a_loss_is_named(found):
    text = """
        import torch.distributed as dist
        class Count(Thing): pass
        class Trainer(Thing):
            def compute_loss(self):
                loss = out.loss
                dist.broadcast(loss, 0)
                return loss
        """
    assert "Trainer.compute_loss calls dist.broadcast" in found(text, collective)


def test_a_hook_that_returns_minus_one_is_named(found):
    text = """
        class Count(Thing):
            def on_step_end(self, i):
                if i > 4: return -1
        class Trainer(Thing): pass
        """
    assert (
        found(text, lambda things, _: skips(things[0], "on_step_end")) == "Count.on_step_end (script.py:10)"
    )
    assert found(text, lambda things, _: skips(things[0], "on_evaluate")) == ""


def test_a_function_for_figures_is_read_like_a_method(tmp_path):
    path, names = tmp_path / "script.py", {"__name__": "script"}
    path.write_text(
        "weights = [1.0]\n"
        "def metrics(p):\n    weights[0] = p\n"
        "class Trainer:\n    def compute_loss(self): return 1.0 * weights[0]\n"
    )
    exec(compile(path.read_text(), str(path), "exec"), names)
    hooks = Hooks(RUNNING, ("__call__",), ("compute_loss",), (), {})
    assert "Trainer.compute_loss uses weights, which metrics" in kept_value(
        [names["Trainer"](), names["metrics"]], hooks
    )
