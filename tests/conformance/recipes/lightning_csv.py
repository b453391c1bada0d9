"""The CSVLogger: one file of the job, each step once, and the best checkpoint."""

from pathlib import Path

import recipe
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger

AREA = "Lightning"
NEEDS = ("pytorch_lightning",)
FILES = ("lightning_logs/*/metrics.csv",)
BATCH = recipe.GLOBAL_BATCH // recipe.REPLICAS


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    def loss(self, batch):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
if recipe.FABRIC:
    from fabric.integrations.lightning import FabricStrategy

net = Net()
trainer = Trainer(
    strategy=FabricStrategy() if recipe.FABRIC else "auto",
    accelerator="cpu",
    max_steps=recipe.STEPS,
    default_root_dir=recipe.OUT,
    logger=CSVLogger(recipe.OUT),
    log_every_n_steps=1,
    callbacks=[ModelCheckpoint(monitor="val_loss", filename="{epoch}", save_top_k=2)],
    enable_progress_bar=False,
    enable_model_summary=False,
)
data = torch.utils.data.DataLoader(recipe.Samples(96), batch_size=BATCH)
validation = torch.utils.data.DataLoader(recipe.Samples(50), batch_size=16)
trainer.fit(net, data, validation)
best = Path(trainer.checkpoint_callback.best_model_path)
recipe.report(
    net,
    trainer.optimizers[0],
    best=str(best.relative_to(recipe.OUT)),
    exists=best.is_file(),
    steps=trainer.global_step,
    epochs=trainer.current_epoch,
)
