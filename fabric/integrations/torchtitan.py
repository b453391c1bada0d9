"""``TitanTrainer``: torchtitan's Trainer as one replica of a job. docs/adopt/torchtitan.md.

The Trainer keeps its loop, its meshes and its parallelisms: they span the ranks of one replica. One call of
``forward_backward_step`` computes all micro-batches that this replica has in the job's step. So ``.grad`` is
the job's average when the Trainer clips it. A replayed step has no micro-batches: it costs an optimizer step.
With FABRIC_DISABLE=1 every method is the Trainer's own.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar

import torch
import torchtitan.train
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import ConfigManager
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

import fabric.client
from fabric.client.data.loader import data_slot_of
from fabric.client.process.excepthook import install_excepthook
from fabric.errors import ConfigError, FabricError
from fabric.integrations.arguments import check_version
from fabric.integrations.training_data import DealtData, PositionStream, StepFeed
from fabric.runtime import config as settings_of
from fabric.runtime.config import parse_replicas

LEAST, TESTED = "0.3", "0.3.0"

# The inputs and the labels.
MicroBatch = tuple[dict[str, torch.Tensor], torch.Tensor]


class TitanTrainer(Trainer):  # type: ignore[misc]
    """As Trainer, whose world is one replica. ``training.global_batch_size`` is the batch of the whole job.

    Data, weights and gradients are those of one Trainer with ``replicas`` times as many data-parallel ranks.
    ``attach_arguments`` are arguments of ``fabric.client.attach``, for subclasses.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """As Trainer.Config."""

    busy_s = 3600.0  # how long the others wait for a validation or a checkpoint
    attach_arguments: ClassVar[Mapping[str, Any]] = {}
    _job: "_TitanJob | None" = None  # none with FABRIC_DISABLE=1

    def __init__(self, config: Any) -> None:
        install_excepthook()
        chosen = settings_of.settings()
        if not chosen.disable:
            check_version("torchtitan", LEAST, TESTED)
            _refuse(config)
        super().__init__(config)
        if not chosen.disable:
            self._job = _TitanJob(self, parse_replicas(chosen.replicas)[1])

    def train(self) -> None:
        """As Trainer.train. Returns when this replica has the job's final state."""
        super().train()
        if self._job is not None:
            self._job.session.close()

    def should_continue_training(self) -> bool:
        """Go on to the job's next step; false after the last."""
        return bool(super().should_continue_training()) if self._job is None else self._job.advance()

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
        """As Trainer's. The job's micro-batches are read by ``forward_backward_step``."""
        return self._job.unread() if self._job is not None else iter(super().batch_generator(data_iterable))

    def forward_backward_step(
        self, *, input_dict: Any, labels: Any, global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Compute all micro-batches of this replica in the step; return this rank's part of the loss."""
        if self._job is None:
            return super().forward_backward_step(  # type: ignore[no-any-return]
                input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
            )
        return self._job.compute(super().forward_backward_step)


def with_fabric(config: Any) -> TitanTrainer.Config:
    """Return a config of Trainer as one of TitanTrainer, with the same values. Raises ConfigError."""
    if isinstance(config, TitanTrainer.Config):
        return config
    if type(config) is not Trainer.Config:
        raise ConfigError(
            f"{type(config).__qualname__} is no config of torchtitan's own Trainer: let that "
            "trainer inherit from fabric.integrations.torchtitan.TitanTrainer"
        )
    return TitanTrainer.Config(**{x.name: getattr(config, x.name) for x in fields(config) if x.init})


def main() -> None:
    """Train as ``torchtitan.train`` does, with its command line."""

    class FabricConfigs(ConfigManager):  # type: ignore[misc]
        def parse_args(self, *arguments: Any, **named: Any) -> Any:
            return with_fabric(super().parse_args(*arguments, **named))

    torchtitan.train.ConfigManager = FabricConfigs
    torchtitan.train.main()


class _TitanJob:
    """The session of a TitanTrainer."""

    def __init__(self, trainer: TitanTrainer, replicas: int) -> None:
        self.session: Any = None
        self.tokens_seen = 0  # by all replicas, since the job began
        self._trainer = trainer
        self._feed: StepFeed
        dims = trainer.parallel_dims
        self._batch_mesh = dims.get_mesh("batch") if dims.dp_enabled else None
        self._loss_mesh = dims.get_optional_mesh("loss") if dims.dp_cp_enabled else None
        # The Trainer has divided the job's batch by that of its own ranks.
        given = trainer.config.training.global_batch_size > 0
        micro_batches = trainer.gradient_accumulation_steps if given else replicas
        if micro_batches % replicas:
            raise ConfigError(
                f"training.global_batch_size gives {micro_batches} batches for {replicas} replicas: give a "
                "multiple of local_batch_size, data-parallel ranks and replicas"
            )
        self._micro_batches = micro_batches
        self._data = DealtData(self._read_lane, replicas, micro_batches // replicas)
        trainer.gradient_accumulation_steps = 1  # of the Trainer's loop: a call computes all

    def state_dict(self) -> dict[str, Any]:
        """Return the Trainer's counters, which every replica has alike."""
        return {"tokens_seen": self.tokens_seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tokens_seen = int(state["tokens_seen"])

    # --- the course of a training -----------------------------------------------------------------------

    def advance(self) -> bool:
        """Go on to the job's next step; false after the last."""
        if self.session is None:
            self._begin()
        step = self._feed.advance()
        if step is None:
            return False
        self._trainer.step = step.number
        # A replica that catches up reads past the steps that it has missed, while nobody waits.
        self._data.read_past(self._lane, step.number)
        return True

    def _begin(self) -> None:
        """Attach, and begin at the job's step. The Trainer's own checkpoint is loaded by now."""
        trainer = self._trainer
        self.tokens_seen = trainer.ntokens_seen * self._ranks
        [model] = trainer.model_parts
        state = {"trainer": self, "schedulers": trainer.lr_schedulers}
        arguments = {"step": trainer.step, **trainer.attach_arguments}
        self.session = fabric.client.attach(model, list(trainer.optimizers), state=state, **arguments)
        data = self.session.loader(
            PositionStream(),
            global_batch_size=self._micro_batches,
            micro_batch_size=1,
            seed=0,
            collate_fn=self._data.micro_batch,
            policy="shrink",
        )
        self._feed = StepFeed(self.session, data, trainer.config.training.steps)
        trainer.checkpointer.save = partial(self._save, trainer.checkpointer.save)
        if trainer.config.validator.enable:
            trainer.validator.validate = partial(self._validate, trainer.validator.validate)

    @property
    def _ranks(self) -> int:
        return int(self._loss_mesh.size()) if self._loss_mesh is not None else 1

    @property
    def _lane(self) -> int:
        """The lane that this replica will most probably compute: that of the number in its id."""
        with contextlib.suppress(ConfigError):
            return data_slot_of(self.session.settings.replica, self._data.lanes, None)
        return 0

    # --- data -------------------------------------------------------------------------------------------

    def _read_lane(self, lane: int, begin: int) -> Iterator[MicroBatch]:
        """Read this rank's micro-batches of a replica, from number ``begin`` on."""
        trainer, config, mesh = self._trainer, self._trainer.config, self._batch_mesh
        size, rank = (mesh.size(), mesh.get_local_rank()) if mesh is not None else (1, 0)
        loader = config.dataloader.build(
            dp_world_size=size * self._data.lanes,
            dp_rank=lane * size + rank,
            tokenizer=trainer.tokenizer,
            seq_len=config.training.seq_len,
            local_batch_size=config.training.local_batch_size,
            snapshot_every_n_steps=None,
        )
        batches = iter(loader)
        for _ in range(begin):
            next(batches, None)
        counted = Trainer.batch_generator(trainer, batches)
        while True:
            try:
                yield next(counted)
            except DataloaderExhaustedError:
                raise FabricError(
                    f"the data of part {lane} ended in step {trainer.step}: give a data set without end"
                ) from None

    def unread(self) -> Iterator[MicroBatch]:
        """Yield batches in place of those of the Trainer's loader."""
        while True:
            yield {}, torch.zeros(1, dtype=torch.int64, device="cpu")

    # --- a step -----------------------------------------------------------------------------------------

    def compute(self, forward_backward: Any) -> torch.Tensor:
        """Compute all micro-batches of the step; return this rank's part of the job's loss."""
        step = self._feed.step
        assert step is not None
        for inputs, labels in self._feed.rest():
            step.add_weight(weight=self._compute(forward_backward, inputs, labels))
        loading = self._trainer.metrics_processor.data_loading_times
        if not loading:
            loading.append(0.0)  # the Trainer logs their mean, also in a replayed step
        sums, ranks = step.metrics, self._ranks
        self.tokens_seen += int(sums.get("tokens", 0.0))
        self._trainer.ntokens_seen = self.tokens_seen // ranks
        weight = sums.get("weight", 0.0)
        loss = sums.get("loss", 0.0) / weight if weight else 0.0
        return torch.tensor(loss / ranks, device=self._trainer.device)

    def _compute(self, forward_backward: Any, inputs: dict[str, Any], labels: torch.Tensor) -> float:
        """Add a micro-batch's sum over its tokens to ``.grad``; return the number of the tokens."""
        trainer = self._trainer
        labels = labels.to(trainer.device)
        inputs = {k: v.to(trainer.device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        unit = torch.ones((), dtype=torch.int64, device=trainer.device)
        loss = forward_backward(input_dict=inputs, labels=labels, global_valid_tokens=unit).detach()
        valid = (labels != IGNORE_INDEX).sum()
        weight = (
            dist_utils.dist_sum(valid, self._batch_mesh) if self._batch_mesh is not None else valid.item()
        )
        total = dist_utils.dist_sum(loss, self._loss_mesh) if self._loss_mesh is not None else loss.item()
        self.session.metrics(loss=total, weight=weight, tokens=labels.numel() * self._ranks)
        return float(weight)

    # --- evaluation and files ---------------------------------------------------------------------------

    def _validate(self, validate: Any, *arguments: Any, **named: Any) -> None:
        with self.session.busy("validation", self._trainer.busy_s):
            validate(*arguments, **named)

    def _save(self, save: Any, curr_step: int, last_step: bool = False) -> None:
        """Let the one replica that writes files save the Trainer's checkpoint."""
        chosen = self._trainer.config.checkpoint
        due = chosen.enable and (last_step or curr_step % chosen.interval == 0)
        busy = self.session.busy("saving a checkpoint", self._trainer.busy_s) if due else None
        with busy or contextlib.nullcontext():
            if self.session.is_writer:
                save(curr_step, last_step)


def _refuse(config: Any) -> None:
    """Raise ConfigError for what a replica of a job cannot do, before anything is built."""
    refusals = {
        f'comm.mode="{config.comm.mode}"': config.comm.mode != "default",
        "CUDA graphs: set training.disable_cuda_graphs": not config.training.disable_cuda_graphs,
        "a pipeline: leave parallelism.pipeline_parallel_degree at 1": (
            config.parallelism.pipeline_parallel_degree > 1
        ),
        "checkpoint.create_seed_checkpoint: run it with FABRIC_DISABLE=1": (
            config.checkpoint.create_seed_checkpoint
        ),
    }
    reason = next((why for why, holds in refusals.items() if holds), None)
    if reason is not None:
        raise ConfigError(f"TitanTrainer cannot train with {reason}")


__all__ = ["TitanTrainer", "main", "with_fabric"]

if __name__ == "__main__":
    main()
