"""The Trainer: accumulation, clipping, a scheduler per step, a shorter last step in each epoch."""

import recipe
import torch
from pytorch_lightning import Callback, LightningModule, Trainer

AREA = "Lightning"
NEEDS = ("pytorch_lightning",)
QUICK = True
BATCH = recipe.GLOBAL_BATCH // recipe.REPLICAS // 2


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
        often = {"interval": "step", "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **often}}


class Watch(Callback):
    def on_train_epoch_end(self, trainer, module):
        recipe.note(trainer.global_step, loss=trainer.callback_metrics["loss"], epoch=trainer.current_epoch)


torch.manual_seed(0)
if recipe.FABRIC:
    from fabric.integrations.lightning import FabricStrategy
net = Net()
trainer = Trainer(
    strategy=FabricStrategy() if recipe.FABRIC else "auto",
    accelerator="cpu",
    max_steps=recipe.STEPS,
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    callbacks=[Watch()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
# An epoch has 5 steps: the last one has 5 of 24 samples.
trainer.fit(net, torch.utils.data.DataLoader(recipe.Samples(101), batch_size=BATCH))
recipe.report(net, trainer.optimizers[0], steps=trainer.global_step, epochs=trainer.current_epoch)
