"""Every hook of a LightningModule, a LightningDataModule and a Callback runs as in plain Lightning."""

import recipe
import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import LambdaCallback

AREA = "Lightning"
NEEDS = ("pytorch_lightning",)
BATCH = recipe.GLOBAL_BATCH // recipe.REPLICAS
# Each replica has its own micro-batches, so these run as often as it computes one.
OF_MICRO_BATCHES = {"backward", "on_before_backward", "on_after_backward", "forward", "training_step"}
seen, order = set(), {}  # all hooks that have run; those of the step, with their place in it


def watched(kind, names):
    """Return ``kind`` whose hooks of these names note their call, and do what they do."""

    def hook(name):
        def call(self, *arguments, **named):
            seen.add(f"{kind.__name__}.{name}")
            if name not in OF_MICRO_BATCHES and "transfer" not in name:
                order.setdefault(f"{kind.__name__}.{name}", len(order))
            return getattr(super(Watched, self), name)(*arguments, **named)

        return call

    Watched = type(kind.__name__, (kind,), {name: hook(name) for name in names.split()})  # noqa: N806
    return Watched


class Data(LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(recipe.Samples(120), batch_size=BATCH)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(recipe.Samples(48), batch_size=24)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return 2 * batch[0], batch[1]


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    def forward(self, x):
        return self.net(x)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return 1 + batch[0], batch[1]

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    def configure_callbacks(self):
        return [Watch()]


class Notes(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        order.clear()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        recipe.note(trainer.global_step - 1, **order)
        order.clear()

    def on_train_epoch_end(self, trainer, module):
        recipe.note(trainer.global_step - 1, **order)


ENDS = (
    "on_fit_start on_fit_end on_train_start on_train_end on_validation_start on_validation_end "
    "on_train_epoch_start on_train_epoch_end on_validation_epoch_start on_validation_epoch_end "
    "on_train_batch_start on_train_batch_end on_validation_batch_start on_validation_batch_end"
)
STEP = "on_before_optimizer_step on_before_zero_grad on_before_backward on_after_backward setup teardown"
Watch = watched(Notes, f"{ENDS} {STEP}")
Model = watched(
    Net,
    f"{ENDS} {STEP} prepare_data configure_model configure_optimizers configure_callbacks forward "
    "training_step validation_step configure_gradient_clipping clip_gradients backward optimizer_step "
    "optimizer_zero_grad lr_scheduler_step on_before_batch_transfer on_validation_model_eval "
    "on_validation_model_train on_validation_model_zero_grad",
)
Module = watched(
    Data,
    "prepare_data setup teardown train_dataloader val_dataloader transfer_batch_to_device "
    "on_after_batch_transfer",
)
torch.manual_seed(0)
if recipe.FABRIC:
    from fabric.integrations.lightning import FabricStrategy
net = Model()
trainer = Trainer(
    strategy=FabricStrategy() if recipe.FABRIC else "auto",
    accelerator="cpu",
    max_steps=recipe.STEPS,
    gradient_clip_val=0.5,
    callbacks=[LambdaCallback(on_train_epoch_end=lambda *_: seen.add("LambdaCallback"))],
    num_sanity_val_steps=0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(net, datamodule=Module())
recipe.report(net, trainer.optimizers[0], steps=trainer.global_step, hooks=sorted(seen))
