"""transformers' Trainer whose learning rate falls with the loss of its evaluations (ReduceLROnPlateau)."""

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
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Notes(TrainerCallback):
    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            recipe.note(state.global_step - 1, loss=logs["loss"], rate=logs["learning_rate"])


torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=str(recipe.OUT),
    per_device_train_batch_size=8,
    gradient_accumulation_steps=recipe.GLOBAL_BATCH // 8 // recipe.REPLICAS,
    max_steps=recipe.STEPS,
    learning_rate=0.3,
    lr_scheduler_type="reduce_lr_on_plateau",
    lr_scheduler_kwargs={"patience": 1, "factor": 0.5},
    metric_for_best_model="loss",
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = Trainer(Net(), arguments, train_dataset=Rows(100), eval_dataset=Rows(20), callbacks=[Notes()])
trainer.train()
recipe.report(trainer.model, rate=trainer.lr_scheduler.get_last_lr()[0])
