"""Manual optimization: ``training_step`` calls ``manual_backward`` and the optimizer on its own.

A batch of the Trainer is a step of the job. If a replica is lost, ``manual_backward`` of another one leaves
``training_step`` before the update, and ``training_step`` is called for the lost micro-batch. So all that
follows ``manual_backward``, such as clipping, the optimizer and a scheduler, happens once per step.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fabric.errors import ConfigError

if TYPE_CHECKING:
    from fabric.integrations.lightning.job import LightningJob


class _NextMicroBatch(BaseException):
    """The job's step has a further micro-batch. No error, so that ``except Exception`` lets it pass."""


class ManualSteps:
    """Stands between a Trainer and a ``training_step`` that optimizes manually."""

    def __init__(self, trainer: Any, job: "LightningJob") -> None:
        self._trainer, self._job = trainer, job
        self._backwards = 0  # calls of manual_backward for the micro-batch under way
        self._following: Any = None

    def training_step(self, run: Callable[..., Any], batch: Any, *more: Any) -> Any:
        """Call ``run``, the script's own, for ``batch`` and for all further micro-batches of the step."""
        updates = self._trainer.global_step
        while True:
            self._backwards = 0
            try:
                output = run(batch, *more)
                break
            except _NextMicroBatch:
                batch = self._job.prepared(self._following)
        if self._backwards != 1 or self._trainer.global_step != updates + 1:
            raise ConfigError(
                f"training_step called manual_backward {self._backwards} times and made "
                f"{self._trainer.global_step - updates} updates, and FabricStrategy needs one of each for "
                "each batch: add the losses up, and take larger batches in place of an accumulation"
            )
        return output

    def backward(self, run: Callable[[float], Any], loss: torch.Tensor) -> torch.Tensor:
        """Add the micro-batch's gradient by ``run``, which takes a factor; return with the job's average."""
        job = self._job
        self._backwards += 1
        job.bring_back()
        if self._backwards == 1 and job.has_batch:
            run(job.scale())
            self._following = job.next_micro_batch()
            if self._following is not None:
                job.set_aside()
                raise _NextMicroBatch
        return loss.detach()


def check_closure(closure: Callable[[], Any]) -> None:
    """Raise ConfigError where the script gives its optimizer a closure."""
    if closure.__name__ != "do_nothing_closure":
        raise ConfigError(
            "the LightningModule gives its optimizer a closure, which FabricStrategy cannot interrupt: call "
            "manual_backward before optimizer.step()"
        )
