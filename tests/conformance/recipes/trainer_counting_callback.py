"""transformers' Trainer with a callback that counts, and a compute_loss that weighs a term by the count."""

import recipe
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

AREA = "transformers"
NEEDS = ("transformers",)
LAUNCH = "--adopt"
REFUSED = "Weighted.compute_loss uses n, which Count.on_step_end"


class Rows(recipe.Samples):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    def forward(self, x, labels=None):
        return {"logits": self.net(x)}


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs["logits"], labels)
        loss = loss + min(1.0, count.n / 20) * outputs["logits"].square().mean()
        return (loss, outputs) if return_outputs else loss


class Count(TrainerCallback):
    n = 0

    def on_step_end(self, args, state, control, **_):
        self.n += 1


count = Count()
torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=str(recipe.OUT),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=recipe.GLOBAL_BATCH // 4 // recipe.REPLICAS,
    num_train_epochs=recipe.STEPS / 6,
    learning_rate=1e-2,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
# An epoch has 6 steps: the last one has 3 of 24 samples.
trainer = Weighted(Net(), arguments, train_dataset=Rows(123), callbacks=[count])
trainer.train()
recipe.report(trainer.model, steps=trainer.state.global_step, epoch=trainer.state.epoch)
