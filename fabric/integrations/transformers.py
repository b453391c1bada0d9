"""``FabricTrainer``: the Trainer of transformers, as one replica of a job. docs/adopt/transformers.md.

The Trainer keeps its loop. ``FabricTrainer`` gives it the job's micro-batches in place of those of its
DataLoader. The last ``training_step`` of an accumulation computes all micro-batches that are left, those of a
lost replica included. So ``.grad`` is the job's average when the Trainer clips it. A replayed step has no
micro-batches: it costs an optimizer step. With FABRIC_DISABLE=1 every method is the Trainer's own.
"""

import contextlib
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import rotate_checkpoints

import fabric.client
from fabric.client.gradients.buffer_choices import default_buffers
from fabric.client.loop.step import Step
from fabric.client.process.excepthook import install_excepthook
from fabric.errors import ConfigError, FabricError
from fabric.integrations.optimizers import unequal_optimizer
from fabric.integrations.step_feed import StepFeed
from fabric.integrations.trainer_counters import TrainerCounters
from fabric.integrations.versions import check_version
from fabric.runtime import config
from fabric.runtime.config import Settings, parse_replicas

LEAST, TESTED = "5.10.1", "5.23.0"


class _MovedError(Exception):
    """The job's next step is not the one that the Trainer's loop expects: this replica has caught up."""


class FabricTrainer(Trainer):  # type: ignore[misc]
    """As Trainer. ``fabric``: arguments of ``fabric.client.attach``, such as ``{"buffers": "average"}``.

    The job's batch is that of ``per_device_train_batch_size`` and ``gradient_accumulation_steps`` on each of
    the replicas with which the job starts. Every loss is weighed by its tokens, as Trainer does across
    devices. Every replica evaluates, and one replica writes files.
    """

    busy_s = 3600.0  # how long the others wait for an evaluation or a save
    _job: "_TrainerJob | None" = None  # none with FABRIC_DISABLE=1, and before train()

    def __init__(self, *arguments: Any, fabric: Mapping[str, Any] | None = None, **named: Any) -> None:
        self._attach_arguments = dict(fabric or {})
        super().__init__(*arguments, **named)

    def shared_state(self) -> dict[str, Any]:
        """Return further objects of the shared state, such as a moving average. For subclasses."""
        return {}

    # --- the course of a training -----------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **named: Any) -> Any:
        """As Trainer.train. A new job begins at ``resume_from_checkpoint``; a running job is joined."""
        install_excepthook()
        names = {x.name for x in fields(Settings)}
        chosen = config.settings(**{k: v for k, v in self._attach_arguments.items() if k in names})
        if not chosen.disable:
            if self._job is not None:
                raise ConfigError("FabricTrainer.train runs once in a process: start another process")
            check_version("transformers", LEAST, TESTED)
            _refuse(self, trial)
            self._job = _TrainerJob(self, parse_replicas(chosen.replicas)[1])
        return super().train(resume_from_checkpoint, trial, **named)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples in a step of the whole job."""
        own = int(super().get_total_train_batch_size(args))
        return own * self._job.replicas if self._job is not None else own

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """As Trainer's, for the number of steps of the job."""
        if self._job is not None:
            dataloader = self._job.read_from(dataloader)
        values = super().set_initial_training_values(args, dataloader)
        if self._job is not None:
            self._job.steps_per_epoch, self._job.until = values[1], values[6]
        return values

    def _init_training_state(self, *arguments: Any, **named: Any) -> tuple[int, int]:
        begun = super()._init_training_state(*arguments, **named)
        # The epoch depends on the job's step, which is known only when the session has begun.
        return (0, 0) if self._job is not None else begun

    def _prepare_for_training(self, *arguments: Any, **named: Any) -> Any:
        prepared = super()._prepare_for_training(*arguments, **named)
        if self._job is not None:
            self._job.begin()
        return prepared

    def _run_epoch(self, *, epoch: int, **named: Any) -> None:
        if self._job is None:
            super()._run_epoch(epoch=epoch, **named)
            return
        self._job.counters.apply()  # the Trainer has just set its counters to zero
        while (place := self._job.place()) is not None and place[0] <= epoch:
            # The Trainer's way to begin in mid-epoch is that of a resumed training.
            within = place[1] * self.args.gradient_accumulation_steps
            named |= {"steps_trained_in_current_epoch": within, "epochs_trained": place[0]}
            named |= {"resume_from_checkpoint": "the job" if within else None}
            named["train_dataloader"] = _unread(named["steps_in_epoch"])
            ignored, self.args.ignore_data_skip = self.args.ignore_data_skip, False
            try:
                with contextlib.suppress(_MovedError):
                    super()._run_epoch(epoch=place[0], **named)
            finally:
                self.args.ignore_data_skip = ignored
            if self.control.should_training_stop:
                return
        if place is None:
            self.control.should_training_stop = True

    def _finalize_training(self, *arguments: Any, **named: Any) -> Any:
        if self._job is not None:
            self._job.end()
        return super()._finalize_training(*arguments, **named)

    # --- a step -----------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Begin the job's next step; its micro-batches are read by ``training_step``."""
        if self._job is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[no-any-return]
        self._job.begin_step()
        return [{}] * num_batches, None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute a micro-batch, in the step's last call all that are left; return the job's loss then."""
        if self._job is None or self._job.computing:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
        loss = self._job.compute(model, last=self.accelerator.sync_gradients)
        return torch.tensor(loss, device=self.args.device)

    def floating_point_ops(self, inputs: Any) -> float:
        """As Trainer's. For a step: of all replicas together, in its last call."""
        if self._job is None or self._job.computing:
            return float(super().floating_point_ops(inputs))
        return self._job.take_total("flos")

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self._job is None or self._job.computing:
            super()._track_num_input_tokens(inputs)
        else:
            self.state.num_input_tokens_seen += int(self._job.take_total("tokens"))

    def _load_rng_state(self, checkpoint: Any) -> None:
        # Fabric seeds every micro-batch.
        if self._job is None:
            super()._load_rng_state(checkpoint)

    # --- evaluation and files ---------------------------------------------------------------------------

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        """As Trainer.evaluate; the others wait for up to ``busy_s``."""
        with self._busy("evaluation"):
            return super().evaluate(*arguments, **named)  # type: ignore[no-any-return]

    def _evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        if self._job is not None and self._job.may_skip_evaluation():
            return {}
        return super()._evaluate(*arguments, **named)  # type: ignore[no-any-return]

    def is_world_process_zero(self) -> bool:
        """Whether this replica writes files and logs for all."""
        if self._job is not None and self._job.session is not None:
            return bool(self._job.session.is_writer)
        return bool(super().is_world_process_zero())

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer.save_model, on the replica that writes files."""
        if self.is_world_process_zero():
            super().save_model(output_dir, _internal_call)

    def _get_output_dir(self, trial: Any) -> str:
        if self._job is not None and self._job.staging is not None:
            return str(self._job.staging)
        return str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._job is None:
            super()._save_checkpoint(model, trial)
            return
        with self._busy("saving a checkpoint"):
            self._job.save(partial(super()._save_checkpoint, model, trial))

    def _busy(self, why: str) -> contextlib.AbstractContextManager[None]:
        if self._job is None or not self._job.runs or self._job.is_busy:
            return contextlib.nullcontext()
        return self._job.busy(why, self.busy_s)


class _TrainerJob:
    """The session of a FabricTrainer, and what its loop must know of the step under way."""

    def __init__(self, trainer: FabricTrainer, replicas: int) -> None:
        self.replicas = replicas
        self.steps_per_epoch = self.until = 0
        self.session: Any = None
        self.runs = False  # the session's loop is under way
        self.computing = False  # a micro-batch is being computed
        self.is_busy = False
        self.staging: Path | None = None  # where a checkpoint is written before it gets its name
        self.counters: TrainerCounters
        self._trainer = trainer
        self._source: Any = None
        self._feed: StepFeed
        self._began_at = 0
        self._begun: Step | None = None  # the step that the loop has begun
        self._weight = 0.0
        self._totals: dict[str, float] = {}

    # --- the beginning ----------------------------------------------------------------------------------

    def read_from(self, dataloader: Any) -> Any:
        """Read the data that the Trainer's DataLoader reads; return a description of an epoch."""
        self._source, args = dataloader, self._trainer.args
        if not hasattr(dataloader.dataset, "__len__"):
            return dataloader
        step = self._batch * self.replicas * args.gradient_accumulation_steps
        exact = len(dataloader.dataset) / step
        steps = max(1, math.floor(exact) if args.dataloader_drop_last else math.ceil(exact))
        return _Epoch(dataloader.dataset, steps * args.gradient_accumulation_steps)

    def begin(self) -> None:
        """Attach, and begin at the job's step. The optimizer and the scheduler exist by now."""
        trainer = self._trainer
        self._began_at = trainer.state.global_step
        self.counters = TrainerCounters(trainer, self._began_at)
        state = {"trainer": self.counters, "scheduler": trainer.lr_scheduler, **trainer.shared_state()}
        if trainer.accelerator.scaler is not None:
            state["scaler"] = trainer.accelerator.scaler
        optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        chosen = {"step": self._began_at, "buffers": default_buffers(trainer.model)}
        arguments = {**chosen, **trainer._attach_arguments}  # noqa: SLF001
        self.session = fabric.client.attach(trainer.model, optimizer, state=state, **arguments)
        args = trainer.args
        data = self.session.loader(
            self._source.dataset,
            global_batch_size=self._batch * args.gradient_accumulation_steps * self.replicas,
            micro_batch_size=self._batch,
            seed=args.data_seed if args.data_seed is not None else args.seed,
            collate_fn=self._source.collate_fn,
            num_workers=args.dataloader_num_workers,
        )
        trainer.accelerator.backward = self._backward
        self._feed = StepFeed(self.session, data, self.until)
        self._advance()
        self.runs = True

    def end(self) -> None:
        """Wait for the end of the other replicas' loops: the state here is the job's final state then."""
        self.counters.collect()
        self.session.close()
        self.runs = False

    @property
    def _batch(self) -> int:
        return int(self._trainer.args.train_batch_size)

    # --- steps ------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        trainer, step = self._trainer, self._feed.advance()
        if step is None:
            return
        state = trainer.state
        state.global_step = step.number
        state.epoch = step.number / self.steps_per_epoch
        writes = trainer.is_world_process_zero()
        if writes and not state.is_world_process_zero:
            self._show_progress()
        state.is_world_process_zero = writes

    def _show_progress(self) -> None:
        """Make the progress bar that a replica lacks which now becomes the writer."""
        trainer = self._trainer
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback) and callback.training_bar is None:
                trainer.state.is_world_process_zero = True
                callback.on_train_begin(trainer.args, trainer.state, trainer.control)

    def place(self) -> tuple[int, int] | None:
        """Return epoch and step in the epoch of the step that comes next; None where none does."""
        if self._feed.step is self._begun:
            self.counters.collect()
            self._advance()
        step = self._feed.step
        return divmod(step.number, self.steps_per_epoch) if step is not None else None

    def begin_step(self) -> None:
        """Begin the step that the Trainer's loop expects. Raises _MovedError where the job is elsewhere."""
        expected = self._trainer.state.global_step
        if self._feed.step is self._begun:
            self.counters.collect()
            self._advance()
        step = self._feed.step
        if step is None or step.number != expected:
            raise _MovedError
        self._begun, self._totals = step, {}

    def compute(self, model: Any, last: bool) -> float:
        """Compute the next micro-batch, with ``last`` all that are left; return the job's loss then."""
        if not last:
            batch = self._feed.micro_batch()
            if batch is not None:
                self._compute(model, batch)
            return 0.0
        for batch in self._feed.rest():
            self._compute(model, batch)
        assert self._begun is not None
        self._totals = dict(self._begun.metrics)
        weight = self._totals.get("weight", 0.0)
        return self._totals.get("loss", 0.0) / weight if weight else 0.0

    def take_total(self, name: str) -> float:
        """Return a sum of the whole step once, after its last micro-batch."""
        return self._totals.pop(name, 0.0)

    def _compute(self, model: Any, batch: Any) -> None:
        trainer = self._trainer
        items = trainer._get_num_items_in_batch([batch], trainer.args.device)  # noqa: SLF001
        self._weight = float(self._batch if items is None else items)
        if not self._weight:
            return  # labels without a token to predict: the mean over them does not exist
        trainer.current_gradient_accumulation_steps = 1
        seen = trainer.state.num_input_tokens_seen
        self.computing = True
        try:
            loss = trainer.training_step(model, batch, items)
            flos = trainer.floating_point_ops(batch)
            trainer._track_num_input_tokens(batch)  # noqa: SLF001
        finally:
            self.computing = False
        tokens, trainer.state.num_input_tokens_seen = trainer.state.num_input_tokens_seen - seen, seen
        self.session.metrics(loss=float(loss) * self._weight, weight=self._weight, flos=flos, tokens=tokens)

    def _backward(self, loss: torch.Tensor, **_: Any) -> None:
        """In place of the accelerator's backward: the gradient of a mean over ``weight`` tokens."""
        scaler = self._trainer.accelerator.scaler
        assert self._begun is not None
        self._begun.backward(scaler.scale(loss) if scaler is not None else loss, weight=self._weight)

    # --- evaluation and files ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def busy(self, why: str, at_most_s: float) -> Iterator[None]:
        """Tell the others what this replica does between two steps."""
        self.is_busy = True
        try:
            with self.session.busy(why, at_most_s):
                yield
        finally:
            self.is_busy = False

    def may_skip_evaluation(self) -> bool:
        """Whether this replica only catches up, and no state depends on the evaluation's figures."""
        trainer, step = self._trainer, self._begun
        catches_up = not step.contributed if step is not None else trainer.state.global_step > self._began_at
        takes_metrics = hasattr(trainer.lr_scheduler, "num_bad_epochs")
        return self.runs and catches_up and not takes_metrics and trainer.args.metric_for_best_model is None

    def save(self, write: Any) -> None:
        """Let the Trainer write a checkpoint on the one replica that writes, and then give it its name."""
        trainer = self._trainer
        folder = Path(trainer.args.output_dir)
        name = f"checkpoint-{trainer.state.global_step}"
        best = trainer.state.best_global_step
        best_folder = folder / f"checkpoint-{best}"
        if best and (best == trainer.state.global_step or best_folder.is_dir()):
            trainer.state.best_model_checkpoint = str(best_folder)
        if not self.session.is_writer:
            return
        self.staging = folder / f".writing-{self.session.settings.replica}"
        shutil.rmtree(self.staging, ignore_errors=True)
        try:
            write()
            if best:
                trainer.state.best_model_checkpoint = str(best_folder)
                trainer.state.save_to_json(str(self.staging / name / "trainer_state.json"))
            shutil.rmtree(folder / name, ignore_errors=True)
            (self.staging / name).rename(folder / name)
        finally:
            shutil.rmtree(self.staging, ignore_errors=True)
            self.staging = None
        rotate_checkpoints(
            output_dir=str(folder),
            save_total_limit=trainer.args.save_total_limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )


class _Epoch:
    """An epoch's data set and number of micro-batches, in the form of a DataLoader."""

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset = dataset
        self._length = length

    def __len__(self) -> int:
        return self._length


def _unread(micro_batches: int) -> Any:
    """Return a DataLoader of this length, which the Trainer's loop skips in and never reads."""
    numbers: Any = range(micro_batches)
    return torch.utils.data.DataLoader(numbers)


def _refuse(trainer: FabricTrainer, trial: Any) -> None:
    """Raise ConfigError for what cannot be kept equal on all replicas, before anything is changed."""
    args, name = trainer.args, str(getattr(trainer.args.optim, "value", trainer.args.optim))
    custom = type(trainer.optimizer) if trainer.optimizer is not None else None
    if trainer.optimizer_cls_and_kwargs is not None:
        custom = trainer.optimizer_cls_and_kwargs[0]
    kind = f"{custom.__module__}.{custom.__qualname__}" if custom is not None else name
    plugin = next((x for x in ("deepspeed", "fsdp") if getattr(trainer, f"is_{x}_enabled")), "")
    refusals = {
        f"{plugin} spreads a replica over several processes": bool(plugin),
        "a model that is sharded when it is loaded spans several processes": bool(
            getattr(trainer, "is_distributed_loading_by_transformers", False)
        ),
        f"a replica of {args.world_size} ranks": args.world_size > 1,
        f"DataParallel over {args.n_gpu} GPUs: give each replica one by CUDA_VISIBLE_DEVICES": args.n_gpu > 1,
        f'the optimizer {kind}: choose one such as optim="adamw_torch"': bool(unequal_optimizer(kind)),
        "auto_find_batch_size": args.auto_find_batch_size,
        f'train_sampling_strategy="{args.train_sampling_strategy}": choose "random"': (
            args.train_sampling_strategy != "random"
        ),
        "average_tokens_across_devices=False": not args.average_tokens_across_devices,
        "accelerator_config split_batches": args.accelerator_config.split_batches,
        "a hyperparameter search": trial is not None,
    }
    reason = next((why for why, holds in refusals.items() if holds), None)
    if reason is not None:
        raise ConfigError(f"FabricTrainer cannot keep replicas equal with {reason}")


__all__ = ["ConfigError", "FabricError", "FabricTrainer"]
