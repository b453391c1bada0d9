"""The session of a FabricStrategy, and the job's micro-batches in the form that Lightning's loop reads."""

import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fabric.client.loop.unshared_objects import ADVICE, MORE_OPTIMIZERS
from fabric.errors import ConfigError
from fabric.exit_codes import RESTART
from fabric.integrations.arguments import settings_among
from fabric.integrations.lightning.arguments import check_kept_values
from fabric.integrations.lightning.figures import JobFigures
from fabric.integrations.lightning.release import ROOT
from fabric.integrations.lightning.run_files import (
    CallbackStates,
    LogWriter,
    RunFiles,
    averaged_models,
    hook_states,
)
from fabric.integrations.script_state import ScriptGradients, ScriptState
from fabric.integrations.training_data import EpochShape, StepFeed, TrainingData, attach_in
from fabric.runtime.config import parse_replicas

if TYPE_CHECKING:
    from fabric.integrations.lightning.strategy import FabricStrategy

# Manual optimization: ``training_step`` calls ``manual_backward`` and the optimizer on its own.
#
# A batch of the Trainer is a step of the job. If a replica is lost, ``manual_backward`` of another one leaves
# ``training_step`` before the update, and ``training_step`` is called for the lost micro-batch. So all that
# follows ``manual_backward``, such as clipping, the optimizer and a scheduler, happens once per step.


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
                job.gradients.set_aside()
                raise _NextMicroBatch
        return loss.detach()


def check_closure(closure: Callable[[], Any]) -> None:
    """Raise ConfigError where the script gives its optimizer a closure."""
    if closure.__name__ != "do_nothing_closure":
        raise ConfigError(
            "the LightningModule gives its optimizer a closure, which FabricStrategy cannot interrupt: call "
            "manual_backward before optimizer.step()"
        )


# The counters of Lightning's loops, set to the job's step.


def set_counters(trainer: Any, step: int, epochs: EpochShape) -> None:
    """Let the loops of ``trainer`` begin the epoch of ``step``; ``set_place`` gives the place in it."""
    loop = trainer.fit_loop
    inner, epoch = loop.epoch_loop, step // epochs.steps
    for each in (loop, inner, inner.val_loop, inner.automatic_optimization, inner.manual_optimization):
        each._restarting = each._loaded_from_state_dict = each._resuming_from_checkpoint = False  # noqa: SLF001
    _set(loop.epoch_progress.total, epoch)
    _set(loop.epoch_progress.current, epoch)
    _set(inner.batch_progress.total, epochs.batches_before(step))
    automatic = inner.automatic_optimization.optim_progress.optimizer.step
    for updates in (automatic, inner.manual_optimization.optim_step_progress):
        updates.total.ready = updates.total.completed = step
    inner._batches_that_stepped = step  # noqa: SLF001


def set_place(trainer: Any, step: int, epochs: EpochShape) -> None:
    """Let the epoch that has just begun go on at ``step``; for the first batch that its loop reads."""
    loop = trainer.fit_loop
    inner, within = loop.epoch_loop, step % epochs.steps
    count = within * epochs.accumulation
    _set(inner.batch_progress.current, count)
    automatic = inner.automatic_optimization.optim_progress.optimizer.step
    for updates in (automatic, inner.manual_optimization.optim_step_progress):
        updates.current.ready = updates.current.completed = within
    loop._data_fetcher.fetched = count  # noqa: SLF001


def _set(progress: Any, count: int) -> None:
    progress.ready = progress.started = progress.processed = progress.completed = count


# Sentences for a loop of one's own, in the words of Lightning.
_WORDS = {
    "this loop ended": "this Trainer stopped",
    "this loop has more steps": "this Trainer has more steps",
    "let it count session.committed_step, so that all loops end at the same step": (
        "let Trainer.should_stop follow a figure that training_step or validation_step logs, so that all "
        "replicas stop at the same step"
    ),
    "give session.steps the same": "give Trainer.fit the same",
    "session.loader": "the DataLoader",
    ADVICE: (
        "give the callback that keeps it state_dict and load_state_dict, use the callback WeightAveraging, "
        'or say FabricStrategy(unshared="ignore")'
    ),
    MORE_OPTIMIZERS: (
        "return it from configure_optimizers and make what it trains a part of the LightningModule, or say "
        'FabricStrategy(unshared="ignore")'
    ),
}
_call: Any = importlib.import_module(f"{ROOT}.trainer.call")


class LightningJob:
    """The job as the strategy sees it, its step under way, and the batches that the Trainer's loop reads."""

    def __init__(
        self, strategy: "FabricStrategy", trainer: Any, loader: Any, arguments: dict[str, Any]
    ) -> None:
        source = TrainingData.of(loader)
        self.session: Any = None  # until the Trainer asks for the number of batches
        if source.is_stream:
            raise ConfigError(
                f"the DataLoader reads the IterableDataset {type(source.dataset).__name__}, whose epochs "
                "have no known length, so that a replica that joins could not find its place: give a data "
                "set with len() and an index"
            )
        replicas = parse_replicas(settings_among(arguments).replicas)[1]
        self.epochs = source.epochs(
            replicas, int(trainer.accumulate_grad_batches), trainer.limit_train_batches
        )
        self._source = source.limited(self.epochs.samples)
        self._until = _until(trainer, self.epochs.steps)
        self._feed: StepFeed
        self.more: tuple[Any, ...] = ()  # further arguments of training_step
        self.has_batch = False  # the loop holds a micro-batch of the job
        is_manual = not trainer.lightning_module.automatic_optimization
        self.manual = ManualSteps(trainer, self) if is_manual else None
        self._strategy, self._trainer, self._arguments = strategy, trainer, arguments
        self.gradients = ScriptGradients(trainer.lightning_module)  # the average waits for the update
        self.figures = JobFigures(trainer)
        self.files = RunFiles(trainer)
        self._log = LogWriter(trainer)
        self._newest: Any = None  # the batch that the loop got last
        self._place_is_set = False

    # --- what the Trainer reads -------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of batches. The first call joins the job: the Trainer has read all data then."""
        # ``configure_optimizers`` may ask for the number of steps, before the optimizer exists.
        if self.session is None and self._strategy.optimizers:
            self.begin()
        return self.epochs.whole

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches from the job's step to the end of the epoch."""
        step = self._feed.step
        first = 0 if step is None else (step.number + (not self._fresh)) % self.epochs.steps
        for _ in range(first, self.epochs.steps):
            for _ in range(self.begin_step()):
                self._newest = self.micro_batch(self._newest)
                yield self._newest

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the job's step is the position."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load nothing."""

    def begin(self) -> None:
        """Join the job, and let the Trainer begin at the job's step."""
        strategy, trainer, arguments = self._strategy, self._trainer, dict(self._arguments)
        state = {f"scheduler.{n}": x.scheduler for n, x in enumerate(strategy.lr_scheduler_configs)}
        state |= {"callbacks": CallbackStates(trainer, self.files), "figures": self.figures}
        state |= {**averaged_models(trainer), **hook_states(trainer), **arguments.pop("state", {})}
        _release_sigterm(trainer)
        self.figures.check_sources()
        check_kept_values(trainer)
        arguments = {"step": trainer.global_step, **arguments}
        self.session = attach_in(_WORDS, trainer.lightning_module, strategy.optimizers[0], state, arguments)
        self._feed = self._source.feed(
            self.session,
            self._until,
            global_batch_size=self.epochs.step_samples,
            seed=int(arguments.get("seed", 0)),
            epoch_end="short",
        )
        self._feed.advance()
        self._fresh = True  # the loop has not begun the feed's step
        if self._feed.step is not None:
            set_counters(trainer, self._feed.step.number, self.epochs)
        averages = averaged_models(trainer)  # no hook changes them, and a copy of them is large
        kept = {name: x for name, x in state.items() if name not in averages}
        self._script_state = ScriptState(kept, [strategy.optimizers[0]])
        if self.session.loads:
            self._script_state.keep()

    # --- batches ----------------------------------------------------------------------------------------

    def begin_step(self) -> int:
        """Go on to the job's next step, which must be the loop's; return the number of its batches."""
        if not self._fresh:
            self._feed.advance()
        self._fresh, self._ended = False, False
        step, expected = self._feed.step, self._trainer.global_step
        if step is None or step.number != expected:
            at = "its end" if step is None else step.number
            sys.stderr.write(
                f"fabric: the job is at step {at} and the Trainer at step {expected}: this process starts "
                "again\n"
            )
            raise SystemExit(RESTART)
        if not self._place_is_set:
            self._place_is_set = True
            set_place(self._trainer, step.number, self.epochs)
            self._script_state.put_back()
        self.gradients.drop()  # Lightning's zeroes come with the first backward pass, which may be missing
        self._log.turn(self.session.is_writer)
        self.figures.begin_step()
        return self.epochs.batches_of(step.number)

    def micro_batch(self, last: Any) -> Any:
        """Return the next micro-batch; where the step has none left, ``last`` without a computation."""
        batch = self.next_micro_batch()
        self.has_batch = batch is not None
        self.figures.idle = not self.has_batch
        if batch is not None:
            return batch
        self.gradients.set_aside()
        assert self._feed.step is not None
        # The Trainer skips a step whose batch is None.
        return last if last is not None else self._feed.data.fetch(self._feed.step.number, 0)

    def next_micro_batch(self) -> Any:
        """Return the step's next micro-batch; None where none is left, and ``.grad`` is the average then."""
        self.figures.samples = None
        self.figures.flush(self.session)
        batch, step = self._feed.micro_batch(), self._feed.step
        assert step is not None
        if batch is not None:
            self.figures.samples = float(step.weight.samples)
        elif not self._ended:
            self._ended = True
            self.figures.commit(step.metrics)
            self._log.turn(self.session.is_writer, committed=True)
        return batch

    def prepared(self, batch: Any) -> Any:
        """Return ``batch`` as the Trainer hands it to ``training_step``."""
        trainer = self._trainer
        moved = trainer.precision_plugin.convert_input(batch)
        moved = trainer.lightning_module._on_before_batch_transfer(moved, dataloader_idx=0)  # noqa: SLF001
        moved = _call._call_strategy_hook(trainer, "batch_to_device", moved, dataloader_idx=0)  # noqa: SLF001
        self.figures.results.batch, self.figures.results.batch_size = moved, None
        return moved

    def numbered(self, more: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the further arguments of ``training_step`` with the ``batch_idx`` of the micro-batch.

        Where a replica computes a part of another one, that is not the number of the Trainer's batch.
        """
        return (self._feed.batch(self.epochs), *more[1:]) if more and self.has_batch else more

    def scale(self) -> float:
        """Count the micro-batch; return the factor of its loss, which the loop has divided already."""
        step, epochs = self._feed.step, self.epochs
        assert step is not None
        divided = 1 if self.manual is not None else epochs.accumulation
        return step.add_weight(self._feed.weight(epochs)) * epochs.factor(step.number) * divided

    def note_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch, which the loop has divided, to that of the step."""
        samples = self.figures.samples or 0.0
        self.session.metrics(loss=float(loss.detach()) * self.epochs.accumulation * samples, samples=samples)

    def show_loss(self, loss: Any) -> None:
        """Put the step's loss into the result of the loop's batch, as the Trainer reports it."""
        metrics = self._feed.step.metrics if self._feed.step is not None else {}
        if isinstance(loss, torch.Tensor) and metrics.get("samples"):
            loss.fill_(metrics["loss"] / metrics["samples"] / self.epochs.accumulation)

    def compute_rest(self, optimizer: Any) -> None:
        """Compute the micro-batches that are left; ``.grad`` is the average of the job then."""
        trainer = self._trainer
        while self.has_batch and (batch := self.next_micro_batch()) is not None:
            with torch.enable_grad():
                moved = self.prepared(batch)
                output = _call._call_strategy_hook(trainer, "training_step", moved, *self.more)  # noqa: SLF001
                loss = output["loss"] if isinstance(output, dict) else output
                if loss is not None:
                    loss = loss / self.epochs.accumulation
                    _call._call_strategy_hook(trainer, "backward", loss, optimizer)  # noqa: SLF001
        self.bring_back()

    def bring_back(self) -> None:
        """Put the average, which was kept from the loop's zeroes, into ``.grad``."""
        step = self._feed.step
        if self.gradients.bring_back() and step is not None and step.done:
            self._feed.session.handover.resume(step.number)  # the Trainer has computed a forward since


def _release_sigterm(trainer: Any) -> None:
    """Leave SIGTERM to the session: Lightning's own handler ends the Trainer without the job's knowledge.

    A handler that the script has set stays.
    """
    composed = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [None])
    own = all(getattr(x, "__self__", None) is trainer._signal_connector for x in composed)  # noqa: SLF001
    if own and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _until(trainer: Any, steps_per_epoch: int) -> int:
    """Return the number of steps of the whole training. Raises ConfigError where it has no end."""
    ends = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        ends.append(trainer.max_epochs * steps_per_epoch)
    if not ends:
        raise ConfigError("the Trainer has no end: give it max_epochs or max_steps")
    return int(min(ends))
