"""transformers' Trainer: short last steps, and a compute_loss that does not look at num_items_in_batch."""

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

    def forward(self, x, labels=None, **_):
        return {"logits": self.net(x)}


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs["logits"], labels)
        return (loss, outputs) if return_outputs else loss


class Notes(TrainerCallback):
    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            recipe.note(state.global_step - 1, loss=logs["loss"], rate=logs["learning_rate"])


torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=str(recipe.OUT),
    per_device_train_batch_size=recipe.GLOBAL_BATCH // recipe.REPLICAS,
    num_train_epochs=recipe.STEPS / 6,
    learning_rate=1e-2,
    logging_steps=2,
    logging_first_step=True,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
# An epoch has 6 steps: the last one has 3 of 24 samples.
trainer = Weighted(Net(), arguments, train_dataset=Rows(123), callbacks=[Notes()])
trainer.train()
recipe.report(trainer.model, steps=trainer.state.global_step, epoch=trainer.state.epoch)
