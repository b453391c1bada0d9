"""A Lightning callback that halves the learning rate at the start of each epoch, and counts the epochs."""

import recipe
import torch
from pytorch_lightning import Callback, LightningModule, Trainer

AREA = "Lightning"
NEEDS = ("pytorch_lightning",)
LAUNCH = "--adopt"
BATCH = recipe.GLOBAL_BATCH // recipe.REPLICAS


class Halve(Callback):
    epochs = 0

    def on_train_epoch_start(self, trainer, module):
        self.epochs += 1
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 0.5

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


torch.manual_seed(0)
net, halve = Net(), Halve()
trainer = Trainer(
    accelerator="cpu",
    max_steps=recipe.STEPS,
    logger=False,
    callbacks=[halve],
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
data = recipe.Samples(recipe.GLOBAL_BATCH * 4)
trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=BATCH))
rate = trainer.optimizers[0].param_groups[0]["lr"]
recipe.report(net, trainer.optimizers[0], steps=trainer.global_step, epochs=halve.epochs, rate=rate)
