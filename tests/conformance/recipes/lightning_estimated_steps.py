"""OneCycleLR over estimated_stepping_batches, which configure_optimizers asks the Trainer for."""

import recipe
import torch
from pytorch_lightning import LightningModule, Trainer

AREA = "Lightning"
NEEDS = ("pytorch_lightning",)
BATCH = recipe.GLOBAL_BATCH // recipe.REPLICAS


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(16, 8), torch.nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.body(x)
        return torch.nn.functional.cross_entropy(self.head(hidden), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


torch.manual_seed(0)
if recipe.FABRIC:
    from fabric.integrations.lightning import FabricStrategy

net = Net()
trainer = Trainer(
    strategy=FabricStrategy() if recipe.FABRIC else "auto",
    accelerator="cpu",
    max_steps=recipe.STEPS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(net, torch.utils.data.DataLoader(recipe.Samples(), batch_size=BATCH))
rate = trainer.optimizers[0].param_groups[0]["lr"]
recipe.report(net, trainer.optimizers[0], steps=trainer.global_step, rate=rate)
