"""transformers' Trainer with EarlyStoppingCallback, checkpoints, and the best model at the end."""

import recipe
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

AREA = "transformers"
NEEDS = ("transformers",)
LAUNCH = "--adopt"
STEPS = 25  # it ends after 24 steps, and in the 25th the replicas agree


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
    def on_evaluate(self, args, state, control, metrics, **_):
        recipe.note(state.global_step - 1, loss=metrics["eval_loss"])


torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=str(recipe.OUT),
    per_device_train_batch_size=8,
    gradient_accumulation_steps=recipe.GLOBAL_BATCH // 8 // recipe.REPLICAS,
    max_steps=60,
    learning_rate=1e-2,
    eval_strategy="steps",
    eval_steps=4,
    save_strategy="steps",
    save_steps=4,
    save_total_limit=2,
    load_best_model_at_end=True,
    metric_for_best_model="loss",
    report_to="none",
    use_cpu=True,
)
stops = EarlyStoppingCallback(5, early_stopping_threshold=9.0)
trainer = Trainer(
    Net(), arguments, train_dataset=Rows(100), eval_dataset=Rows(20), callbacks=[stops, Notes()]
)
trainer.train()
state = trainer.state
recipe.report(trainer.model, steps=state.global_step, best=state.best_global_step)
