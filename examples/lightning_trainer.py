"""Lightning's Trainer with validation, a scheduler, clipping, accumulation and checkpoints: one more line."""

import os

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from toy import STEPS, Samples, loss_fn, make_model

from fabric.integrations.lightning import FabricStrategy


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def training_step(self, batch, batch_idx):
        loss = loss_fn(self.net, *batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", loss_fn(self.net, *batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    output = os.environ.get("EXAMPLE_OUTPUT", "lightning-out")
    trainer = Trainer(
        strategy=FabricStrategy(),
        accelerator="cpu",
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        check_val_every_n_epoch=2,
        callbacks=[ModelCheckpoint(output, filename="{step}", every_n_train_steps=10, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train = torch.utils.data.DataLoader(Samples(), batch_size=4, shuffle=True)
    trainer.fit(Net(), train, torch.utils.data.DataLoader(Samples(16), batch_size=16))


if __name__ == "__main__":
    main()
