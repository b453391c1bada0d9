"""FABRIC_DISABLE=1: the same loop and the same arithmetic, with one member and without any service."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fabric.ckpt_server.state.training_state import capture
from fabric.client.collectives.session_collectives import SessionCollectives, SoloCollectives
from fabric.client.data.loader import DataReader, Loader, SampleSlice, make_loader, parse_options
from fabric.client.data.randomness import UpdateRandomness, seed_everything
from fabric.client.data.sampler import StepSampler
from fabric.client.gradients.bucket_stream import StaleGradients
from fabric.client.loop.local_state import optimizers_in
from fabric.client.loop.loop_source import check_source
from fabric.client.loop.step import StepWeight, drop_gradients
from fabric.client.loop.step_data import StepData
from fabric.client.process.rank_group import RankGroup
from fabric.errors import FabricError
from fabric.protocol.messages.rank_messages import replica_share
from fabric.runtime.config import Settings
from fabric.runtime.rank_layout import RankLayout

_ALONE = Settings(disable=True)


class SoloStep:
    """As Step: iterate it, then ``.grad`` is the average over the global batch."""

    def __init__(self, session: "SoloSession", number: int, data: StepData) -> None:
        self.number = number
        self.contributed = True
        self.replayed = False
        self.skipped = False
        self.metrics: dict[str, float] = {}
        self.done = False
        self._session = session
        self._data = data
        self.weight = StepWeight()

    def __iter__(self) -> Iterator[Any]:
        loader, at = self._data.loader, self.number - self._data.first_step
        plan, part = loader.plan, loader.slice
        filled = plan.with_samples(at, range(plan.micro_batches))
        loader.read_ahead(at, filled)
        stale = self._session.stale
        for number, micro_batch in enumerate(filled):
            batch = loader.fetch(at, micro_batch)
            self.weight.begin(loader.count(at, micro_batch))
            seed_everything(plan.seed, self.number, micro_batch)
            with stale.micro_batch(number == 0, len(filled) == 1):
                yield batch
        weight = self.weight.take(self._session.parameters)
        self._session.randomness.begin(self.number)
        self.skipped = self._session.average(weight, part.index) or self._session.skips()
        self.metrics, self.done = self._session.take_metrics(), True
        self._session.committed_step += 1

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | None = None,
        work: float | Iterable[float] | None = None,
        **options: Any,
    ) -> None:
        """As Step.backward."""
        self._session.stale.begin(self.number)
        share = self.add_weight(weight, work)
        if share or self._session.layout.ranks > 1:
            (loss * share).backward(**options)  # type: ignore[no-untyped-call]
        self._session.stale.added()

    def add_weight(self, weight: float | None = None, work: float | Iterable[float] | None = None) -> float:
        """As Step.add_weight."""
        return self.weight.add(weight, work)


class SoloSession(SessionCollectives):
    """As Session, alone."""

    epoch = 0
    members: tuple[str, ...] = ()
    is_writer = True
    _sampler: StepSampler | None = None

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        objects: Mapping[str, object],
        on_nan: str = "propagate",
        replicas: int = 1,
        group: RankGroup | None = None,
        step: int = 0,
        layout: RankLayout | None = None,
    ) -> None:
        self._replicas = replicas
        self._group = group
        self.layout = layout or RankLayout(ranks=1)
        self.committed_step = step
        self._on_nan = on_nan
        self._objects = objects
        self._data = StepData({})
        self.parameters = parameters
        self._metrics: dict[str, float] = {}
        self.collectives = SoloCollectives("replica0")
        optimizers = optimizers_in(objects.values())
        self.randomness, self.stale = UpdateRandomness(optimizers), StaleGradients(optimizers)

    def digest(self) -> str:
        return capture(self._objects, self.committed_step).digest()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """As Session.batches."""
        while True:
            yield from loader

    def loader(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int = 0,
        collate_fn: Callable[[Sequence[Any]], Any] | None = None,
        num_workers: int = 0,
        mesh: Any = None,
        **options: Any,
    ) -> Loader:
        """As Session.loader; this process computes all micro-batches, whatever the policy."""
        sizes, reader = (global_batch_size, micro_batch_size, seed), DataReader("replica0", self._replicas)
        return make_loader(
            dataset, sizes, collate_fn, num_workers, parse_options(options), reader, SampleSlice.of(mesh)
        )

    def sampler(self, size: int, *, global_batch_size: int, **options: Any) -> StepSampler:
        """As Session.sampler. This process draws the whole global batch, in batches of any size."""
        options.pop("data_slot", None)
        drawn = StepSampler(size, global_batch_size=global_batch_size, settings=_ALONE, **options)
        self.draw_from(drawn)
        return drawn

    def draw_from(self, sampler: StepSampler) -> None:
        """As Session.draw_from."""
        sampler.bind(lambda: self.committed_step)
        self._sampler = sampler
        self.randomness.seed = sampler.seed

    def steps(self, data: Loader, until: int, first_step: int | None = None) -> Iterator[SoloStep]:
        """As Session.steps."""
        if not self._data.until:  # the first call
            check_source(inspect.currentframe(), self._objects.values())
        self._data.enter(data, until, first_step)
        self.randomness.follow_steps(data.plan.seed)
        while self.committed_step < until:
            step = SoloStep(self, self.committed_step, self._data)
            yield step
            if not step.done:
                raise FabricError(
                    f"the loop left step {step.number} before its micro-batches ended: iterate `for batch in "
                    "step` to its end"
                )

    def average(self, weight: float, part: int) -> bool:
        """Divide the summed gradients by the total weight of all ranks; return whether there is no update.

        ``part``: the slice of the samples that this rank computed.
        """
        if self._group is not None:
            share = {"weight": weight, "metrics": sorted(self._metrics.items()), "part": part}
            ranks = self._group.gather(share)
            shares = [(x["weight"], tuple((k, v) for k, v in x["metrics"])) for x in ranks]
            weight, metrics = replica_share([x["part"] for x in ranks], shares)
            self._metrics = dict(metrics)
        if not weight:  # a step without data, as in ``EmptySteps``
            scales = any(isinstance(x, torch.amp.GradScaler) for x in self._objects.values())
            drop_gradients(self.parameters, keep_zeros=scales)
            return not scales
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(weight)
        return False

    def skips(self) -> bool:
        """Whether ``on_nan`` skips this step's update because the gradient is not finite."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self._on_nan == "propagate" or all(bool(torch.isfinite(g).all()) for g in gradients):
            return False
        if self._on_nan == "stop":
            raise FabricError(f"the gradient of step {self.committed_step} is not finite, and on_nan is stop")
        for parameter in self.parameters:
            parameter.grad = None
        return True

    def metrics(self, **values: float) -> None:
        for name, value in values.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + float(value)

    def take_metrics(self) -> dict[str, float]:
        """Return the step's metric sums, and start those of the next step at zero."""
        totals, self._metrics = self._metrics, {}
        return totals

    def exchange(self, weight: float = 1.0) -> SoloStep:
        """As Session.exchange. With one member ``.grad`` is the average already (``weight`` cancels out)."""
        if self._sampler is not None:
            self._sampler.take(self.committed_step)
        step = SoloStep.__new__(SoloStep)
        step.number, step.contributed, step.replayed = self.committed_step, True, False
        step.metrics, step.done = self.take_metrics(), True
        step.skipped = self.skips()
        self.randomness.begin(step.number)
        self.committed_step += 1
        return step

    @contextlib.contextmanager
    def busy(self, reason: str, at_most_s: float) -> Iterator[None]:
        """As Session.busy; no other member waits."""
        yield

    def close(self) -> None:
        """As Session.close; there is no job to leave."""
