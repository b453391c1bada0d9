"""transformers' Trainer with the GradScaler of fp16: a loss that overflows skips the update everywhere."""

import recipe
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

AREA = "transformers"
NEEDS = ("transformers",)
LAUNCH = "--adopt"
TOLERANCE = 2e-2  # half precision rounds a batch otherwise than its micro-batches


class Outlier(recipe.Samples):
    """One sample is too large for half precision."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x * 1e6 if index == 77 else x, "labels": y}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    def forward(self, x, labels=None):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Scaled(Trainer):
    """With the scaler that fp16=True makes on a GPU."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=5)


class Notes(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        recipe.note(state.global_step - 1, scale=trainer.accelerator.scaler.get_scale())


torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=str(recipe.OUT),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=recipe.GLOBAL_BATCH // 4 // recipe.REPLICAS,
    max_steps=recipe.STEPS,
    learning_rate=1e-2,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = Scaled(Net(), arguments, train_dataset=Outlier(), callbacks=[Notes()])
trainer.train()
recipe.report(trainer.model, steps=trainer.state.global_step, scale=trainer.accelerator.scaler.get_scale())
