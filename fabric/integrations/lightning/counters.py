"""The counters of Lightning's loops, set to the job's step."""

from typing import Any

from fabric.integrations.lightning.epochs import EpochShape


def set_counters(trainer: Any, step: int, epochs: EpochShape) -> None:
    """Let the loops of ``trainer`` begin the epoch of ``step``; ``set_place`` gives the place in it."""
    loop = trainer.fit_loop
    inner, epoch = loop.epoch_loop, step // epochs.steps
    for each in (loop, inner, inner.val_loop, inner.automatic_optimization, inner.manual_optimization):
        each._restarting = each._loaded_from_state_dict = each._resuming_from_checkpoint = False  # noqa: SLF001
    for progress in (loop.epoch_progress.total, loop.epoch_progress.current):
        progress.ready = progress.started = progress.processed = progress.completed = epoch
    total = inner.batch_progress.total
    total.ready = total.started = total.processed = total.completed = epochs.batches_before(step)
    automatic = inner.automatic_optimization.optim_progress.optimizer.step
    for updates in (automatic, inner.manual_optimization.optim_step_progress):
        updates.total.ready = updates.total.completed = step
    inner._batches_that_stepped = step  # noqa: SLF001


def set_place(trainer: Any, step: int, epochs: EpochShape) -> None:
    """Let the epoch that has just begun go on at ``step``; for the first batch that its loop reads."""
    loop = trainer.fit_loop
    inner, within = loop.epoch_loop, step % epochs.steps
    count = within * epochs.accumulation
    progress = inner.batch_progress.current
    progress.ready = progress.started = progress.processed = progress.completed = count
    automatic = inner.automatic_optimization.optim_progress.optimizer.step
    for updates in (automatic, inner.manual_optimization.optim_step_progress):
        updates.current.ready = updates.current.completed = within
    loop._data_fetcher.fetched = count  # noqa: SLF001
