"""A training_step that regularizes every second batch (batch_idx), in accumulated steps."""

import recipe
import torch
from pytorch_lightning import LightningModule, Trainer

AREA = "Lightning"
NEEDS = ("pytorch_lightning",)
LAUNCH = "--adopt"
BATCH = recipe.GLOBAL_BATCH // 2 // recipe.REPLICAS


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        if batch_idx % 2 == 0:
            loss = loss + 0.1 * self.net[0].weight.square().sum()
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
net = Net()
trainer = Trainer(
    accelerator="cpu",
    max_epochs=8,
    accumulate_grad_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(net, torch.utils.data.DataLoader(recipe.Samples(72), batch_size=BATCH))
recipe.report(net, trainer.optimizers[0], steps=trainer.global_step)
