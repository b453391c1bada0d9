"""transformers' Trainer with a _get_train_sampler of its own: a WeightedRandomSampler with a generator."""

import recipe
import torch
from transformers import Trainer, TrainingArguments

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
        return {"loss": torch.nn.functional.cross_entropy(self.net(x), labels)}


class Balanced(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        weights = torch.arange(1.0, 101.0)
        drawn = torch.Generator().manual_seed(5)
        return torch.utils.data.WeightedRandomSampler(weights, 100, generator=drawn)


torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=str(recipe.OUT),
    per_device_train_batch_size=8,
    gradient_accumulation_steps=recipe.GLOBAL_BATCH // 8 // recipe.REPLICAS,
    max_steps=recipe.STEPS,
    learning_rate=1e-2,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = Balanced(Net(), arguments, train_dataset=Rows(100))
output = trainer.train()
recipe.report(trainer.model, steps=trainer.state.global_step, loss=output.training_loss)
