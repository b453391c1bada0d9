"""TensorBoard's curve of a Trainer goes on in one folder, whichever replica writes it."""

from pathlib import Path
from typing import Any

from transformers.integrations import TensorBoardCallback


def continue_curves(trainer: Any, job: str) -> None:
    """Give each TensorBoardCallback of ``trainer`` the folder of the job, unless the user has named one.

    A new writer hides what an earlier one has written of steps that follow: these steps are done again.
    """
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is None:
            if callback.logging_dir is None:
                callback.logging_dir = str(Path(trainer.args.output_dir) / "runs" / job)
            callback._SummaryWriter = _Purging(callback._SummaryWriter, trainer)  # noqa: SLF001


class _Purging:
    """Makes a SummaryWriter that begins at the Trainer's step."""

    def __init__(self, kind: Any, trainer: Any) -> None:
        self._kind = kind
        self._trainer = trainer

    def __call__(self, log_dir: str) -> Any:
        return self._kind(log_dir=log_dir, purge_step=self._trainer.state.global_step)
