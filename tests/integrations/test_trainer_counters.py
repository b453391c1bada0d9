"""The counters of a Trainer are equal on all replicas, though one of them writes the checkpoints."""

import torch
from transformers import EarlyStoppingCallback, TrainingArguments

from fabric.integrations.huggingface.job import TrainerCounters
from fabric.integrations.huggingface.trl import TrlFigures
from fabric.integrations.transformers import FabricTrainer


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x, labels):
        return {"loss": ((self.weight * x - labels) ** 2).mean()}


def trained(folder):
    """Return a Trainer that has trained for two steps, and logs and saves none of them."""
    chosen = TrainingArguments(
        str(folder),
        report_to="none",
        use_cpu=True,
        max_steps=2,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="loss",
    )
    data = [{"x": torch.ones(1), "labels": torch.zeros(1)} for _ in range(8)]
    stops = [EarlyStoppingCallback(3)]
    trainer = FabricTrainer(Line(), chosen, train_dataset=data, eval_dataset=data[:2], callbacks=stops)
    trainer.train()
    return trainer


def test_a_save_on_one_replica_changes_no_counter(monkeypatch, tmp_path, launched_rank):
    monkeypatch.setenv("FABRIC_DISABLE", "1")
    for name in launched_rank:  # with them and without fabric, accelerate would make a group of one rank
        monkeypatch.delenv(name)
    writer, other, joiner = (trained(tmp_path / name) for name in ("writer", "other", "joiner"))
    states = []
    for trainer, saves in ((writer, True), (other, False)):
        counters = TrainerCounters(trainer, 0, TrlFigures(trainer))
        states.append(counters.state_dict)
        for flos in (5.0, 0.7, 1e17, 3.3):
            trainer.current_flos += flos
            if saves:
                trainer._save_checkpoint(trainer.model, None)
            counters.collect()
    assert (tmp_path / "writer/checkpoint-2/trainer_state.json").is_file()
    assert states[0]() == states[1]()
    assert states[0]()["callbacks"] and states[0]()["best_metric"] is not None
    joined = TrainerCounters(joiner, 0, TrlFigures(joiner))
    joined.load_state_dict(states[0]())
    joined.collect()
    assert joined.state_dict() == states[0]()
    assert joiner.state.total_flos == writer.state.total_flos >= 1e17
