"""A LightningModule that optimizes manually, in the rest of ``examples/lightning_trainer.py``."""

import lightning_trainer
import lightning_watched


class Net(lightning_trainer.Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()


class ManualTrainer(lightning_watched.WatchedTrainer):
    def __init__(self, **named) -> None:
        super().__init__(**{**named, "accumulate_grad_batches": 1, "gradient_clip_val": None})


def main() -> None:
    lightning_trainer.Net = Net
    lightning_watched.WatchedTrainer = ManualTrainer
    lightning_watched.main()
