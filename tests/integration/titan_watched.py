"""Runs ``examples/titan_llama.py`` by torchtitan's command line, at the pace of the tests, on the CPU."""

import json
import os
import sys
from pathlib import Path

import cpu_titan  # noqa: F401  (before torchtitan)
import torch
import torchtitan.train
from pace import leave_time
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

import fabric.integrations.torchtitan as adapter


class Watched(adapter.TitanTrainer):
    """Writes a line per update to ``TEST_NOTES``."""

    class Config(adapter.TitanTrainer.Config):
        __slots__ = ()

    def train_step(self, data_iterator):
        session = self._job.session if self._job is not None else None
        if session is not None:
            leave_time(session, self.config.training.steps - session.committed_step, 0.02)
        super().train_step(data_iterator)
        note(self)


class Alone(Trainer):
    class Config(Trainer.Config):
        __slots__ = ()

    def train_step(self, data_iterator):
        super().train_step(data_iterator)
        note(self)


def note(trainer):
    parameters = [p for part in trainer.model_parts for p in part.parameters()]
    line = {
        "step": trainer.step,
        "tokens": trainer.ntokens_seen,
        "lr": list(trainer.lr_schedulers.get_metrics().values()),
        "weights": sum(p.detach().double().sum().item() for p in parameters),
    }
    with Path(os.environ["TEST_NOTES"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def of(kind):
    """Return a manager whose configs build ``kind``, with an attention that has a backward on the CPU."""

    class Manager(adapter.ConfigManager):
        def parse_args(self, *arguments, **named):
            config = super().parse_args(*arguments, **named)
            for layer in config.model_spec.model.layers:
                layer.attention.inner_attention = ScaledDotProductAttention.Config()
            given = adapter.with_fabric(config)
            return kind.Config(**{name: getattr(given, name) for name in names(given)})

    return Manager


def names(config):
    return [x.name for x in adapter.fields(config) if x.init]


def main():
    torch.set_num_threads(1)
    os.environ["MASTER_PORT"] = "0"
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    sys.argv[1:] = ["--module", "titan_llama", "--config", "tiny"]
    torchtitan.train.ConfigManager = of(Alone if "TEST_WITHOUT_FABRIC" in os.environ else Watched)
    torchtitan.train.main()
