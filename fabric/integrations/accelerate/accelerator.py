"""The Accelerator of accelerate, as one replica of a job.

The user's loop stays as it is. The training DataLoader that ``prepare`` returns yields the job's
micro-batches, and ``backward`` adds their gradients. The last ``backward`` of a step exchanges the gradients.
If a replica is lost, the loop gets a part of its micro-batches first. ``sync_gradients`` is false until the
exchange, so clipping, the optimizer and the scheduler do nothing, as in an accumulation. With
FABRIC_DISABLE=1 every method is the Accelerator's own.
"""

import shutil
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator

from fabric.client.process.excepthook import install_excepthook
from fabric.errors import ConfigError, FabricError
from fabric.integrations.accelerate.arguments import check_arguments, check_plugins, refused_methods
from fabric.integrations.accelerate.replica import (
    ENDLESS,
    AcceleratedReplica,
    JobDataLoader,
    JobScheduler,
    one_process,
)
from fabric.integrations.arguments import Row, check_version, settings_among

LEAST, TESTED = "1.10.0", "1.15.0"


class FabricAccelerator(Accelerator):  # type: ignore[misc]
    """As Accelerator. ``fabric``: arguments of ``fabric.client.attach``, such as ``{"buffers": "ignore"}``.

    ``max_steps``: where the script counts its own steps up to a limit, that limit. The job's batch is that of
    the training DataLoader times the accumulation, on each of the replicas with which the job starts.
    """

    busy_s = 3600.0  # how long the others wait for a save
    _replica: "AcceleratedReplica | None" = None  # none with FABRIC_DISABLE=1
    _trackers: Any = None  # arguments of init_trackers, until the first log

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
        chosen = settings_among(given)
        if chosen.disable:
            super().__init__(*arguments, **named)
            return
        check_version("accelerate", LEAST, TESTED)
        check_arguments(arguments, named)
        with one_process("FabricAccelerator"):
            super().__init__(*arguments, **named)
        check_plugins(self)
        self._replica = AcceleratedReplica(self, chosen, given, max_steps or ENDLESS, seed)

    @property
    def gradient_accumulation_steps(self) -> int:
        """As Accelerator.gradient_accumulation_steps. Raises ConfigError where it is set in mid-training."""
        return int(super().gradient_accumulation_steps)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        has_begun = self._replica is not None and self._replica.has_begun
        if has_begun and steps != self.gradient_accumulation_steps:
            raise ConfigError(
                "the script sets accelerator.gradient_accumulation_steps after its first batch, and all "
                "steps of a job have one batch size: set it before"
            )
        Accelerator.gradient_accumulation_steps.fset(self, steps)

    # --- what the script prepares -----------------------------------------------------------------------

    def prepare(self, *arguments: Any, device_placement: Any = None) -> Any:
        """As Accelerator.prepare. Every replica reads the DataLoaders of evaluations whole."""
        if self._replica is not None:
            self._replica.check_prepared(arguments)
        return super().prepare(*arguments, device_placement=device_placement)

    def prepare_data_loader(self, data_loader: Any, *arguments: Any, **named: Any) -> Any:
        """As Accelerator.prepare_data_loader; the DataLoader of the training becomes the job's."""
        if self._replica is None:
            return super().prepare_data_loader(data_loader, *arguments, **named)
        if isinstance(data_loader, JobDataLoader):
            return data_loader
        self._replica.prepares = True
        try:
            complete = super().prepare_data_loader(data_loader, *arguments, **named)
        finally:
            self._replica.prepares = False
        own = JobDataLoader(data_loader, complete, self._replica)
        self._replica.loaders.append(own)
        self._dataloaders[self._dataloaders.index(complete)] = own
        return own

    def prepare_optimizer(self, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        """As Accelerator.prepare_optimizer; a step with a closure is refused."""
        prepared = super().prepare_optimizer(optimizer, *arguments, **named)
        if self._replica is not None:
            step = partial(_step, self._replica, prepared.step)
            # torch's schedulers take the function out of a method.
            prepared.step = MethodType(lambda _, closure=None: step(closure), prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As Accelerator.prepare_scheduler: a step of the job is as many steps as the job has replicas."""
        prepared = super().prepare_scheduler(scheduler)
        if self._replica is None or isinstance(prepared, JobScheduler):
            return prepared
        own = JobScheduler(prepared, self._replica)
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

    @property
    def process_index(self) -> int:
        """The number of this replica: its data slot."""
        if self._replica is None or self._replica.prepares:
            return int(super().process_index)
        return self._replica.data_slot

    def on_main_process(self, function: Any = None) -> Any:
        """As Accelerator.on_main_process: the function runs on the replica of ``is_main_process``."""
        if not isinstance(self, FabricAccelerator) or self._replica is None:
            return Accelerator.on_main_process(self, function)
        return self._on(lambda: self.is_main_process, function)

    def on_last_process(self, function: Any) -> Any:
        """As ``on_main_process``: one replica."""
        return super().on_last_process(function) if self._replica is None else self.on_main_process(function)

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """As Accelerator.on_process: the function runs on the replica with this data slot."""
        if not isinstance(self, FabricAccelerator) or self._replica is None:
            return Accelerator.on_process(self, function, process_index)
        return self._on(lambda: self.process_index == process_index, function)

    @staticmethod
    def _on(is_here: Callable[[], bool], function: Any) -> Any:
        if function is None:
            return partial(FabricAccelerator._on, is_here)

        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            return function(*arguments, **named) if is_here() else None

        return call

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As Accelerator's. The training DataLoader begins where the job is, whatever ``num_batches``."""
        if isinstance(dataloader, JobDataLoader):
            replica = self._replica
            assert replica is not None
            if replica.trains_on(dataloader):
                return dataloader
            dataloader = dataloader.complete
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
        if self._replica is not None and (self._replica.goes_over or not self.sync_gradients):
            return torch.zeros((), device=self.device)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """As Accelerator.clip_grad_value_, once per step."""
        if self._replica is None or (self.sync_gradients and not self._replica.goes_over):
            super().clip_grad_value_(parameters, clip_value)

    # --- figures ----------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """As Accelerator.gather, outside of the training: every replica has the whole."""
        if self._replica is not None:
            self._replica.check_figure("gather")
        return super().gather(tensor)

    def gather_for_metrics(self, input_data: Any, *arguments: Any, **named: Any) -> Any:
        """As ``gather``."""
        if self._replica is not None:
            self._replica.check_figure("gather_for_metrics")
        return super().gather_for_metrics(input_data, *arguments, **named)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As Accelerator.reduce, for a mean outside of the training: every replica has the whole."""
        if self._replica is not None:
            self._replica.check_figure("reduce")
            if reduction == "sum":
                raise ConfigError(
                    'accelerator.reduce with reduction="sum" would add what each replica has, and each '
                    "replica evaluates all data: use gather_for_metrics, or the mean"
                )
        return super().reduce(tensor, reduction, scale)

    def set_trigger(self) -> None:
        """As Accelerator.set_trigger. After the step's last backward it acts with the next step."""
        if self._replica is None:
            super().set_trigger()
        else:
            self._replica.triggers.set()

    def check_trigger(self) -> bool:
        """As Accelerator.check_trigger: all replicas see a trigger after the same step."""
        if self._replica is None:
            return bool(super().check_trigger())
        return not self._replica.goes_over and self._replica.triggers.check(self._replica.trains)

    # --- files and trackers -----------------------------------------------------------------------------

    def print(self, *arguments: Any, **named: Any) -> None:
        """As Accelerator.print, on the replica of ``is_main_process``."""
        if self._replica is None or self.is_main_process:
            super().print(*arguments, **named)

    def init_trackers(self, project_name: str, *arguments: Any, **named: Any) -> None:
        """As Accelerator.init_trackers, at the first log of the replica that logs for all."""
        if self._replica is None:
            super().init_trackers(project_name, *arguments, **named)
        else:
            self._trackers = ((project_name, *arguments), named)

    def log(self, values: Any, *arguments: Any, **named: Any) -> None:
        """As Accelerator.log, on one replica."""
        if self._replica is not None:
            if not self.is_main_process:
                return
            if self._trackers is not None:
                (names, more), self._trackers = self._trackers, None
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
        with replica.session.busy("saving a checkpoint", self.busy_s):
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


def _step(replica: AcceleratedReplica, step: Any, closure: Any = None) -> None:
    if closure is not None:
        raise FabricError(
            "optimizer.step got a closure, which computes gradients on one replica's own data: leave it out"
        )
    if replica.note_update():
        step()


def _refused(name: str, row: Row) -> Any:
    own = getattr(Accelerator, name)

    @wraps(own)
    def refuse(self: FabricAccelerator, *arguments: Any, **named: Any) -> Any:
        if self._replica is None:
            return own(self, *arguments, **named)
        raise ConfigError(f"FabricAccelerator refuses accelerator.{name}, because {row.words}")

    return refuse


for _name, _row in refused_methods().items():
    setattr(FabricAccelerator, _name, _refused(_name, _row))
