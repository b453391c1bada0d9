"""transformers' Trainer with report_to="tensorboard": one curve in one folder, also after a kill."""

import os

import recipe
import torch
from transformers import Trainer, TrainingArguments

AREA = "transformers"
NEEDS = ("transformers", "tensorboard")
LAUNCH = "--adopt"
FILES = ("runs/*/*tfevents*",)


class Rows(recipe.Samples):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


if not recipe.FABRIC or "FABRIC_DISABLE" in os.environ:
    # The Trainer names the folder by host and time, and fabric names it by the job.
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(recipe.OUT / "runs" / "test")
torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=str(recipe.OUT),
    per_device_train_batch_size=8,
    gradient_accumulation_steps=recipe.GLOBAL_BATCH // 8 // recipe.REPLICAS,
    max_steps=recipe.STEPS,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    report_to="tensorboard",
    use_cpu=True,
)
trainer = Trainer(Net(), arguments, train_dataset=Rows(100))
trainer.train()
recipe.report(trainer.model, steps=trainer.state.global_step)
