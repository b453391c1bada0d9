"""A Trainer whose model has BatchNorm, under --adopt."""

import recipe
import torch
from pytorch_lightning import LightningModule, Trainer

AREA = "Lightning"
NEEDS = ("pytorch_lightning",)
LAUNCH = "--adopt"
# A replica normalises by the statistics of its own micro-batch, as DistributedDataParallel does.
UNLIKE = ("killed",)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32, bias=False), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
net = Net()
trainer = Trainer(
    accelerator="cpu",
    max_steps=recipe.STEPS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
data = torch.utils.data.DataLoader(recipe.Samples(120), batch_size=recipe.GLOBAL_BATCH // recipe.REPLICAS)
trainer.fit(net, data)
recipe.report(net, trainer.optimizers[0], steps=trainer.global_step)
