"""transformers' Trainer with a training_step of its own, which perturbs the input against the loss."""

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


class Adversarial(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        x = inputs["x"].clone().requires_grad_()
        [slope] = torch.autograd.grad(model(x, inputs["labels"])["loss"], [x])
        loss = self.compute_loss(model, {**inputs, "x": inputs["x"] + 0.1 * slope.sign()})
        loss = loss / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


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
trainer = Adversarial(Net(), arguments, train_dataset=Rows(100))
output = trainer.train()
recipe.report(trainer.model, steps=trainer.state.global_step, loss=output.training_loss)
