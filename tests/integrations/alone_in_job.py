"""A FabricTrainer as the only process of a job, without services: one process computes the parts of all."""

import copy

import pytest
import torch
from transformers import Trainer, TrainingArguments

from fabric.client.loop.session import SoloSession
from fabric.integrations.transformers import FabricTrainer
from fabric.runtime.config import Settings


def attach_alone(monkeypatch, replicas):
    """Let ``attach`` make a session whose one member computes the whole step of a job of ``replicas``."""

    def attach(model, optimizer, *, state, step, **_):
        settings = Settings(disable=True, job="llama", replicas=str(replicas))
        session = SoloSession(list(model.parameters()), dict(state), settings, step=step)
        session.loads = 0
        return session

    monkeypatch.setattr("fabric.client.attach", attach)
    monkeypatch.setenv("FABRIC_LIGHTHOUSE", "http://127.0.0.1:9")
    monkeypatch.setenv("FABRIC_REPLICA", "r0")
    monkeypatch.setenv("FABRIC_REPLICAS", str(replicas))


class Net(torch.nn.Module):
    """Two layers and a mean loss; it takes no ``num_items_in_batch``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Tokens(torch.nn.Module):
    """Predicts tokens; its loss is divided by ``num_items_in_batch``, as that of a model of transformers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def forward(self, x, labels=None, **kwargs):
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        count = kwargs.get("num_items_in_batch")
        flat, reduction = logits.flatten(0, 1), "mean" if count is None else "sum"
        loss = torch.nn.functional.cross_entropy(flat, labels.flatten(), reduction=reduction)
        return {"loss": loss if count is None else loss / count, "logits": logits}


def samples(size):
    drawn = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=drawn), "labels": torch.tensor(i % 3)} for i in range(size)]


def sentences(size):
    """Sequences in which a part of the tokens, unequal between them, is to be predicted."""
    drawn = torch.Generator().manual_seed(1)
    rows = []
    for i in range(size):
        labels = torch.arange(6) % 3
        labels[i % 6 :] = -100
        labels[0] = i % 3
        rows.append({"x": torch.randn(6, 4, generator=drawn), "labels": labels})
    return rows


def train(kind, folder, model, data, *, replicas=1, accumulation=6, **arguments):
    """Train ``kind``; return the Trainer. ``accumulation``: micro-batches of a step, of all replicas."""
    defaults = {"per_device_train_batch_size": 2, "learning_rate": 0.1, "optim": "sgd", "logging_steps": 1}
    more = arguments.pop("more", {})
    chosen = TrainingArguments(
        str(folder),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
        gradient_accumulation_steps=accumulation // replicas,
        # Transformers writes into the dictionaries that it is given.
        **copy.deepcopy({"save_strategy": "no", **defaults, **arguments}),
    )
    trainer = kind(model, chosen, train_dataset=data, **more)
    trainer.train()
    return trainer


def adopted(kind):
    """Return ``kind``, a subclass of Trainer, as a subclass of FabricTrainer."""
    if kind is Trainer:
        return FabricTrainer
    return type(kind.__name__, (kind, FabricTrainer), {})


def assert_same(one, other):
    """Assert equal weights, and equal logs but for times; up to rounding."""
    coarse = 100.0 if one.args.bf16 else 1.0
    for left, right in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5 * coarse, atol=1e-6 * coarse)
    logs = [
        [
            {k: v for k, v in x.items() if "time" not in k and "per_second" not in k}
            for x in t.state.log_history
        ]
        for t in (one, other)
    ]
    assert len(logs[0]) == len(logs[1])
    for left, right in zip(*logs, strict=True):
        assert set(left) == set(right)
        for name in left:
            within = 1e-4 * coarse
            assert float(right[name]) == pytest.approx(float(left[name]), rel=within, abs=within / 10), name
