"""A training_step that counts its own calls in an attribute, and warms a loss up by the count."""

import recipe
import torch
from pytorch_lightning import LightningModule, Trainer

AREA = "Lightning"
NEEDS = ("pytorch_lightning",)
REFUSED = "Net.training_step uses calls, which Net.training_step"
BATCH = recipe.GLOBAL_BATCH // recipe.REPLICAS // 2


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(16, 8), torch.nn.Linear(8, 4)
        self.calls = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.body(x)
        self.calls += 1
        warmth = min(1.0, self.calls / 100)
        return torch.nn.functional.cross_entropy(self.head(hidden), y) + warmth * hidden.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


torch.manual_seed(0)
if recipe.FABRIC:
    from fabric.integrations.lightning import FabricStrategy

net = Net()
trainer = Trainer(
    strategy=FabricStrategy() if recipe.FABRIC else "auto",
    accelerator="cpu",
    max_steps=recipe.STEPS,
    accumulate_grad_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(net, torch.utils.data.DataLoader(recipe.Samples(), batch_size=BATCH, shuffle=True))
recipe.report(net, trainer.optimizers[0], steps=trainer.global_step)
