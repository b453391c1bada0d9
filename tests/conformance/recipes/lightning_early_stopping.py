"""EarlyStopping on the loss of the validation."""

import recipe
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping

AREA = "Lightning"
NEEDS = ("pytorch_lightning",)
STEPS = 24
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
        return torch.optim.SGD(self.parameters(), lr=0.5)


torch.manual_seed(0)
if recipe.FABRIC:
    from fabric.integrations.lightning import FabricStrategy

net = Net()
trainer = Trainer(
    strategy=FabricStrategy() if recipe.FABRIC else "auto",
    accelerator="cpu",
    max_epochs=50,
    min_epochs=6,
    min_steps=20,
    callbacks=[EarlyStopping("val_loss", patience=1, min_delta=0.05)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
data = torch.utils.data.DataLoader(recipe.Samples(72), batch_size=BATCH)
validation = torch.utils.data.DataLoader(recipe.Samples(50), batch_size=16)
trainer.fit(net, data, validation)
recipe.report(net, trainer.optimizers[0], steps=trainer.global_step, epochs=trainer.current_epoch)
