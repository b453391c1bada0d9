"""transformers' Trainer with a callback that clips by the norms of earlier gradients (AutoClip)."""

import recipe
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

AREA = "transformers"
NEEDS = ("transformers",)
LAUNCH = "--adopt"
REFUSED = "AutoClip.on_pre_optimizer_step uses norms, which AutoClip.on_pre_optimizer_step"


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


class AutoClip(TrainerCallback):
    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        torch.nn.utils.clip_grad_norm_(model.parameters(), sorted(self.norms)[len(self.norms) // 10])


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
trainer = Trainer(Net(), arguments, train_dataset=Rows(123), callbacks=[AutoClip()])
trainer.train()
recipe.report(trainer.model, steps=trainer.state.global_step, epoch=trainer.state.epoch)
