"""One step as the user's loop sees it: micro-batches to compute, then the averaged gradient.

In the weight of its gradient each micro-batch counts once, however often backward runs for it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fabric.client.data.loader import Loader, describe_sharing
from fabric.client.loop.data_content import content_digest
from fabric.client.loop.loop_source import refuse_memory
from fabric.errors import ConfigError, FabricError
from fabric.health.work import WorkAmount
from fabric.model import DataPlan

if TYPE_CHECKING:
    from fabric.client.loop.session import Session, SoloSession

# JSON has no infinity and no NaN, so sums of metrics travel as finite numbers only. A value that is not
# finite travels as a count, ``nan:loss``, which adds up over members like any other sum. When the user reads
# the metric, the count becomes infinity or NaN again.
_MARKS = {"nan:": math.nan, "inf:": math.inf, "-inf:": -math.inf}


def finite(metrics: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Return ``metrics`` as (name, finite number) by name, with counts for values that are not finite."""
    sums: dict[str, float] = {}
    for name, value in metrics.items():
        sums[name] = value if math.isfinite(value) else 0.0
        if not math.isfinite(value):
            mark = "nan:" if math.isnan(value) else "inf:" if value > 0 else "-inf:"
            sums[mark + name] = 1.0
    return tuple(sorted(sums.items()))


def restored(metrics: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sums that floating point would have given."""
    sums = dict(metrics)
    for mark, value in _MARKS.items():
        for marked in [name for name in sums if name.startswith(mark)]:
            count, name = sums.pop(marked), marked.removeprefix(mark)
            sums[name] = sums.get(name, 0.0) + (value if count else 0.0)
    return sums


class StepWeight:
    """Sums the weights of a step's micro-batches, and keeps their declared work."""

    def __init__(self) -> None:
        self.samples = 0  # number of samples of the micro-batch under way
        self._share: float | None = None  # weight of the micro-batch under way; None: not said yet
        self.so_far = 0.0  # sum of the weights since the last ``take``
        self._before = 0.0  # sum of the weights before that
        self._is_said = False  # whether any micro-batch since then has said its weight
        self._work: WorkAmount | None = None  # declared work of the micro-batch under way

    def begin(self, samples: int) -> None:
        self.samples, self._share, self._work = samples, None, None

    def add(self, weight: float | None, work: float | Iterable[float] | None) -> float:
        """Count the micro-batch once, and return its weight. Raises FabricError.

        ``weight`` None: as said before in this micro-batch, else its number of samples.
        """
        if work is not None:
            self._work = _amount(work, self.samples)
        if weight is None:
            share = float(self.samples) if self._share is None else self._share
        else:
            share = float(weight)
        if not 0 <= share < math.inf:
            raise FabricError(f"the weight of a micro-batch must be a number from 0 on, not {share:g}")
        if self._share is None:
            self._share, self._is_said = share, True
            self.so_far += share
        elif share != self._share:
            raise FabricError(
                f"one micro-batch has the weights {self._share:g} and {share:g}: give all backward passes of "
                "a micro-batch the same weight, for their gradients are added before the weight counts"
            )
        return share

    def take(self, parameters: Iterable[torch.nn.Parameter]) -> float:
        """Return the weight since the last call. Raises FabricError for a gradient without any weight."""
        order, has_weight = self.so_far, self._is_said
        left = (p.grad for p in parameters if not has_weight and not self._before)
        if any(gradient is not None and bool((gradient != 0).any()) for gradient in left):
            raise FabricError(
                "the micro-batches of this step have left a gradient and no weight: call step.backward(loss) "
                "in place of loss.backward(), or step.add_weight() after it"
            )
        self._before += order
        self.so_far, self._is_said = 0.0, False
        return order

    def take_work(self, samples: int) -> WorkAmount:
        """Return the work of the micro-batch that has just ended: the declared work, else its ``samples``."""
        declared, self._work = self._work, None
        return declared or WorkAmount(float(samples), 0.0, float(samples))


def _amount(work: float | Iterable[float], samples: int) -> WorkAmount:
    """Convert declared work, which is the lengths of documents or one number. Raises FabricError."""
    if isinstance(work, Iterable) and getattr(work, "ndim", None) != 0:
        amount = WorkAmount.of_documents([float(length) for length in work], float(samples))
    else:
        amount = WorkAmount(float(work), 0.0, float(samples))  # type: ignore[arg-type]
    if not amount.is_valid:
        raise FabricError(
            "the work of a micro-batch is negative or no number: give its documents' lengths, or a count"
        )
    return amount


class Step:
    """Iterate it to get micro-batches; when the iteration ends, ``.grad`` is the average over the job.

    The fields have their final values when the iteration has ended.
    """

    def __init__(self, session: "Session | SoloSession", number: int) -> None:
        self.number = number  # the committed step before this step's update; a recovery may raise this number
        self.contributed = False  # this replica's gradient is in the average; false in a replay
        self.replayed = False  # the gradient is a published one, and this replica still catches up
        self.skipped = False  # the step has no update: every ``.grad`` is None
        self.metrics: dict[str, float] = {}  # sums over the whole global batch
        self.done = False
        self.weight = StepWeight()
        self._session = session

    def __iter__(self) -> Iterator[Any]:
        if self.done:
            raise FabricError(f"step {self.number} is committed already: iterate each step once")
        return self._session.run_step(self)

    def check_ended(self) -> None:
        """Raise FabricError where the loop has left this step."""
        if not self.done:
            raise FabricError(
                f"the loop left step {self.number} before its micro-batches ended: iterate `for batch in "
                "step` to its end, the exchange happens there"
            )

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | None = None,
        work: float | Iterable[float] | None = None,
        **options: Any,
    ) -> None:
        """Add this micro-batch's gradient: ``loss.backward()`` scaled by ``weight``.

        ``loss`` is a mean over the micro-batch. ``weight``: the number of samples (the default) or tokens
        that the mean is over; with weight 0 nothing is added. Several losses of one micro-batch may each have
        their call: their gradients are added, and the micro-batch counts once. ``work`` predicts the
        micro-batch's time, so that a long micro-batch does not make the replica look slow: the lengths of its
        packed documents, or a number (default: samples). ``options``: as for ``torch.Tensor.backward``.
        """
        before = self.weight.so_far
        share = self.add_weight(weight, work)
        if not share and self._session.layout.ranks == 1:
            return  # the loss may be 0/0; the ranks of one replica all go through the backward pass
        run = partial((loss * share).backward, **options)
        self._session.run_backward(self.number, self.weight.so_far - before, run)

    def add_weight(self, weight: float | None = None, work: float | Iterable[float] | None = None) -> float:
        """Count a gradient that other code (such as a pipeline schedule) has added; return its weight.

        The gradient must be scaled by ``weight`` (default: the micro-batch's number of samples). ``work``: as
        for ``backward``.
        """
        return self.weight.add(weight, work)


class PresenceFactor:
    """Set ``factor`` before the user's update code runs; optimizers scale by it in their ``step``.

    Hooks apply the factor around the optimizer's own step and restore the rate exactly, so schedulers never
    see it. The factor depends on the committed contributions alone, so a replayed step has the same factor.
    """

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
    """The loader of the present call of ``session.steps``, and the steps of this call.

    Each call has the steps from the end of the call before to its own ``until``. A loader's order begins at
    the loader's first step, and goes on where the last call with this loader ended. So all replicas find a
    step's samples without a word between them, also a newcomer that calls without a step.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        """``objects``: the shared state, whose optimizers ``scale_lr`` scales."""
        self._optimizers = [x for name, x in objects.items() if name.startswith("optimizer")]
        self._presence: PresenceFactor | None = None
        self.begin = 0
        self.until = 0
        self.first_step = 0  # the step at which the loader's order begins
        self._loaders: dict[int, Loader] = {}  # all loaders by identity; their threads end with the session
        self._made: dict[int, int] = {}  # for each of them, the number of steps in the calls so far
        self._content = (-1, "")  # the first loader's key, and a digest of some of its samples
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
            refuse_memory(loader.fetcher.collate, None if loader.plan.is_stream else loader.fetcher.dataset)
        if not self._loaders and not (loader.plan.is_stream or loader.sharing.readers):
            # Later data sets may have gone other ways in a replica that joins.
            self._content = key, content_digest(loader.fetcher.dataset)
        self._loaders[key] = self.loader = loader
        if loader.scale_lr and self._presence is None:
            self._presence = PresenceFactor(self._optimizers)
        self._made[key] = self.begin - self.first_step + length

    def describe(self) -> dict[str, Any]:
        """Return the settings of the present call that determine its samples, for the journal."""
        settings = {**self.loader.plan.describe(), **describe_sharing(self.loader.sharing)}
        settings |= {"first_step": self.first_step} if self.first_step else {}
        key, content = self._content
        return settings | ({"content": content} if content and key == id(self.loader) else {})

    def plan(self, more: Mapping[str, Any]) -> DataPlan:
        """Return the data plan of the present call. ``more``: further settings that members compare."""
        described = described_as({**self.describe(), **more})
        return DataPlan(self.loader.plan.micro_batches, described, self.begin, self.until)

    # --- by the job's steps, which the loader counts from its first one ------------------------------------

    def samples(self, step: int, micro_batch: int) -> list[int]:
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
        for loader in self._loaders.values():
            loader.close()


def described_as(settings: Mapping[str, Any]) -> str:
    """Return settings as the words that members compare: "name value name value ..."."""
    return " ".join(f"{name} {value}" for name, value in settings.items())
