"""transformers' Trainer with a callback that halves the learning rate at the begin of each epoch."""

import recipe
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

AREA = "transformers"
NEEDS = ("transformers",)
LAUNCH = "--adopt"


class Rows(recipe.Samples):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(16, 4)

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Halve(TrainerCallback):
    def on_epoch_begin(self, args, state, control, lr_scheduler=None, **_):
        lr_scheduler.base_lrs = [rate / 2 for rate in lr_scheduler.base_lrs]


torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=str(recipe.OUT),
    per_device_train_batch_size=recipe.GLOBAL_BATCH // recipe.REPLICAS,
    max_steps=recipe.STEPS,
    learning_rate=0.1,
    lr_scheduler_type="constant",
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = Trainer(Net(), arguments, train_dataset=Rows(recipe.GLOBAL_BATCH * 4), callbacks=[Halve()])
trainer.train()
rate = trainer.lr_scheduler.base_lrs[0]
recipe.report(trainer.model, steps=trainer.state.global_step, rate=rate)
