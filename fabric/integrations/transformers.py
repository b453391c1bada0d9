"""``FabricTrainer``: the Trainer of transformers, as one replica of a job. docs/adopt/transformers.md.

The Trainer keeps its loop. ``FabricTrainer`` gives it the job's micro-batches in place of those of its
DataLoader. The last ``training_step`` of an accumulation computes all micro-batches that are left, those of a
lost replica included. So ``.grad`` is the job's average when the Trainer clips it. A replayed step has no
micro-batches: it costs an optimizer step. With FABRIC_DISABLE=1 every method is the Trainer's own.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints

from fabric.client.process.excepthook import install_excepthook
from fabric.errors import ConfigError, FabricError
from fabric.integrations.accelerate.replica import one_process
from fabric.integrations.arguments import check_version, settings_among
from fabric.integrations.huggingface.arguments import refuse
from fabric.integrations.huggingface.job import MovedError, StoppedError, TrainerJob
from fabric.runtime.config import parse_replicas


class CheckpointFiles:
    """The checkpoint folders of ``trainer``: one replica writes them, under a temporary name first."""

    def __init__(self, trainer: Any) -> None:
        self.staging: Path | None = None  # where a checkpoint is written before it gets its name
        self._trainer = trainer
        self._folder = Path(trainer.args.output_dir)

    def save(self, write: Callable[[], None], session: Any) -> None:
        """Let the Trainer write a checkpoint on the one replica that writes, and then give it its name."""
        trainer, folder = self._trainer, self._folder
        name = f"checkpoint-{trainer.state.global_step}"
        best = trainer.state.best_global_step
        best_folder = folder / f"checkpoint-{best}"
        if best and (best == trainer.state.global_step or best_folder.is_dir()):
            trainer.state.best_model_checkpoint = str(best_folder)
        if not session.is_writer:
            return
        if session.loads:
            self._complete_history()
        self.staging = folder / f".writing-{session.settings.replica}"
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

    def _complete_history(self) -> None:
        """Take what was logged before this replica joined from the newest checkpoint of another writer."""
        history = self._trainer.state.log_history
        now = self._trainer.state.global_step
        first = min((entry["step"] for entry in history), default=now)
        names = [x.name[11:] for x in self._folder.glob("checkpoint-*")]
        for step in sorted((int(x) for x in names if x.isdigit() and int(x) < now), reverse=True):
            path = self._folder / f"checkpoint-{step}/trainer_state.json"
            with contextlib.suppress(OSError, ValueError, KeyError):
                earlier = json.loads(path.read_text())["log_history"]
                history[:0] = [entry for entry in earlier if entry["step"] < first]
                return

    @contextlib.contextmanager
    def at_the_end(self, is_writer: bool) -> Iterator[None]:
        """Let the Trainer end: it loads the best model on all replicas, and deletes on one."""
        trainer = self._trainer
        args, best = trainer.args, trainer.state.best_global_step
        kept = args.save_total_limit
        if args.load_best_model_at_end and best:
            folder = self._folder / f"checkpoint-{best}"
            if folder.is_dir():
                trainer.state.best_model_checkpoint = str(folder)
            elif not is_writer:
                raise FabricError(
                    f"load_best_model_at_end: this replica has no {folder}, which another replica wrote: "
                    "give all replicas one output_dir that they share"
                )
        if not is_writer:
            args.save_total_limit = None
        try:
            yield
        finally:
            args.save_total_limit = kept


LEAST, TESTED = "5.10.1", "5.23.0"


class FabricTrainer(Trainer):  # type: ignore[misc]
    """As Trainer. ``fabric``: arguments of ``fabric.client.attach``, such as ``{"buffers": "average"}``.

    The job's batch is that of ``per_device_train_batch_size`` and ``gradient_accumulation_steps`` on each of
    the replicas with which the job starts. Every loss is weighed by its tokens, as Trainer does across
    devices. Every replica evaluates, and one replica writes files.
    """

    control: Any  # the Trainer's TrainerControl
    busy_s = 3600.0  # how long the others wait for an evaluation or a save
    _job: "TrainerJob | None" = None  # none with FABRIC_DISABLE=1, and before train()

    def __init__(self, *arguments: Any, fabric: Mapping[str, Any] | None = None, **named: Any) -> None:
        self._attach_arguments = dict(fabric or {})
        if settings_among(self._attach_arguments).disable:
            super().__init__(*arguments, **named)
        else:
            with one_process("FabricTrainer"):
                args = arguments[1] if len(arguments) > 1 else named.get("args")
                if args is not None and not args.accelerator_config.use_configured_state:
                    # Let it look for the device again: it may have seen a launcher's process group.
                    vars(args).pop("_setup_devices", None)
                    args.device  # noqa: B018
                super().__init__(*arguments, **named)
        self._files = CheckpointFiles(self)

    def shared_state(self) -> dict[str, Any]:
        """Return further objects of the shared state, such as a moving average. For subclasses."""
        return {}

    # --- the course of a training -----------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **named: Any) -> Any:
        """As Trainer.train. A new job begins at ``resume_from_checkpoint``; a running job is joined."""
        install_excepthook()
        chosen = settings_among(self._attach_arguments)
        if not chosen.disable:
            if self._job is not None:
                raise ConfigError("FabricTrainer.train runs once in a process: start another process")
            check_version("transformers", LEAST, TESTED)
            refuse(self, FabricTrainer, bool(resume_from_checkpoint), trial)
            self._job = TrainerJob(self, parse_replicas(chosen.replicas)[1])
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
            self._job.plan(values[1], values[6])
        return values

    def _get_train_sampler(self, *arguments: Any, **named: Any) -> Any:
        """As Trainer's, where one process computes the whole step: a sampler may form groups of that size."""
        accumulation, replicas = self.args.gradient_accumulation_steps, self._job.replicas if self._job else 1
        self.args.gradient_accumulation_steps = accumulation * replicas
        try:
            return super()._get_train_sampler(*arguments, **named)
        finally:
            self.args.gradient_accumulation_steps = accumulation

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
        # Where a callback ends the training, one more step follows, in whichever epoch. It has no update.
        while (place := self._job.place()) is not None and (place[0] <= epoch or self._job.wants_stop):
            # The Trainer's way to begin in mid-epoch is that of a resumed training.
            within = place[1] * self.args.gradient_accumulation_steps
            named |= {"steps_trained_in_current_epoch": within, "epochs_trained": place[0]}
            named |= {"resume_from_checkpoint": "the job" if within else None}
            # The Trainer's loop skips in a DataLoader of this length, and never reads it.
            numbers: Any = range(named["steps_in_epoch"])
            named["train_dataloader"] = torch.utils.data.DataLoader(numbers)
            ignored, self.args.ignore_data_skip = self.args.ignore_data_skip, False
            try:
                with contextlib.suppress(MovedError):
                    super()._run_epoch(epoch=place[0], **named)
            except StoppedError:
                place = None
                self._end_epoch(named)
                break
            finally:
                self.args.ignore_data_skip = ignored
        if place is None:
            self.control.should_training_stop = True

    def _end_epoch(self, named: Mapping[str, Any]) -> None:
        """End an epoch in which a callback has ended the training, after its first step or a later one."""
        assert self._job is not None
        if self.state.global_step % self._job.epochs.steps:
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            ending = {"tr_loss": self._tr_loss, "grad_norm": None, "epoch": int(self.state.epoch or 0)}
            ending |= {name: named[name] for name in ("model", "trial", "ignore_keys_for_eval", "start_time")}
            self._maybe_log_save_evaluate(**ending)

    def _maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> None:
        super()._maybe_log_save_evaluate(*arguments, **named)
        if self._job is not None:
            self._job.look_at_control()

    def _finalize_training(self, *arguments: Any, **named: Any) -> Any:
        if self._job is None:
            return super()._finalize_training(*arguments, **named)
        is_writer = self.is_world_process_zero()
        self._job.end()
        with self._files.at_the_end(is_writer):
            return super()._finalize_training(*arguments, **named)

    # --- a step -----------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Begin the job's next step; its micro-batches are read by ``training_step``."""
        if self._job is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[no-any-return]
        self._job.begin_step()
        return [{}] * num_batches, None

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
        if self._files.staging is not None:
            return str(self._files.staging)
        return str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._job is None:
            super()._save_checkpoint(model, trial)
            return
        with self._busy("saving a checkpoint"):
            self._files.save(partial(super()._save_checkpoint, model, trial), self._job.session)

    @contextlib.contextmanager
    def _busy(self, why: str) -> Iterator[None]:
        """Tell the others what this replica does between two steps, unless it has told them already."""
        job = self._job
        if job is None or not job.runs or job.is_busy:
            yield
            return
        job.is_busy = True
        try:
            with job.session.busy(why, self.busy_s):
                yield
        finally:
            job.is_busy = False


__all__ = ["ConfigError", "FabricError", "FabricTrainer"]
