"""The session of a FabricTrainer, and what its loop must know of the step under way.

While a job runs, the Trainer's loop finds the job's methods in place of four of its own: it calls
``training_step`` without inputs, and the job calls the Trainer's own ``training_step`` once per micro-batch.
"""

import enum
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import ProgressCallback

from fabric.client.loop.step import Step
from fabric.client.loop.unshared_objects import ADVICE, MORE_OPTIMIZERS
from fabric.errors import ConfigError
from fabric.integrations.huggingface.trl import TrlFigures
from fabric.integrations.script_state import ScriptState
from fabric.integrations.training_data import EpochShape, StepFeed, TrainingData, attach_in

# How a Trainer's loss of one micro-batch enters the average of a step.
#
# The Trainer's rule for R processes: what their micro-batches give to ``backward`` is summed and divided
# by R, or by their number in a short last step that has fewer than R. A loss that is divided by
# ``num_items_in_batch`` is a sum over tokens, divided by the tokens of the whole step. No replica knows
# that number before the step. So such a loss is divided by the micro-batch's own tokens, and weighed by
# them.

_CONVERSIONS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.detach,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
}


class Rule(enum.Enum):
    """How the losses of micro-batches make the loss of a step."""

    UNKNOWN = enum.auto()  # no loss of this process has shown it
    TOKENS = enum.auto()  # the loss is divided by num_items_in_batch
    SUM = enum.auto()  # the loss does not depend on num_items_in_batch


class ItemCount(torch.Tensor):
    """``num_items_in_batch`` of the first micro-batch. It notes whether the loss made a number of it."""

    converted = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As Tensor's, with the note."""
        if func in _CONVERSIONS:
            ItemCount.converted = True
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class LossRule:
    """Finds out once how the loss of ``trainer`` depends on ``num_items_in_batch``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # A Trainer may say it. Releases of transformers before 5.19 do not ask.
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        self.rule = {None: Rule.UNKNOWN, True: Rule.TOKENS, False: Rule.SUM}[is_scaled]
        self.number: float | None = None  # num_items_in_batch of the micro-batch, or None
        self._count: torch.Tensor | None = None

    def items(self, batch: Any) -> Any:
        """Return ``num_items_in_batch`` of one micro-batch, as the loss is to get it."""
        trainer = self._trainer
        items = trainer._get_num_items_in_batch([batch], trainer.args.device)  # noqa: SLF001
        self._count, self.number = None, None if items is None else float(items)
        if items is None or self.rule is not Rule.UNKNOWN or not torch.is_tensor(items):
            return items
        count = items.to(torch.float32)
        if not trainer.args.torch_compile:  # a compiled model makes no number of a tensor
            count, ItemCount.converted = count.as_subclass(ItemCount), False
        self._count = count.requires_grad_()
        return self._count

    def look_at(self, loss: torch.Tensor) -> None:
        """Learn the rule from the first loss, before its backward. Raises ConfigError where none holds."""
        count, self._count = self._count, None
        if count is None:
            return
        slopes: Any = torch.autograd.grad(loss, [count], retain_graph=True, allow_unused=True)
        slope = slopes[0]
        name = type(self._trainer).__name__
        remedy = f"set loss_is_scaled_for_ga in {name}, as the Trainer's documentation of compute_loss says"
        if slope is None:
            if isinstance(count, ItemCount) and ItemCount.converted:
                raise ConfigError(
                    f"the loss of {name} makes a number of num_items_in_batch, so FabricTrainer cannot see "
                    f"whether it divides by it: {remedy}"
                )
            self.rule = Rule.SUM
            return
        value, part = float(loss), float(slope) * (self.number or 0.0)
        if value == 0.0 or abs(value + part) <= 1e-3 * abs(value):
            self.rule = Rule.TOKENS  # loss = sum / count, whose slope is -loss / count
        elif not math.isnan(value):
            raise ConfigError(
                f"{name} divides only a part of the loss by num_items_in_batch (as with a router's auxiliary "
                "loss), which FabricTrainer cannot keep equal: turn the other part off, or divide all of it "
                f"and {remedy}"
            )


# The counters of a Trainer as shared state: a replica that joins logs and reports as the others do.


# Attributes of the Trainer, and of its state, that count since the training began.
_OF_TRAINER = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")
_OF_STATE = ("num_input_tokens_seen", "total_flos", "best_metric", "best_global_step")


class TrainerCounters:
    """``trainer`` may lack the attributes until its loop begins; the counters begin at ``step`` then."""

    def __init__(self, trainer: Any, step: int, figures: TrlFigures) -> None:
        self._trainer = trainer
        self._figures = figures
        first = {"_globalstep_last_logged": step, "_initial_global_step": step}
        self._values = self._now(0.0, {name: first.get(name, 0.0) for name in _OF_TRAINER})

    def _now(self, loss: float, of_trainer: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "_tr_loss": loss,
            **of_trainer,
            **{name: getattr(self._trainer.state, name) for name in _OF_STATE},
            "callbacks": [dict(x.state()["attributes"]) for x in _stateful(self._trainer)],
            "figures": self._figures.state_dict(),
        }

    @property
    def has_callback_states(self) -> bool:
        """Whether callbacks have a state, which an evaluation may change."""
        return bool(self._values["callbacks"])

    def collect(self) -> None:
        """Take the counters from the Trainer, at a step boundary."""
        trainer = self._trainer
        # The Trainer adds these up when it logs, and where it saves: on the one replica that writes.
        trainer.state.total_flos += trainer.current_flos
        trainer.current_flos = 0.0
        of_trainer = {name: getattr(trainer, name) for name in _OF_TRAINER}
        self._values = self._now(trainer._tr_loss.item(), of_trainer)  # noqa: SLF001

    def apply(self) -> None:
        trainer, values = self._trainer, self._values
        trainer._tr_loss = torch.tensor(values["_tr_loss"], device=trainer.args.device)  # noqa: SLF001
        for name in _OF_TRAINER:
            setattr(trainer, name, values[name])
        for name in _OF_STATE:
            setattr(trainer.state, name, values[name])
        self._figures.load_state_dict(values["figures"])
        for callback, attributes in zip(_stateful(trainer), values["callbacks"], strict=False):
            for name, value in attributes.items():
                setattr(callback, name, value)

    def state_dict(self) -> dict[str, Any]:
        return self._values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = dict(state)
        self.apply()


def _stateful(trainer: Any) -> list[Any]:
    """Return the callbacks that the Trainer itself saves in its checkpoints, such as early stopping."""
    return [x for x in trainer.callback_handler.callbacks if hasattr(x, "state") and hasattr(x, "from_state")]


# TensorBoard's curve of a Trainer goes on in one folder, whichever replica writes it.


def continue_curves(trainer: Any, job: str) -> None:
    """Give each TensorBoardCallback of ``trainer`` the folder of the job, unless the user has named one.

    A new writer hides what an earlier one has written of steps that follow: these steps are done again.
    """
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is None:
            if callback.logging_dir is None:
                callback.logging_dir = str(Path(trainer.args.output_dir) / "runs" / job)
            callback._SummaryWriter = partial(_purging, callback._SummaryWriter, trainer)  # noqa: SLF001


def _purging(kind: Any, trainer: Any, log_dir: str) -> Any:
    return kind(log_dir=log_dir, purge_step=trainer.state.global_step)


# The end of a sentence for a loop of one's own, in the words of transformers.
_WORDS = {
    ADVICE: (
        "return it from a method shared_state() of your Trainer, as in {'ema': ema}, or say "
        "Trainer(..., fabric={'unshared': 'ignore'})"
    ),
    MORE_OPTIMIZERS: (
        "let create_optimizer make it over all that it trains, as a part of the Trainer's model, or say "
        "Trainer(..., fabric={'unshared': 'ignore'})"
    ),
}


class MovedError(Exception):
    """The job's next step is not the one that the Trainer's loop expects: this replica has caught up."""


class StoppedError(Exception):
    """A replica's callback ends the training: this step has no update, on all replicas."""


class TrainerJob:
    """Made by ``FabricTrainer.train``, for a job that starts with ``replicas`` replicas."""

    def __init__(self, trainer: Any, replicas: int) -> None:
        self.replicas = replicas
        self.epochs = EpochShape(1, 1, 1, 1)
        self.until = 0
        self.session: Any = None
        self.runs = False  # the session's loop is under way
        self.is_busy = False
        self.wants_stop = False  # a callback of this replica has ended the training
        self.counters: TrainerCounters
        self._trainer = trainer
        self._loss = LossRule(trainer)
        self._figures = TrlFigures(trainer)
        self._data: TrainingData
        self._feed: StepFeed
        self._began_at = 0
        self._begun: Step | None = None  # the step that the loop has begun
        self._script_state: ScriptState | None = None  # the job's values, until the loop of a joiner begins
        self._micro_batch: MicroBatch | None = None  # the micro-batch that is being computed
        self._totals: dict[str, float] = {}

    # --- the beginning ----------------------------------------------------------------------------------

    def read_from(self, dataloader: Any) -> Any:
        """Read the data that the Trainer's DataLoader reads; return a description of an epoch."""
        # The Trainer's DataLoader is that of accelerate, around one of torch.
        self._data = data = TrainingData.of(getattr(dataloader, "base_dataloader", dataloader))
        if data.is_stream:
            return dataloader
        accumulation = self._trainer.args.gradient_accumulation_steps
        self.epochs = data.epochs(1, accumulation * self.replicas)  # in micro-batches
        self._data = data.limited(self.epochs.samples)
        return _Epoch(dataloader.dataset, self.epochs.steps * accumulation)

    def plan(self, steps_per_epoch: int, until: int) -> None:
        """Take the number of steps that the Trainer has worked out. A stream is one long pass."""
        self.until = until
        if self._data.is_stream:
            per_step = self._trainer.args.gradient_accumulation_steps * self.replicas
            self.epochs = EpochShape(steps_per_epoch * per_step, 1, 1, per_step)

    def begin(self) -> None:
        """Attach, and begin at the job's step. The optimizer and the scheduler exist by now."""
        trainer = self._trainer
        self._began_at = trainer.state.global_step
        self.counters = TrainerCounters(trainer, self._began_at, self._figures)
        state = {"trainer": self.counters, "scheduler": trainer.lr_scheduler, **trainer.shared_state()}
        if trainer.accelerator.scaler is not None:
            state["scaler"] = trainer.accelerator.scaler
        optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        arguments = {"step": self._began_at, **trainer._attach_arguments}  # noqa: SLF001
        self.session = attach_in(_WORDS, trainer.model, optimizer, state, arguments)
        args = trainer.args
        self._feed = self._data.feed(
            self.session,
            self.until,
            global_batch_size=self._data.batch_size * args.gradient_accumulation_steps * self.replicas,
            seed=args.data_seed if args.data_seed is not None else args.seed,
            epoch_end="continue" if self._data.is_stream else "short",
        )
        self._take_over(optimizer)
        continue_curves(trainer, self.session.settings.job)
        self._advance()
        if getattr(self.session, "loads", 0):
            self._script_state = ScriptState(state, [optimizer])
            self._script_state.keep()
        self.runs = True

    def _take_over(self, optimizer: Any) -> None:
        """Put the job's methods in the place of the Trainer's, for its loop."""
        trainer = self._trainer
        trainer.accelerator.backward = self._backward
        trainer.training_step = self._loop_step
        trainer.floating_point_ops = lambda _inputs: self._totals.pop("flos", 0.0)  # once a step
        trainer._track_num_input_tokens = self._track_tokens  # noqa: SLF001
        optimizer.register_step_pre_hook(self._forbid_update)
        trainer.callback_handler.callbacks.insert(0, EpochPlace(self))

    def end(self) -> None:
        """Wait for the end of the other replicas' loops: the state here is the job's final state then."""
        self.counters.collect()
        self.session.close()
        self.runs = False
        trainer = self._trainer
        for name in ("training_step", "floating_point_ops", "_track_num_input_tokens"):
            delattr(trainer, name)
        del trainer.accelerator.backward
        trainer.remove_callback(EpochPlace)

    # --- steps ------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        trainer, step = self._trainer, self._feed.advance()
        if step is None:
            return
        state = trainer.state
        state.global_step = step.number
        state.epoch = self.epochs.place(step.number)
        self._look_at_writer()

    def _look_at_writer(self) -> None:
        """Let the Trainer log and save where this replica writes for all, and show its progress."""
        trainer, state = self._trainer, self._trainer.state
        writes = trainer.is_world_process_zero()
        if writes and not state.is_world_process_zero:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, ProgressCallback) and callback.training_bar is None:
                    state.is_world_process_zero = True
                    callback.on_train_begin(trainer.args, state, trainer.control)
        state.is_world_process_zero = writes

    def _next_step(self) -> Step | None:
        """Return the step that comes next; None where none does."""
        if self._feed.step is self._begun:
            self.counters.collect()
            self._advance()
        return self._feed.step

    def place(self) -> tuple[int, int] | None:
        """Return epoch and step in the epoch of the step that comes next; None where none does."""
        step = self._next_step()
        return divmod(step.number, self.epochs.steps) if step is not None else None

    def begin_step(self) -> None:
        """Begin the step that the Trainer's loop expects. Raises MovedError where the job is elsewhere."""
        expected = self._trainer.state.global_step
        step = self._next_step()
        if step is None or step.number != expected:
            raise MovedError
        self._begun, self._totals = step, {}
        if step.number % self.epochs.steps:
            self.undo_hooks()
        self._script_state = None

    def undo_hooks(self) -> None:
        """Restore the job's values, which hooks at the begin of a training and its epochs have changed in a
        Trainer that joins. The job's first step of an epoch comes before the hooks at the begin of the epoch.
        """
        if self._script_state is not None:
            self._script_state.put_back()
            self._script_state.keep()

    def _loop_step(self, model: Any, _inputs: Any, _items: Any = None) -> torch.Tensor:
        """Compute the next micro-batch, in the step's last call all that are left; return the job's loss
        then."""
        trainer = self._trainer
        self.look_at_control()
        if not trainer.accelerator.sync_gradients:
            batch = self._feed.micro_batch() if not self.wants_stop else None
            if batch is not None:
                self._compute(model, batch)
            return torch.zeros((), device=trainer.args.device)
        if self.wants_stop:
            self.session.metrics(stops=1.0)
        for batch in self._feed.rest():
            if not self.wants_stop:
                self._compute(model, batch)
        assert self._begun is not None
        self._look_at_writer()  # the writer may have died in this step's exchange
        self._totals = dict(self._begun.metrics)
        if self._totals.get("stops"):
            model.zero_grad()
            raise StoppedError
        self._figures.add_step(self._totals)
        weight = self._totals.get("weight", 0.0)
        loss = self._totals.get("loss", 0.0) / weight if weight else 0.0
        return torch.tensor(loss, device=trainer.args.device)

    def look_at_control(self) -> None:
        """Note that a callback ends the training; all replicas learn of it by the next step's sums.

        Until then this replica's loop goes on. The Trainer itself ends it after the job's last step.
        """
        control, state = self._trainer.control, self._trainer.state
        if control.should_epoch_stop:
            raise ConfigError(
                "a callback set control.should_epoch_stop, and FabricTrainer reads every epoch to its end: "
                "set control.should_training_stop, or choose max_steps"
            )
        if control.should_training_stop and state.global_step < self.until:
            self.wants_stop, control.should_training_stop = True, False

    def _track_tokens(self, _inputs: Any) -> None:
        self._trainer.state.num_input_tokens_seen += int(self._totals.pop("tokens", 0.0))

    # --- a micro-batch ----------------------------------------------------------------------------------

    def _compute(self, model: Any, batch: Any) -> None:
        """Compute one micro-batch as the Trainer itself does, in its class's ``training_step``."""
        trainer, own = self._trainer, type(self._trainer)
        assert self._begun is not None
        # The Trainer divides a mean by this number: the micro-batches of one of R processes. Where there are
        # fewer than R, no process has an empty one, whose loss of 0 would count.
        part = max(1.0, self.epochs.batches_of(self._begun.number) / self.replicas)
        trainer.current_gradient_accumulation_steps = int(part) if part == int(part) else part
        self._micro_batch = done = MicroBatch(self._loss, batch, part)
        seen, loss = trainer.state.num_input_tokens_seen, 0.0
        try:
            with self._figures.of_micro_batch() as sums:
                flos = own.floating_point_ops(trainer, batch)
                own._track_num_input_tokens(trainer, batch)  # noqa: SLF001
                # Without a token to predict, the mean over the tokens does not exist.
                if self._loss.rule is Rule.SUM or done.number != 0.0:
                    loss = float(own.training_step(trainer, model, batch, done.items))
        finally:
            self._micro_batch = None
        tokens, trainer.state.num_input_tokens_seen = trainer.state.num_input_tokens_seen - seen, seen
        if loss and not done.weight:
            raise ConfigError(
                f"training_step of {own.__name__} computes a gradient without self.accelerator.backward(loss)"
                ", so FabricTrainer cannot weigh it: call that in place of loss.backward()"
            )
        sums |= {"loss": loss * done.factor * done.weight, "weight": done.weight}
        self.session.metrics(**sums, flos=flos, tokens=tokens)

    def _backward(self, loss: torch.Tensor, **_: Any) -> None:
        """In place of the accelerator's backward: the gradient enters the step's average by its weight."""
        done, scaler = self._micro_batch, self._trainer.accelerator.scaler
        assert self._begun is not None and done is not None
        self._loss.look_at(loss)
        number = None if self._loss.rule is Rule.SUM else done.number
        done.weight, done.factor = (1.0, done.part) if number is None else (number, 1.0)
        loss = loss.as_subclass(torch.Tensor) * done.factor
        self._begun.backward(scaler.scale(loss) if scaler is not None else loss, weight=done.weight)

    def _forbid_update(self, *_: Any) -> None:
        if self._micro_batch is not None:
            raise ConfigError(
                f"training_step of {type(self._trainer).__name__} calls optimizer.step(), and FabricTrainer "
                "updates the weights after the replicas have averaged their gradients: leave the call out"
            )

    # --- evaluation -------------------------------------------------------------------------------------

    def may_skip_evaluation(self) -> bool:
        """Whether this replica only catches up, and no state depends on the evaluation's figures."""
        trainer, step = self._trainer, self._begun
        catches_up = not step.contributed if step is not None else trainer.state.global_step > self._began_at
        takes_metrics = hasattr(trainer.lr_scheduler, "num_bad_epochs") or self.counters.has_callback_states
        return self.runs and catches_up and not takes_metrics and trainer.args.metric_for_best_model is None


class MicroBatch:
    """A micro-batch that is being computed, with its part of the step."""

    def __init__(self, rule: LossRule, batch: Any, part: float) -> None:
        self.items = rule.items(batch)  # as num_items_in_batch
        self.number = rule.number
        self.part = part  # micro-batches of the step, per replica
        self.weight = 0.0  # in the step's average; 0 before its backward
        self.factor = 1.0  # by which the Trainer's loss is multiplied


class EpochPlace(TrainerCallback):  # type: ignore[misc]
    """The first callback. It tells the others the epoch of a step whose micro-batches the replicas share, and
    undoes what they did in hooks of earlier epochs, in a Trainer that joins.
    """

    def __init__(self, job: TrainerJob) -> None:
        self._job = job

    def on_epoch_begin(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._job.undo_hooks()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Set the place in the epoch; the Trainer has set that of its own micro-batches."""
        state.epoch = self._job.epochs.place(state.global_step)


class _Epoch:
    """An epoch's data set and number of micro-batches, in the form of a DataLoader."""

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset = dataset
        self._length = length

    def __len__(self) -> int:
        return self._length
