"""The counters of Lightning's loops, set to the job's step, and the callbacks that count epochs."""

from collections.abc import Mapping
from typing import Any


def set_counters(trainer: Any, step: int, steps_per_epoch: int) -> None:
    """Let the loops of ``trainer`` go on at ``step``, as after Trainer.fit(ckpt_path=...)."""
    if step == trainer.global_step:
        return
    loop = trainer.fit_loop
    epochs = loop.epoch_loop
    epoch, within = divmod(step, steps_per_epoch)
    batches, begun = trainer.accumulate_grad_batches, int(within > 0)
    for progress in (loop.epoch_progress.total, loop.epoch_progress.current):
        progress.ready = progress.started = epoch + begun
        progress.processed = progress.completed = epoch
    for progress, done in ((epochs.batch_progress.total, step), (epochs.batch_progress.current, within)):
        count = done * batches
        progress.ready = progress.started = progress.processed = progress.completed = count
    automatic = epochs.automatic_optimization.optim_progress.optimizer.step
    for updates in (automatic, epochs.manual_optimization.optim_step_progress):
        updates.total.ready = updates.total.completed = step
        updates.current.ready = updates.current.completed = within
    epochs._batches_that_stepped = step  # noqa: SLF001
    if begun:
        loop.restarting = True


class EarlyStops:
    """The state of a Trainer's EarlyStopping callbacks: they must stop all replicas at one step."""

    def __init__(self, trainer: Any) -> None:
        stops = [x for x in trainer.callbacks if type(x).__name__ == "EarlyStopping"]
        self._callbacks = {callback.state_key: callback for callback in stops}

    def state_dict(self) -> dict[str, Any]:
        """Return the callbacks' states by name."""
        return {key: callback.state_dict() for key, callback in self._callbacks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the callbacks' states."""
        for key, callback in self._callbacks.items():
            callback.load_state_dict(state[key])
