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
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

import fabric.client
from fabric.client.process.excepthook import install_excepthook
from fabric.errors import ConfigError
from fabric.exit_codes import RESTART
from fabric.integrations.lightning_counters import EarlyStops, set_counters
from fabric.integrations.lightning_manual import ManualSteps, check_closure
from fabric.integrations.step_feed import StepFeed
from fabric.integrations.versions import check_version
from fabric.runtime import config
from fabric.runtime.config import parse_replicas

LEAST, TESTED = "2.5.0", "2.6.6"
_has_both_names = "pytorch_lightning" not in sys.modules and importlib.util.find_spec("lightning") is not None
# Lightning is published under two names, whose classes differ.
ROOT = "lightning.pytorch" if _has_both_names else "pytorch_lightning"
_strategies: Any = importlib.import_module(f"{ROOT}.strategies")
_call: Any = importlib.import_module(f"{ROOT}.trainer.call")
_ranks: Any = importlib.import_module("lightning_utilities.core.rank_zero").rank_zero_only


class FabricStrategy(_strategies.SingleDeviceStrategy):  # type: ignore[misc]
    """Lightning's strategy for one device, in each replica. ``arguments``: those of ``fabric.client.attach``.

    The job's batch is the DataLoader's batch size times ``accumulate_grad_batches`` on each of the replicas
    with which the job starts. Every replica validates, and one replica writes files and logs.
    """

    strategy_name = "fabric"
    busy_s = 3600.0  # how long the others wait for a validation or a checkpoint

    def __init__(self, device: Any = "cpu", **arguments: Any) -> None:
        super().__init__(device)
        self._arguments = arguments
        self._job: LightningJob | None = None  # none with FABRIC_DISABLE=1, and before the first batch
        self._disabled = True
        self._busy = contextlib.ExitStack()

    @property
    def session(self) -> Any:
        """The session; None before the first batch."""
        return self._job.session if self._job is not None else None

    # --- the course of a training -----------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Refuse what cannot be kept equal, before anything runs."""
        install_excepthook()
        self._disabled = config.settings().disable
        super().setup(trainer)
        if not self._disabled and self.optimizers:
            check_version(ROOT.partition(".")[0], LEAST, TESTED)
            _refuse(trainer, self._arguments)
            _ranks.rank = 1  # the first step shows which replica writes

    def process_dataloader(self, dataloader: Any) -> Any:
        """Read the training data by the job's plan; other DataLoaders are unchanged."""
        trainer = self.lightning_module.trainer
        if self._disabled or not trainer.training:
            return dataloader
        if self._job is not None:
            raise ConfigError(
                "the Trainer reloads its DataLoader in mid-training: leave "
                "reload_dataloaders_every_n_epochs away"
            )
        self._job = LightningJob(self, trainer, dataloader, self._arguments)
        return self._job.batches

    def on_train_end(self) -> None:
        """Wait for the end of the other replicas' loops: the state here is the job's final state then."""
        super().on_train_end()
        if self._job is not None:
            self._job.session.close()

    # --- a step -----------------------------------------------------------------------------------------

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """Compute a micro-batch of the job; none in a step that is replayed."""
        if self._job is None:
            return super().training_step(*arguments, **named)
        if self._job.manual is not None:
            return self._job.manual.training_step(super().training_step, *arguments, **named)
        self._job.more = arguments[1:]
        if not self._job.has_batch:
            return torch.zeros((), device=self.root_device, requires_grad=True)
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
            return loss

        return super().optimizer_step(optimizer, whole, model, **named)

    # --- validation and files ---------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this replica writes files and logs for all."""
        return self.session is None or bool(self.session.is_writer)

    def save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        """Save on the replica that writes files."""
        if self.is_global_zero:
            with self._while_busy("saving a checkpoint"):
                super().save_checkpoint(*arguments, **named)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove on the replica that writes files."""
        if self.is_global_zero:
            super().remove_checkpoint(filepath)

    def on_validation_start(self) -> None:
        """The others wait for up to ``busy_s``."""
        self._busy.enter_context(self._while_busy("validation"))
        super().on_validation_start()

    def on_validation_end(self) -> None:
        """The validation is over."""
        super().on_validation_end()
        self._busy.close()

    def _while_busy(self, why: str) -> contextlib.AbstractContextManager[None]:
        if self.session is None:
            return contextlib.nullcontext()
        busy: contextlib.AbstractContextManager[None] = self.session.busy(why, self.busy_s)
        return busy


class LightningJob:
    """The session of a FabricStrategy, and what its loop must know of the step under way."""

    def __init__(
        self, strategy: FabricStrategy, trainer: Any, loader: Any, arguments: dict[str, Any]
    ) -> None:
        settings = config.settings(**{k: v for k, v in arguments.items() if k in config.Settings.__slots__})
        replicas = parse_replicas(settings.replicas)[1]
        self.accumulation = int(trainer.accumulate_grad_batches)
        self.more: tuple[Any, ...] = ()  # further arguments of training_step
        self.has_batch = False  # the loop holds a micro-batch of the job
        is_manual = not trainer.lightning_module.automatic_optimization
        self.manual = ManualSteps(trainer, self) if is_manual else None
        self._strategy, self._trainer = strategy, trainer
        self._gradients: list[torch.Tensor | None] | None = None  # the average, until the update
        self._steps_per_epoch = _steps_per_epoch(loader, self.accumulation, replicas)
        until = _until(trainer, self._steps_per_epoch)
        state = {f"scheduler.{n}": x.scheduler for n, x in enumerate(strategy.lr_scheduler_configs)}
        early_stops = EarlyStops(trainer)
        if early_stops.state_dict():
            state["early_stopping"] = early_stops
        session = fabric.client.attach(
            trainer.lightning_module,
            strategy.optimizers[0],
            state=state,
            **{"step": trainer.global_step, **arguments},
        )
        assert isinstance(session, fabric.client.Session)
        self.session = session
        self._data = session.loader(
            loader.dataset,
            global_batch_size=loader.batch_size * self.accumulation * replicas,
            micro_batch_size=loader.batch_size,
            seed=int(arguments.get("seed", 0)),
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
        )
        self._feed = StepFeed(session, self._data, until)
        self._feed.advance()
        self._fresh = True  # the loop has not begun the step of ``_feed``
        self.batches = JobBatches(self, self._steps_per_epoch)
        if self._feed.step is not None:
            set_counters(trainer, self._feed.step.number, self._steps_per_epoch)

    # --- batches ----------------------------------------------------------------------------------------

    def place(self) -> int:
        """Return the number of the job's next step within its epoch."""
        step = self._feed.step
        return 0 if step is None else (step.number + (not self._fresh)) % self._steps_per_epoch

    def begin_step(self) -> None:
        """Go on to the job's next step, which must be the loop's."""
        if not self._fresh:
            self._feed.advance()
        self._fresh = False
        step, expected = self._feed.step, self._trainer.global_step
        if step is None or step.number != expected:
            self._leave(expected)
        _ranks.rank = 0 if self.session.is_writer else 1

    def micro_batch(self, last: Any) -> Any:
        """Return the next micro-batch; where the step has none left, ``last`` without a computation."""
        batch = self._feed.micro_batch()
        self.has_batch = batch is not None
        if batch is not None:
            return batch
        self.set_aside()
        assert self._feed.step is not None
        # The Trainer skips a step whose batch is None.
        return last if last is not None else self._data.fetch(self._feed.step.number, 0)

    def next_micro_batch(self) -> Any:
        """Return the step's next micro-batch; None where none is left, and ``.grad`` is the average then."""
        return self._feed.micro_batch()

    def prepared(self, batch: Any) -> Any:
        """Return ``batch`` as the Trainer hands it to ``training_step``."""
        trainer = self._trainer
        moved = trainer.precision_plugin.convert_input(batch)
        moved = trainer.lightning_module._on_before_batch_transfer(moved, dataloader_idx=0)  # noqa: SLF001
        return _call._call_strategy_hook(trainer, "batch_to_device", moved, dataloader_idx=0)  # noqa: SLF001

    def scale(self) -> float:
        """Return by how much the loop's loss is multiplied: the loop has divided it by the accumulation."""
        assert self._feed.step is not None
        return self._feed.step.add_weight() * self.accumulation

    def compute_rest(self, optimizer: Any) -> None:
        """Compute the micro-batches that are left; ``.grad`` is the average of the job then."""
        trainer = self._trainer
        if self.has_batch:
            for batch in self._feed.rest():
                moved = self.prepared(batch)
                with torch.enable_grad():
                    output = _call._call_strategy_hook(trainer, "training_step", moved, *self.more)  # noqa: SLF001
                    loss = output["loss"] if isinstance(output, dict) else output
                    _call._call_strategy_hook(trainer, "backward", loss / self.accumulation, optimizer)  # noqa: SLF001
        self.bring_back()

    @property
    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self._trainer.lightning_module.parameters() if p.requires_grad]

    def set_aside(self) -> None:
        """Keep the gradients from the loop, which zeroes them before each backward pass."""
        if self._gradients is None:
            self._gradients = [p.grad for p in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None

    def bring_back(self) -> None:
        """Put the gradients that ``set_aside`` has kept into ``.grad``."""
        if self._gradients is not None:
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient
            self._gradients = None
            if (step := self._feed.step) is not None and step.done:
                self._feed.session.handover.resume(step.number)  # the Trainer has computed a forward since

    def _leave(self, expected: int) -> NoReturn:
        at = self._feed.step.number if self._feed.step is not None else "its end"
        sys.stderr.write(
            f"fabric: the job is at step {at} and the Trainer at step {expected}: this process starts again\n"
        )
        raise SystemExit(RESTART)


class JobBatches:
    """The job's micro-batches, for the Trainer: from the job's step to the end of the epoch."""

    def __init__(self, job: LightningJob, steps: int) -> None:
        self._job, self._steps = job, steps
        self._newest: Any = None

    def __len__(self) -> int:
        return self._steps * self._job.accumulation

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._job.place(), self._steps):
            self._job.begin_step()
            for _ in range(self._job.accumulation):
                self._newest = self._job.micro_batch(self._newest)
                yield self._newest

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the job's step is the position."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load nothing."""


def _refuse(trainer: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for a Trainer that this strategy cannot keep equal on all replicas."""
    if not trainer.lightning_module.automatic_optimization and arguments.get("buffers") == "average":
        raise ConfigError(
            'buffers="average" does not go with automatic_optimization = False, where a replayed step '
            'computes a forward: choose "ignore"'
        )
    if len(trainer.strategy.optimizers) != 1:
        raise ConfigError(
            "FabricStrategy takes one optimizer, and configure_optimizers gives "
            f"{len(trainer.strategy.optimizers)}: call fabric.client.attach in a loop of your own"
        )
    if str(trainer.precision).startswith("16"):
        raise ConfigError('FabricStrategy has no GradScaler in its shared state: say precision="bf16-mixed"')


def _steps_per_epoch(loader: Any, accumulation: int, replicas: int) -> int:
    if not isinstance(loader, torch.utils.data.DataLoader) or loader.batch_size is None:
        raise ConfigError(
            "FabricStrategy reads one DataLoader with a batch size, and the Trainer has a "
            f"{type(loader).__name__}: give Trainer.fit a DataLoader"
        )
    step, size = loader.batch_size * accumulation * replicas, len(loader.dataset)  # type: ignore[arg-type]
    if size < step:
        raise ConfigError(
            f"a step of the job has {step} samples, and the data set {size}: take smaller batches"
        )
    return size // step


def _until(trainer: Any, steps_per_epoch: int) -> int:
    """Return the number of steps of the whole training. Raises ConfigError where it has no end."""
    ends = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        ends.append(trainer.max_epochs * steps_per_epoch)
    if not ends:
        raise ConfigError("the Trainer has no end: give it max_epochs or max_steps")
    return int(min(ends))


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
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
        make(self, *arguments, **{**named, "strategy": FabricStrategy(device)})

    trainer.__init__ = make_adopted
    return functools.partial(setattr, trainer, "__init__", make)


_strategies.StrategyRegistry.register("fabric", FabricStrategy, override=True)
