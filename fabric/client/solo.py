"""FABRIC_DISABLE=1: the same loop and the same mathematics with one member and no service at all."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fabric.ckpt_server.state import capture
from fabric.client.data import Loader, Plan, collate
from fabric.client.randomness import seed_everything
from fabric.errors import FabricError


class SoloStep:
    """As Step: iterate it, then ``.grad`` is the average over the global batch."""

    def __init__(self, session: "SoloSession", number: int, data: Loader) -> None:
        self.number = number
        self.live = True
        self.metrics: dict[str, float] = {}
        self.done = False
        self._session = session
        self._data = data
        self._samples = 0
        self._weight = 0.0

    def __iter__(self) -> Iterator[Any]:
        plan = self._data.plan
        self._data.read_ahead(self.number, range(plan.micro_batches))
        for micro_batch in range(plan.micro_batches):
            batch = self._data.fetch(self.number, micro_batch)
            self._samples = plan.micro_batch_size
            seed_everything(plan.seed, self.number, micro_batch)
            yield batch
        self._session.average(self._weight)
        self.metrics, self.done = self._session.take_metrics(), True

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """As Step.backward."""
        share = float(self._samples if weight is None else weight)
        (loss * share).backward()  # type: ignore[no-untyped-call]
        self._weight += share


class SoloSession:
    """As Session, alone."""

    epoch = 0
    members: tuple[str, ...] = ()

    def __init__(self, parameters: Sequence[torch.nn.Parameter], objects: Mapping[str, object]) -> None:
        self.committed_step = 0
        self._objects = objects
        self._parameters = parameters
        self._metrics: dict[str, float] = {}

    def digest(self) -> str:
        """As Session.digest."""
        return capture(self._objects, self.committed_step).digest()

    def loader(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int = 0,
        collate_fn: Callable[[Sequence[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> Loader:
        """As Session.loader."""
        plan = Plan(len(dataset), global_batch_size, micro_batch_size, seed)
        return Loader(dataset, plan, collate_fn or collate, num_workers)

    def steps(self, data: Loader, until: int) -> Iterator[SoloStep]:
        """As Session.steps."""
        while self.committed_step < until:
            step = SoloStep(self, self.committed_step, data)
            yield step
            if not step.done:
                raise FabricError(
                    f"the loop left step {step.number} before its micro-batches ended: iterate `for batch in "
                    "step` to its end"
                )
            self.committed_step += 1

    def average(self, weight: float) -> None:
        """Divide the summed gradients by the total weight."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                torch.div(parameter.grad, weight, out=parameter.grad)

    def metrics(self, **values: float) -> None:
        """As Session.metrics."""
        for name, value in values.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + float(value)

    def take_metrics(self) -> dict[str, float]:
        """The step's sums, begun anew."""
        totals, self._metrics = self._metrics, {}
        return totals

    def exchange(self, weight: float = 1.0) -> SoloStep:
        """As Session.exchange: alone, ``.grad`` is the average already (``weight`` cancels out)."""
        step = SoloStep.__new__(SoloStep)
        step.number, step.live, step.metrics, step.done = self.committed_step, True, self.take_metrics(), True
        self.committed_step += 1
        return step

    @contextlib.contextmanager
    def busy(self, reason: str, at_most_s: float) -> Iterator[None]:
        """As Session.busy: nobody is waiting."""
        yield

    def close(self) -> None:
        """As Session.close: nothing to leave."""
