"""The Trainer with overfit_batches, clipping of values, EMAWeightAveraging and configure_sharded_model."""

import recipe
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import EMAWeightAveraging

AREA = "Lightning"
NEEDS = ("pytorch_lightning",)
BATCH = recipe.GLOBAL_BATCH // recipe.REPLICAS


class Net(LightningModule):
    def configure_sharded_model(self):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    def loss(self, batch):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Watch(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        recipe.note(trainer.global_step, loss=outputs["loss"], logged=trainer.callback_metrics["loss_step"])

    def on_train_epoch_end(self, trainer, module):
        recipe.note(trainer.global_step, epoch_loss=trainer.callback_metrics["loss_epoch"])


if recipe.FABRIC:
    from fabric.integrations.lightning import FabricStrategy

net = Net()
trainer = Trainer(
    strategy=FabricStrategy() if recipe.FABRIC else "auto",
    accelerator="cpu",
    max_epochs=8,
    overfit_batches=3,
    gradient_clip_val=0.02,
    gradient_clip_algorithm="value",
    callbacks=[Watch(), EMAWeightAveraging(decay=0.9)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(net, torch.utils.data.DataLoader(recipe.Samples(240), batch_size=BATCH, shuffle=True))
recipe.report(net, trainer.optimizers[0], steps=trainer.global_step, epochs=trainer.current_epoch)
