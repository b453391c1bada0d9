"""A LightningModule that clips its gradients in on_after_backward."""

import recipe
import torch
from pytorch_lightning import LightningModule, Trainer

AREA = "Lightning"
NEEDS = ("pytorch_lightning",)
LAUNCH = "--adopt"
REFUSED = "changes gradients after a backward pass"
BATCH = recipe.GLOBAL_BATCH // recipe.REPLICAS


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(16, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def on_after_backward(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
net = Net()
trainer = Trainer(accelerator="cpu", max_epochs=8, logger=False, enable_checkpointing=False)
trainer.fit(net, torch.utils.data.DataLoader(recipe.Samples(72), batch_size=BATCH))
recipe.report(net, trainer.optimizers[0], steps=trainer.global_step)
