"""A DataLoader over an IterableDataset."""

import recipe
import torch
from pytorch_lightning import LightningModule, Trainer

AREA = "Lightning"
NEEDS = ("pytorch_lightning",)
REFUSED = "reads the IterableDataset Stream, whose epochs have no known length"
BATCH = recipe.GLOBAL_BATCH // recipe.REPLICAS


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        samples = recipe.Samples()
        yield from (samples[index] for index in range(240))


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
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(net, torch.utils.data.DataLoader(Stream(), batch_size=BATCH))
recipe.report(net, trainer.optimizers[0], steps=trainer.global_step, epochs=trainer.current_epoch)
