"""``FabricAccelerator``: the Accelerator of accelerate, as one replica of a job. docs/adopt/accelerate.md.

The user's loop stays as it is. The training DataLoader that ``prepare`` returns yields the job's
micro-batches, and ``backward`` adds their gradients. The last ``backward`` of a step exchanges the gradients.
If a replica is lost, the loop gets a part of its micro-batches first. ``sync_gradients`` is false until the
exchange, so clipping, the optimizer and the scheduler do nothing, as in an accumulation. With
FABRIC_DISABLE=1 every method is the Accelerator's own.
"""

import atexit
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import send_to_device

import fabric.client
from fabric.client.data.loader import data_slot_of
from fabric.client.gradients.buffer_choices import default_buffers
from fabric.client.loop.step import Step
from fabric.client.process.excepthook import install_excepthook
from fabric.errors import ConfigError, FabricError
from fabric.integrations.one_process import one_process
from fabric.integrations.optimizers import unequal_optimizer
from fabric.integrations.step_feed import StepFeed
from fabric.integrations.versions import check_version
from fabric.runtime import config
from fabric.runtime.config import Settings, parse_replicas

LEAST, TESTED = "1.10.0", "1.15.0"
_ENDLESS = 1 << 40  # the step at which a loop ends that its script counts
_STEP_FILE = "fabric.json"  # beside the files of save_state


class FabricAccelerator(Accelerator):  # type: ignore[misc]
    """As Accelerator. ``fabric``: arguments of ``fabric.client.attach``, such as ``{"buffers": "ignore"}``.

    ``max_steps``: where the script counts its own steps up to a limit, that limit. The job's batch is that of
    the training DataLoader times the accumulation, on each of the replicas with which the job starts.
    """

    busy_s = 3600.0  # how long the others wait for a save
    _replica: "_AcceleratedReplica | None" = None  # none with FABRIC_DISABLE=1

    def __init__(
        self,
        *arguments: Any,
        fabric: Mapping[str, Any] | None = None,
        max_steps: int | None = None,
        seed: int = 0,
        **named: Any,
    ) -> None:
        install_excepthook()
        given = dict(fabric or {})
        names = {x.name for x in fields(Settings)}
        chosen = config.settings(**{k: v for k, v in given.items() if k in names})
        if chosen.disable:
            super().__init__(*arguments, **named)
            return
        check_version("accelerate", LEAST, TESTED)
        with one_process("FabricAccelerator"):
            super().__init__(*arguments, **named)
        _refuse(self)
        self._replica = _AcceleratedReplica(self, chosen, given, max_steps or _ENDLESS, seed)

    # --- what the script prepares -----------------------------------------------------------------------

    def prepare(self, *arguments: Any, device_placement: Any = None) -> Any:
        """As Accelerator.prepare. The shuffled DataLoader is the training's; the others stay whole."""
        if self._replica is not None:
            self._replica.check_prepared(arguments)
        return super().prepare(*arguments, device_placement=device_placement)

    def prepare_data_loader(self, data_loader: Any, *arguments: Any, **named: Any) -> Any:
        """As Accelerator.prepare_data_loader; the training's becomes the job's."""
        if self._replica is None:
            return super().prepare_data_loader(data_loader, *arguments, **named)
        if _is_shuffled(data_loader):
            return self._replica.take_loader(data_loader)
        self._replica.prepares = True
        try:
            return super().prepare_data_loader(data_loader, *arguments, **named)
        finally:
            self._replica.prepares = False

    def prepare_optimizer(self, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        """As Accelerator.prepare_optimizer; a step with a closure is refused."""
        prepared = super().prepare_optimizer(optimizer, *arguments, **named)
        if self._replica is not None:
            prepared.step = partial(_step_without_closure, prepared.step)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As Accelerator.prepare_scheduler: a step of the job is as many steps as the job has replicas."""
        prepared = super().prepare_scheduler(scheduler)
        if self._replica is None or isinstance(prepared, _JobScheduler):
            return prepared
        own = _JobScheduler(prepared, self._replica.replicas)
        self._schedulers[self._schedulers.index(prepared)] = own
        return own

    @property
    def num_processes(self) -> int:
        """The number of replicas with which the job starts."""
        if self._replica is None or self._replica.prepares:
            return int(super().num_processes)
        return self._replica.replicas

    @property
    def is_main_process(self) -> bool:
        """Whether this replica writes files and logs for all."""
        return self._replica.is_writer if self._replica is not None else bool(super().is_main_process)

    @property
    def is_last_process(self) -> bool:
        """As ``is_main_process``: one replica."""
        return self.is_main_process if self._replica is not None else bool(super().is_last_process)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As Accelerator's. The training DataLoader begins where the job is, whatever ``num_batches``."""
        if isinstance(dataloader, _JobDataLoader):
            return dataloader
        return super().skip_first_batches(dataloader, num_batches)

    # --- a micro-batch ----------------------------------------------------------------------------------

    def _do_sync(self) -> None:
        if self._replica is None or not self._replica.trains:
            super()._do_sync()

    def backward(self, loss: torch.Tensor, weight: float | None = None, **named: Any) -> None:
        """As Accelerator.backward. ``weight``: the tokens that the loss is a mean over (default: samples)."""
        if self._replica is None:
            super().backward(loss, **named)
        else:
            self._replica.backward(loss, weight)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """As Accelerator.clip_grad_norm_, once per step: an incomplete gradient is not clipped."""
        if self._replica is not None and not self.sync_gradients:
            return torch.zeros((), device=self.device)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """As Accelerator.clip_grad_value_, once per step."""
        if self._replica is None or self.sync_gradients:
            super().clip_grad_value_(parameters, clip_value)

    # --- files and trackers -----------------------------------------------------------------------------

    def init_trackers(self, project_name: str, *arguments: Any, **named: Any) -> None:
        """As Accelerator.init_trackers, at the first log of the replica that logs for all."""
        if self._replica is None:
            super().init_trackers(project_name, *arguments, **named)
        else:
            self._replica.trackers = ((project_name, *arguments), named)

    def log(self, values: Any, *arguments: Any, **named: Any) -> None:
        """As Accelerator.log, on one replica."""
        if self._replica is not None:
            if not self.is_main_process:
                return
            if self._replica.trackers is not None:
                (names, more), self._replica.trackers = self._replica.trackers, None
                super().init_trackers(*names, **more)
        super().log(values, *arguments, **named)

    def save(self, *arguments: Any, **named: Any) -> None:
        """As Accelerator.save, on one replica."""
        if self._replica is None or self.is_main_process:
            super().save(*arguments, **named)

    def save_model(self, *arguments: Any, **named: Any) -> Any:
        """As Accelerator.save_model, on one replica."""
        if self._replica is None or self.is_main_process:
            return super().save_model(*arguments, **named)
        return None

    def save_state(self, output_dir: str | None = None, *arguments: Any, **named: Any) -> Any:
        """As Accelerator.save_state, on one replica, which gives the folder its name when it is complete."""
        replica, named_by_script = self._replica, not self.project_configuration.automatic_checkpoint_naming
        if replica is None:
            return super().save_state(output_dir, *arguments, **named)
        if not replica.is_writer:
            self.project_configuration.iteration += 0 if named_by_script else 1
            return output_dir
        with replica.busy("saving a checkpoint"):
            if output_dir is None or not named_by_script:
                folder = Path(super().save_state(output_dir, *arguments, **named))
                replica.note_step(folder)
                return str(folder)
            final = Path(output_dir)
            staging = final.with_name(f".{final.name}-writing")
            shutil.rmtree(staging, ignore_errors=True)
            super().save_state(str(staging), *arguments, **named)
            replica.note_step(staging)
            shutil.rmtree(final, ignore_errors=True)
            staging.rename(final)
            return str(final)

    def load_state(self, input_dir: str | None = None, *arguments: Any, **named: Any) -> None:
        """As Accelerator.load_state. A new job begins at the checkpoint's step; a running job is joined."""
        super().load_state(input_dir, *arguments, **named)
        if self._replica is not None and input_dir is not None:
            self._replica.read_step(Path(input_dir))

    def end_training(self) -> None:
        """Wait for the end of the other replicas' loops, then end as Accelerator.end_training."""
        if self._replica is not None:
            self._replica.close()
        super().end_training()


class _AcceleratedReplica:
    """The session of a FabricAccelerator, and where its loop is."""

    def __init__(
        self,
        accelerator: FabricAccelerator,
        chosen: Settings,
        arguments: dict[str, Any],
        until: int,
        seed: int,
    ) -> None:
        self.replicas = parse_replicas(chosen.replicas)[1]
        self.data_slot = data_slot_of(chosen.replica, self.replicas, None)
        self.prepares = False  # accelerate prepares a DataLoader that every replica reads as a whole
        self.trains = False  # the loop computes a micro-batch of the training DataLoader
        self.trackers: Any = None  # arguments of init_trackers, until the first log
        self._accelerator = accelerator
        self._arguments = arguments
        self._until, self._seed = until, seed
        self._loader: _JobDataLoader | None = None
        self._feed: StepFeed | None = None
        self._session: Any = None
        self._step = 0  # step of the checkpoint that the script has loaded
        self._upcoming: Any = None  # the step's next micro-batch
        self._waits = False  # the loop has a micro-batch without a backward
        self._replays = False  # the micro-batch stands for a step whose gradient is there already
        self._completed: Step | None = None  # the newest step whose gradient is the average
        self._closed = self._loop_ended = False

    # --- the beginning ----------------------------------------------------------------------------------

    def check_prepared(self, arguments: tuple[Any, ...]) -> None:
        """Raise ConfigError for what cannot be kept equal, before accelerate prepares it."""
        accelerator = self._accelerator
        models = [x for x in arguments if isinstance(x, torch.nn.Module)]
        if len({*models, *accelerator._models}) > 1:  # noqa: SLF001
            raise ConfigError(
                "the script prepares two models, and FabricAccelerator exchanges the gradients of one: make "
                "them parts of one module"
            )
        for optimizer in (x for x in arguments if isinstance(x, torch.optim.Optimizer)):
            kind = unequal_optimizer(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}")
            if kind:
                raise ConfigError(f"FabricAccelerator cannot keep replicas equal with the optimizer {kind}")
        loaders = [x for x in arguments if isinstance(x, torch.utils.data.DataLoader) and _is_shuffled(x)]
        if len(loaders) + (self._loader is not None) > 1:
            raise ConfigError(
                "the script prepares two shuffled DataLoaders, and the job has the order of one: prepare the "
                "one that it trains on, and leave the others unshuffled"
            )

    def take_loader(self, data_loader: Any) -> "_JobDataLoader":
        """Return the job's DataLoader in place of the training's."""
        if data_loader.batch_size is None:
            raise ConfigError("FabricAccelerator needs a DataLoader with batch_size=, not batch_sampler=")
        step = data_loader.batch_size * self._accelerator.gradient_accumulation_steps * self.replicas
        exact = len(data_loader.dataset) / step
        steps = max(1, math.floor(exact) if data_loader.drop_last else math.ceil(exact))
        self._loader = _JobDataLoader(data_loader, self, steps)
        return self._loader

    def begin(self) -> StepFeed:
        """Attach what the script has prepared, at the first batch."""
        if self._feed is not None:
            return self._feed
        accelerator, loader = self._accelerator, self._loader
        assert loader is not None
        models, optimizers = accelerator._models, accelerator._optimizers  # noqa: SLF001
        if not models or not optimizers:
            raise ConfigError("accelerator.prepare got no model or no optimizer before the first batch")
        state = {f"scheduler.{i}": x for i, x in enumerate(accelerator._schedulers)}  # noqa: SLF001
        state |= {f"registered.{i}": x for i, x in enumerate(accelerator._custom_objects)}  # noqa: SLF001
        if accelerator.scaler is not None:
            state["scaler"] = accelerator.scaler
        model = accelerator.unwrap_model(models[0])
        self._session = fabric.client.attach(
            model,
            [x.optimizer for x in optimizers],
            state=state,
            **{"step": self._step, "buffers": default_buffers(model), **self._arguments},
        )
        atexit.register(self._close_at_exit)
        source = loader.source
        data = self._session.loader(
            source.dataset,
            global_batch_size=source.batch_size * accelerator.gradient_accumulation_steps * self.replicas,
            micro_batch_size=source.batch_size,
            seed=self._seed,
            collate_fn=source.collate_fn,
            num_workers=source.num_workers,
        )
        self._feed = StepFeed(self._session, data, self._until)
        self._feed.advance()
        return self._feed

    @property
    def first_pass(self) -> int:
        """The pass at which the script's loop begins: that of the checkpoint that it has loaded."""
        return self._step // self._loader.steps_per_pass if self._loader is not None else 0

    # --- micro-batches ----------------------------------------------------------------------------------

    def micro_batches(self, number: int, steps_per_pass: int) -> Iterator[Any]:
        """Yield what the loop computes in pass ``number``. A pass that the job has left behind is empty."""
        feed = self.begin()
        self._loop_ended = False
        while self._has_step(feed, number, steps_per_pass):
            yield from self._step_of_loop(feed)
        self._loop_ended = True

    def _has_step(self, feed: StepFeed, number: int, steps_per_pass: int) -> bool:
        """Go on to the next step, unless it is one of a later pass: the script may have no later pass."""
        step = feed.step
        if step is not None and step is self._completed:
            if (step.number + 1) // steps_per_pass > number:
                return False
            step = feed.advance()
        return step is not None and step.number // steps_per_pass <= number

    def _step_of_loop(self, feed: StepFeed) -> Iterator[Any]:
        assert self._loader is not None
        if self._upcoming is None:  # else the loop was left within a step
            self._upcoming = feed.micro_batch()
        is_replay, is_first = self._upcoming is None, True
        while is_replay or self._upcoming is not None:
            batch = self._loader.smallest_batch() if is_replay else self._upcoming
            # True in a step's first micro-batch, so that zero_grad at the top of the loop works.
            self._accelerator.gradient_state._set_sync_gradients(is_first and not is_replay)  # noqa: SLF001
            self.trains = self._waits = True
            self._replays = is_replay
            try:
                yield send_to_device(batch, self._accelerator.device)
            finally:
                self.trains = False
                self._accelerator.gradient_state._set_sync_gradients(True)  # noqa: SLF001
            if self._waits:
                raise FabricError(
                    "the loop asked for a batch without accelerator.backward(loss) for the last one: call it "
                    "once for each batch of the training DataLoader"
                )
            is_first = False
            if is_replay:
                return

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        """Add the micro-batch's gradient, and go on to the step's next one: after the last, exchange."""
        feed, scaler = self._feed, self._accelerator.scaler
        if feed is None or feed.step is None or not self.trains:
            raise FabricError(
                "accelerator.backward got the loss of a batch that is not of the job: give "
                "accelerator.prepare the training DataLoader, with shuffle=True"
            )
        if not self._waits:
            raise FabricError("accelerator.backward was called twice for one batch: add the losses up")
        self._waits = False
        if not self._replays:
            feed.step.backward(scaler.scale(loss) if scaler is not None else loss, weight)
            self._upcoming = feed.micro_batch()
        else:
            feed.session.handover.resume(feed.step.number)
        complete = self._replays or self._upcoming is None
        if complete:
            self._completed = feed.step
        self._accelerator.gradient_state._set_sync_gradients(complete)  # noqa: SLF001

    # --- files and the end ------------------------------------------------------------------------------

    @property
    def is_writer(self) -> bool:
        """Whether this replica writes for all; before the loop begins, the replica of data slot 0."""
        if self._session is not None:
            return bool(self._session.is_writer)
        return self.data_slot == 0

    def busy(self, why: str) -> Any:
        """Tell the others what this replica does."""
        return self._session.busy(why, self._accelerator.busy_s)

    def note_step(self, folder: Path) -> None:
        """Write the job's step beside a checkpoint of the Accelerator."""
        step = self._session.committed_step if self._session is not None else self._step
        (folder / _STEP_FILE).write_text(json.dumps({"step": step}) + "\n")

    def read_step(self, folder: Path) -> None:
        """Read the step of the checkpoint that the script has just loaded."""
        path = folder / _STEP_FILE
        if self._feed is not None:
            raise ConfigError(
                "accelerator.load_state was called after the first batch: load the state before it"
            )
        self._step = int(json.loads(path.read_text())["step"]) if path.exists() else 0

    def close(self) -> None:
        """Wait for the end of the other replicas' loops."""
        if self._session is not None and not self._closed:
            self._closed = True
            self._session.close()

    def _close_at_exit(self) -> None:
        # A script whose loop ran to its end may leave out end_training. Any other end is a death.
        reached = self._session is not None and self._session.committed_step >= self._until
        if self._loop_ended or reached:
            self.close()


class _JobDataLoader(torch.utils.data.DataLoader[Any]):
    """The training DataLoader of a job: its passes follow the job's steps."""

    def __init__(self, source: Any, replica: _AcceleratedReplica, steps_per_pass: int) -> None:
        super().__init__(source.dataset, source.batch_size, collate_fn=source.collate_fn)
        self.source, self._replica = source, replica
        self.steps_per_pass = steps_per_pass
        self._passes = 0

    def __len__(self) -> int:
        return self.steps_per_pass * int(self._replica._accelerator.gradient_accumulation_steps)  # noqa: SLF001

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        number = self._replica.first_pass + self._passes
        self._passes += 1
        return self._replica.micro_batches(number, self.steps_per_pass)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the order of the data follows the job's step."""

    def smallest_batch(self) -> Any:
        """Return the smallest batch that the loop may get, for a replayed step: its gradient is there."""
        size = self.source.batch_size if self.source.drop_last else 1
        return self.source.collate_fn([self.source.dataset[i] for i in range(size)])


class _JobScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """Steps as often per step of the job as accelerate does on that many processes."""

    def __init__(self, prepared: Any, replicas: int) -> None:
        super().__init__(
            prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, prepared.split_batches
        )
        self._replicas = replicas

    def step(self, *arguments: Any, **named: Any) -> None:
        """Step where the optimizer has stepped. Micro-batches leave no trace: their number differs."""
        scheduler = self.scheduler
        if not self.step_with_optimizer:
            scheduler.step(*arguments, **named)
            return
        if not self.gradient_state.sync_gradients or any(x.step_was_skipped for x in self.optimizers):
            return
        for _ in range(1 if self.split_batches else self._replicas):
            # OneCycle refuses a step beyond its last.
            if scheduler._step_count <= getattr(scheduler, "total_steps", math.inf):  # noqa: SLF001
                scheduler.step(*arguments, **named)


def _step_without_closure(step: Any, closure: Any = None) -> None:
    if closure is not None:
        raise FabricError(
            "optimizer.step got a closure, which computes gradients on one replica's own data: leave it out"
        )
    step()


def _is_shuffled(data_loader: Any) -> bool:
    return isinstance(getattr(data_loader, "sampler", None), torch.utils.data.RandomSampler)


def _refuse(accelerator: Any) -> None:
    """Raise ConfigError for a plug-in that cannot be kept equal."""
    kind = accelerator.distributed_type
    if kind != DistributedType.NO:
        raise ConfigError(
            f"FabricAccelerator is one process per replica, and accelerate runs {kind.value}: start each "
            "replica with fabric launch, without DeepSpeed, FSDP or several processes"
        )
    if accelerator.split_batches:
        raise ConfigError("FabricAccelerator cannot split batches: give the batch size of one replica")
