"""Runs ``examples/lightning_trainer.py`` at the pace of the tests, and notes what the Trainer counts."""

import json
import os
from pathlib import Path

import lightning_trainer
from pace import leave_time
from pytorch_lightning import Callback, Trainer


class Watch(Callback):
    """Writes a line per update to ``TEST_NOTES``."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        session = getattr(trainer.strategy, "session", None)
        if session is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            leave_time(session, lightning_trainer.STEPS - trainer.global_step, 0.02)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.gradient = sum(p.grad.double().sum().item() for p in module.parameters())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            note = {
                "step": trainer.global_step,
                "epoch": trainer.current_epoch,
                "batch": batch_idx,
                "total": trainer.fit_loop.total_batch_idx,
                "lr": trainer.optimizers[0].param_groups[0]["lr"],
                "gradient": self.gradient,
                "weights": sum(p.double().sum().item() for p in module.parameters()),
            }
            with Path(os.environ["TEST_NOTES"]).open("a") as file:
                file.write(json.dumps(note) + "\n")


class Stops(Callback):
    """Ends the training after the update ``TEST_STOP_AT``, where it is given."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == int(os.environ.get("TEST_STOP_AT", "-1")):
            trainer.should_stop = True


class WatchedTrainer(Trainer):
    def __init__(self, *arguments, callbacks=(), **named) -> None:
        super().__init__(*arguments, callbacks=[*callbacks, Watch(), Stops()], **named)


def main() -> None:
    lightning_trainer.Trainer = WatchedTrainer
    if os.environ.get("TEST_WITHOUT_FABRIC"):
        lightning_trainer.FabricStrategy = lambda: "auto"
    lightning_trainer.main()
