"""transformers' Trainer whose compute_metrics sets the class weights of the loss."""

import recipe
import torch
from transformers import Trainer, TrainingArguments

AREA = "transformers"
NEEDS = ("transformers",)
LAUNCH = "--adopt"
REFUSED = "Weighted.compute_loss uses class_weights, which metrics"


class Rows(recipe.Samples):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(16, 4)

    def forward(self, x, labels=None):
        return {"logits": self.net(x)}


class_weights = torch.ones(4)


def metrics(prediction):
    guess = prediction.predictions.argmax(-1)
    for label in range(4):
        class_weights[label] = 2.0 - float((guess[prediction.label_ids == label] == label).mean())
    return {"accuracy": float((guess == prediction.label_ids).mean())}


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(inputs["x"])
        loss = torch.nn.functional.cross_entropy(outputs["logits"], inputs["labels"], weight=class_weights)
        return (loss, outputs) if return_outputs else loss


torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=str(recipe.OUT),
    per_device_train_batch_size=recipe.GLOBAL_BATCH // recipe.REPLICAS,
    max_steps=recipe.STEPS,
    eval_strategy="steps",
    eval_steps=6,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = Weighted(Net(), arguments, train_dataset=Rows(), eval_dataset=Rows(48), compute_metrics=metrics)
trainer.train()
recipe.report(trainer.model, steps=trainer.state.global_step)
