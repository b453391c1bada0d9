"""A training_step that draws the noise of its labels from a generator of its own."""

import recipe
import torch
from pytorch_lightning import LightningModule, Trainer

AREA = "Lightning"
NEEDS = ("pytorch_lightning",)
LAUNCH = "--adopt"
REFUSED = "Net.training_step uses noise, which Net.training_step"
BATCH = recipe.GLOBAL_BATCH // recipe.REPLICAS


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)
        self.noise = torch.Generator().manual_seed(7)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        target = x[:, :4] + 0.1 * torch.randn((len(x), 4), generator=self.noise)
        return torch.nn.functional.mse_loss(self.layer(x), target)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


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
trainer.fit(net, torch.utils.data.DataLoader(recipe.Samples(), batch_size=BATCH, shuffle=True))
recipe.report(net, trainer.optimizers[0], steps=trainer.global_step)
