"""Manual optimization with one optimizer."""

import recipe
import torch
from pytorch_lightning import Callback, LightningModule, Trainer

AREA = "Lightning"
NEEDS = ("pytorch_lightning",)
BATCH = recipe.GLOBAL_BATCH // recipe.REPLICAS


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    def loss(self, batch):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Watch(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        recipe.note(trainer.global_step, logged=trainer.callback_metrics["loss_step"])

    def on_train_epoch_end(self, trainer, module):
        recipe.note(trainer.global_step, epoch_loss=trainer.callback_metrics["loss_epoch"])


torch.manual_seed(0)
if recipe.FABRIC:
    from fabric.integrations.lightning import FabricStrategy

net = Net()
trainer = Trainer(
    strategy=FabricStrategy() if recipe.FABRIC else "auto",
    accelerator="cpu",
    max_steps=recipe.STEPS,
    callbacks=[Watch()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(net, torch.utils.data.DataLoader(recipe.Samples(120), batch_size=BATCH))
recipe.report(net, trainer.optimizers[0], steps=trainer.global_step, epochs=trainer.current_epoch)
