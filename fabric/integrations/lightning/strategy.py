"""``FabricStrategy``: Lightning's Trainer as one replica of a job. docs/adopt/lightning.md.

The Trainer keeps its loop. The strategy gives it the job's micro-batches in place of those of its DataLoader.
The last micro-batch of an accumulation is followed by all micro-batches that are left, those of a lost
replica included. So ``.grad`` is the job's average when the Trainer clips it. A replayed step has no
micro-batches: it costs an optimizer step. With FABRIC_DISABLE=1 the strategy is Lightning's own for one
device.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from fabric.client.data.randomness import seed_everything
from fabric.client.process.excepthook import install_excepthook
from fabric.errors import ConfigError
from fabric.integrations.arguments import check_version
from fabric.integrations.lightning.arguments import check_trainer
from fabric.integrations.lightning.job import LightningJob, check_closure
from fabric.integrations.lightning.release import LEAST, ROOT, TESTED
from fabric.integrations.lightning.run_files import write_nothing
from fabric.runtime import config

_strategies: Any = importlib.import_module(f"{ROOT}.strategies")


class FabricStrategy(_strategies.SingleDeviceStrategy):  # type: ignore[misc]
    """Lightning's strategy for one device, in each replica. ``arguments``: those of ``fabric.client.attach``.

    The job's batch is the DataLoader's batch size times ``accumulate_grad_batches`` on each of the replicas
    with which the job starts. Every replica validates, and one replica writes files and logs.
    """

    strategy_name = "fabric"
    busy_s = 3600.0  # how long the others wait for a validation or a checkpoint

    parallel_devices: Any = None  # set by the Trainer: the devices of its accelerator

    def __init__(self, device: Any = None, **arguments: Any) -> None:
        super().__init__("cpu" if device is None else device)
        self.has_device = device is not None
        self._arguments = arguments
        self._job: LightningJob | None = None  # none with FABRIC_DISABLE=1, and before the first batch
        self._disabled = True
        self._busy = contextlib.ExitStack()

    @property
    def session(self) -> Any:
        """The session; None before the first batch."""
        return getattr(self._job, "session", None)

    @property
    def root_device(self) -> torch.device:
        """The device that the caller gave; else the Trainer's first, as Lightning chooses one."""
        if not self.has_device and self.parallel_devices:
            return torch.device(self.parallel_devices[0])
        return torch.device(self._root_device)

    # --- the course of a training -----------------------------------------------------------------------

    def setup_environment(self) -> None:
        """As Lightning's, which then makes the folders of the loggers."""
        install_excepthook()
        self._disabled = config.settings().disable
        if not self._disabled and self.lightning_module.trainer.state.fn == "fit":
            write_nothing(self.lightning_module.trainer)
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Refuse what cannot be kept equal, before anything runs."""
        super().setup(trainer)
        if self._job is not None and self.session is None:
            # configure_optimizers has asked for the number of steps: the Trainer reads the data again.
            self._job = trainer.fit_loop._combined_loader = None  # noqa: SLF001
        if not self._disabled and self.optimizers:
            check_version(ROOT.partition(".")[0], LEAST, TESTED)
            check_trainer(trainer, self._arguments)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Read the training data by the job's plan; other DataLoaders are unchanged."""
        trainer = self.lightning_module.trainer
        if self._disabled or not trainer.training:
            return dataloader
        if self._job is not None:
            raise ConfigError(
                "the Trainer reads several training DataLoaders, and FabricStrategy deals out the batches of "
                "one: read all data sets through one Dataset"
            )
        self._job = LightningJob(self, trainer, dataloader, self._arguments)
        return self._job

    def on_train_end(self) -> None:
        """Wait for the end of the other replicas' loops: the state here is the job's final state then."""
        super().on_train_end()
        if self.session is not None:
            self.session.close()

    # --- a step -----------------------------------------------------------------------------------------

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """Compute a micro-batch of the job; none in a step that is replayed."""
        if self._job is None:
            return super().training_step(*arguments, **named)
        if self._job.manual is not None:
            return self._job.manual.training_step(self._compute, *arguments, **named)
        self._job.more = arguments[1:]
        if not self._job.has_batch:
            return torch.zeros((), device=self.root_device, requires_grad=True)
        output = self._compute(*arguments, **named)
        if output is None or (isinstance(output, dict) and output.get("loss") is None):
            self._job.scale()  # the micro-batch counts, and adds no gradient
        return output

    def _compute(self, batch: Any, *more: Any, **named: Any) -> Any:
        assert self._job is not None and self.lightning_module is not None
        arguments = batch, *self._job.numbered(more)
        with self._job.session.handover.attributes.method_of(self.lightning_module):
            return super().training_step(*arguments, **named)

    def backward(self, closure_loss: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        """Add the micro-batch's gradient, scaled by its number of samples."""
        if self._job is None:
            return super().backward(closure_loss, optimizer, *arguments, **named)
        if self._job.manual is not None:
            add = super().backward
            return self._job.manual.backward(
                lambda factor: add(closure_loss * factor, optimizer, *arguments, **named), closure_loss
            )
        if not self._job.has_batch:
            return closure_loss
        self._job.note_loss(closure_loss)
        scaled = super().backward(closure_loss * self._job.scale(), optimizer, *arguments, **named)
        return scaled.detach()

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **named: Any
    ) -> Any:
        """Compute what is left of the job's step, exchange, and update."""
        job = self._job
        if job is None:
            return super().optimizer_step(optimizer, closure, model, **named)
        if job.manual is not None:
            check_closure(closure)
            return super().optimizer_step(optimizer, closure, model, **named)

        def whole() -> Any:
            loss = closure()
            job.compute_rest(optimizer)
            job.show_loss(loss)
            return loss

        return super().optimizer_step(optimizer, whole, model, **named)

    # --- validation and files ---------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this replica writes files and logs for all."""
        return self.session is None or bool(self.session.is_writer)

    def save_checkpoint(self, checkpoint: Any, filepath: Any, *arguments: Any, **named: Any) -> None:
        if self._job is not None:
            self._job.files.note_saved(filepath)
        if self.is_global_zero:
            with self._while_busy("saving a checkpoint"):
                super().save_checkpoint(checkpoint, filepath, *arguments, **named)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self._job is not None:
            self._job.files.note_removed(filepath)
        if self.is_global_zero:
            super().remove_checkpoint(filepath)

    def on_validation_start(self) -> None:
        """The others wait for up to ``busy_s``. The random numbers are the same on all replicas."""
        self._busy.enter_context(self._while_busy("validation"))
        if self.session is not None:
            seed_everything(int(self._arguments.get("seed", 0)), self.lightning_module.global_step, 0)
        super().on_validation_start()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._busy.close()

    def _while_busy(self, why: str) -> contextlib.AbstractContextManager[None]:
        if self.session is None:
            return contextlib.nullcontext()
        busy: contextlib.AbstractContextManager[None] = self.session.busy(why, self.busy_s)
        return busy


def adopt_trainer(trainer: Any, hand_over: Callable[[], None]) -> Callable[[], None]:
    """Let the class ``trainer`` have this strategy where the script gives none; return how to undo that.

    ``hand_over`` is called before a Trainer is made.
    """
    make = trainer.__init__

    @functools.wraps(make)
    def make_adopted(self: Any, *arguments: Any, **named: Any) -> None:
        hand_over()
        if named.get("strategy", "auto") != "auto":
            raise ConfigError(
                f"the Trainer has the strategy {named['strategy']!r}, and --adopt replaces none: leave it "
                "out, or give FabricStrategy and run the script without --adopt"
            )
        make(self, *arguments, **{**named, "strategy": FabricStrategy()})

    trainer.__init__ = make_adopted
    return functools.partial(setattr, trainer, "__init__", make)


_strategies.StrategyRegistry.register("fabric", FabricStrategy, override=True)
