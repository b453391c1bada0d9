"""The data of a loop over ``session.steps``: the loaders of its calls, one after the other.

Each call has the steps from the end of the call before to its own ``until``. A loader's order begins at the
loader's first step, and goes on where the last call with this loader ended. So all replicas find a step's
samples without a word between them, also a newcomer that calls without a step.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from fabric.client.data.loader import Loader, describe_sharing
from fabric.client.loop.loop_source import refuse_memory
from fabric.errors import ConfigError
from fabric.model import DataPlan

# Hooks apply the factor around the optimizer's own step and restore the rate exactly, so schedulers never see
# it. The factor depends on the committed contributions alone, so a replayed step has the same factor.


class PresenceFactor:
    """Set ``factor`` before the user's update code runs; optimizers scale by it in their ``step``."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.factor = 1.0
        self._kept: dict[int, list[Any]] = {}
        for optimizer in optimizers:
            if not hasattr(optimizer, "register_step_pre_hook"):
                raise ConfigError(
                    f"scale_lr needs a torch.optim.Optimizer, not a {type(optimizer).__name__}: scale its "
                    "learning rate in your loop"
                )
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    def present(self, counted: int, total: int) -> None:
        """Set the factor of a step whose gradient has ``counted`` of ``total`` micro-batches."""
        self.factor = math.sqrt(counted / total)

    def _before(self, optimizer: Any, _arguments: object, _options: object) -> None:
        if self.factor != 1.0:
            self._kept[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self.factor

    def _after(self, optimizer: Any, _arguments: object, _options: object) -> None:
        for group, rate in zip(optimizer.param_groups, self._kept.pop(id(optimizer), ()), strict=False):
            group["lr"] = rate


class StepData:
    """The loader of the present call of ``session.steps``, and the steps of this call."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        """``objects``: the shared state, whose optimizers ``scale_lr`` scales."""
        self._optimizers = [x for name, x in objects.items() if name.startswith("optimizer")]
        self._presence: PresenceFactor | None = None
        self.begin = 0
        self.until = 0
        self.first_step = 0  # the step at which the loader's order begins
        self._loaders: dict[int, Loader] = {}  # all loaders by identity; their threads end with the session
        self._made: dict[int, int] = {}  # for each of them, the number of steps in the calls so far
        self.loader: Loader  # of the present call

    def enter(self, loader: Loader, until: int, first_step: int | None) -> None:
        """Begin a call. Raises ConfigError where it shares the work out in another way than the calls before.

        ``first_step``: where the loader's order begins; None: where the calls so far say.
        """
        for before in self._loaders.values():
            if (before.sharing, before.slice) != (loader.sharing, loader.slice):
                raise ConfigError(
                    "session.steps got a loader that shares its micro-batches out in another way than the "
                    "loader before: give all loaders of a run the same policy, redundancy, on_loss, "
                    "on_poison and mesh"
                )
        self.begin, self.until = self.until, max(until, self.until)
        key, length = id(loader), self.until - self.begin
        self.first_step = self.begin - self._made.get(key, 0) if first_step is None else first_step
        if self.first_step > self.begin:
            raise ConfigError(
                f"session.steps has first_step={self.first_step}, and this call has the steps from "
                f"{self.begin} on: give the step at which this loader's data began"
            )
        if key not in self._loaders:
            refuse_memory(loader.fetcher.collate, getattr(loader.fetcher, "dataset", None))
        self._loaders[key] = self.loader = loader
        if loader.scale_lr and self._presence is None:
            self._presence = PresenceFactor(self._optimizers)
        self._made[key] = self.begin - self.first_step + length

    def describe(self) -> dict[str, Any]:
        """Return the settings of the present call that determine its samples, for the journal."""
        settings = {**self.loader.plan.describe(), **describe_sharing(self.loader.sharing)}
        return {**settings, "first_step": self.first_step} if self.first_step else settings

    def plan(self, more: Mapping[str, Any]) -> DataPlan:
        """Return the data plan of the present call. ``more``: further settings that members compare."""
        described = described_as({**self.describe(), **more})
        return DataPlan(self.loader.plan.micro_batches, described, self.begin, self.until)

    # --- by the job's steps, which the loader counts from its first one ------------------------------------

    def samples(self, step: int, micro_batch: int) -> list[int]:
        """Return the samples of one micro-batch."""
        return self.loader.samples(step - self.first_step, micro_batch)

    def present(self, step: int, counted: Iterable[int]) -> None:
        """Scale the learning rates for the micro-batches that a gradient has, where ``scale_lr`` asks.

        Micro-batches without a sample are not missed.
        """
        if self._presence is not None:
            plan = self.loader.plan
            filled = set(plan.with_samples(step - self.first_step, range(plan.micro_batches)))
            present = filled & set(counted) if self.loader.scale_lr else filled
            self._presence.present(len(present), len(filled))

    def close(self) -> None:
        """End the reading threads of all loaders."""
        for loader in self._loaders.values():
            loader.close()


def described_as(settings: Mapping[str, Any]) -> str:
    """Return settings as the words that members compare: "name value name value ..."."""
    return " ".join(f"{name} {value}" for name, value in settings.items())
