"""Manual optimization of a GAN, with two optimizers."""

import recipe
import torch
from pytorch_lightning import LightningModule, Trainer

AREA = "Lightning"
NEEDS = ("pytorch_lightning",)
REFUSED = "FabricStrategy takes one optimizer, and configure_optimizers gives 2"
BATCH = recipe.GLOBAL_BATCH // recipe.REPLICAS


class Gan(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = torch.nn.Linear(4, 16), torch.nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        made = self.generator(torch.randn(len(batch[0]), 4))
        for optimizer, loss in ((first, -self.critic(made).mean()), (second, self.critic(batch[0]).mean())):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=1e-2) for part in (self.generator, self.critic)]


torch.manual_seed(0)
if recipe.FABRIC:
    from fabric.integrations.lightning import FabricStrategy

net = Gan()
trainer = Trainer(
    strategy=FabricStrategy() if recipe.FABRIC else "auto",
    accelerator="cpu",
    max_steps=recipe.STEPS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(net, torch.utils.data.DataLoader(recipe.Samples(120), batch_size=BATCH))
recipe.report(net, trainer.optimizers[0], steps=trainer.global_step, epochs=trainer.current_epoch)
