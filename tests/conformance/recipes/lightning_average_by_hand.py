"""A callback that averages the weights by hand after each batch."""

import recipe
import torch
from pytorch_lightning import Callback, LightningModule, Trainer

AREA = "Lightning"
NEEDS = ("pytorch_lightning",)
REFUSED = "the training keeps an average of the model in a dict of 4 values (lightning_average_by_hand.py:"
BATCH = recipe.GLOBAL_BATCH // recipe.REPLICAS // 2


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(16, 8), torch.nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.body(x)
        return torch.nn.functional.cross_entropy(self.head(hidden), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class Average(Callback):
    def on_fit_start(self, trainer, module):
        self.values = {name: x.detach().clone() for name, x in module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, *_):
        for name, x in module.named_parameters():
            self.values[name].mul_(0.9).add_(x, alpha=0.1)


torch.manual_seed(0)
if recipe.FABRIC:
    from fabric.integrations.lightning import FabricStrategy

net = Net()
trainer = Trainer(
    strategy=FabricStrategy() if recipe.FABRIC else "auto",
    accelerator="cpu",
    max_steps=recipe.STEPS,
    callbacks=[Average()],
    accumulate_grad_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(net, torch.utils.data.DataLoader(recipe.Samples(), batch_size=BATCH, shuffle=True))
recipe.report(net, trainer.optimizers[0], steps=trainer.global_step)
