"""How the main thread spends a step's time: compute, the user's update, waiting."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fabric.health.work import WorkAmount
from fabric.model import SpeedMeasurement, StepTimes
from fabric.protocol.messages import member_events as io

MOST_S = 0.2  # seconds for the products, the copies and the first run of each together
_FEWEST = 3  # operations that are measured even if one takes long
_SIZE, _DEVICE_SIZE = 256, 2048  # rows of the square matrices, on the host and on a device
_COPY_BYTES = 8 * 2**20


def measure(number: int, rank: int, device: torch.device) -> SpeedMeasurement:
    """Run micro-benchmark ``number`` of a suspected rank: matrix products on its device, copies of memory.

    It runs at a step boundary, draws no random numbers, and leaves no memory behind. Products and copies
    take `MOST_S` / 2 each. Where the first operation alone takes longer than `MOST_S`, no other one
    follows. An operation that fails has the time 0.
    """
    with torch.no_grad():
        product_s, copy_s = _mean_s(_product, device), _mean_s(_copy, device)
    return SpeedMeasurement(number, rank, product_s, copy_s)


def _product(device: torch.device) -> Callable[[], object]:
    size = _DEVICE_SIZE if device.type == "cuda" else _SIZE
    left = torch.full((size, size), 0.5, device=device)
    result = torch.empty_like(left)
    return lambda: torch.mm(left, left, out=result)


def _copy(device: torch.device) -> Callable[[], object]:
    """On the host from memory to memory, else from the host to the device."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cpu")
    target = torch.empty_like(source, device=device)
    return lambda: target.copy_(source)


def _mean_s(prepare: Callable[[torch.device], Callable[[], object]], device: torch.device) -> float:
    """Return the mean seconds of an operation. The mean, unlike the least, shows a process that is stopped
    again and again."""
    try:
        began = time.monotonic()
        operation = prepare(device)
        operation()  # the first run loads kernels
        _settle(device)
        count, start = 0, time.monotonic()
        if start - began > MOST_S:
            return start - began
        while count < _FEWEST or time.monotonic() - began < MOST_S / 2:
            operation()
            _settle(device)
            count += 1
            if time.monotonic() - began > MOST_S:
                break
        return (time.monotonic() - start) / count
    except RuntimeError:  # for example no memory is left on the device
        return 0.0


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class CollectiveWaits:
    """``seconds`` grows with each wait of the main thread, from ``install`` on.

    A rank that waits is not slow: fabric takes these seconds out of the rank's computing time. A wait for
    work on a CUDA device returns at once, so there the computing time keeps the device's waits.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread = threading.get_ident()
        self._depth = 0

    def install(self) -> None:
        """Measure the waits of this process from now on, until it ends."""
        import torch.distributed._functional_collectives as functional

        dist.Work.wait = self._timed(dist.Work.wait)  # type: ignore[method-assign]
        functional.wait_tensor = self._timed(functional.wait_tensor)  # DTensor, tensor parallelism

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling() or self._depth or threading.get_ident() != self._thread:
                return wait(*arguments, **options)
            began, self._depth = time.monotonic(), 1
            try:
                return wait(*arguments, **options)
            finally:
                self._depth = 0
                self.seconds += time.monotonic() - began

        return timed


@dataclass(slots=True)
class StepClock:
    """The main thread's times since the last report."""

    mark: float = field(default_factory=time.monotonic)  # end of the last lap
    compute_s: float = 0.0
    optimizer_s: float = 0.0
    wait_s: float = 0.0
    work: dict[int, float] = field(default_factory=dict)  # micro-batch -> its work
    samples: float = 0.0
    squares: float = 0.0
    micro_batches: int = 0
    waited_s: float = 0.0  # part of ``compute_s`` for which the rank waited for other ranks of its replica
    waits: CollectiveWaits = field(default_factory=CollectiveWaits)
    measured: tuple[SpeedMeasurement, ...] = ()  # micro-benchmarks not yet reported
    waits_mark: float = 0.0  # seconds of ``waits`` at the end of the last lap
    loss: str = ""  # as in StepTimes

    def lap(self) -> float:
        """End a lap; return its seconds."""
        now = time.monotonic()
        seconds, self.mark = now - self.mark, now
        self.waits_mark = self.waits.seconds
        return seconds

    def end_compute(self) -> None:
        """End a lap of computing micro-batches."""
        waited_s = self.waits.seconds - self.waits_mark
        seconds = self.lap()
        self.compute_s += seconds
        self.waited_s += min(max(0.0, waited_s), seconds)

    def end_update(self) -> None:
        """End a lap of the user's code outside of the micro-batches."""
        self.optimizer_s += self.lap()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude this context's time from the lap under way."""
        began, waits_s = time.monotonic(), self.waits.seconds
        try:
            yield
        finally:
            self.leave_out(time.monotonic() - began)
            self.waits_mark += self.waits.seconds - waits_s

    def count(self, micro_batch: int, amount: WorkAmount) -> None:
        """Note that this micro-batch has been computed; a recomputation counts too."""
        self.work[micro_batch] = self.work.get(micro_batch, 0.0) + amount.tokens
        self.samples += amount.samples
        self.squares += amount.squares
        self.micro_batches += amount.micro_batches

    def leave_out(self, seconds: float) -> None:
        """Exclude the last ``seconds`` from the lap under way."""
        self.mark = min(time.monotonic(), self.mark + seconds)

    def run_benchmark(
        self,
        order: io.Compute | io.Apply,
        rank: int,
        parameters: Sequence[tuple[str, torch.Tensor]],
        echo: Callable[[int, str], SpeedMeasurement],
    ) -> None:
        """Run the micro-benchmark that ``order`` asks for, if any; its time is in no phase of the step.

        ``echo``: measures the link to a member, for rank 0.
        """
        if not isinstance(order, io.Compute) or not order.measure:
            return
        if not order.echo:
            self.measured = (measure(order.measure, rank, parameters[0][1].device),)
        elif rank == 0:
            self.measured = (echo(order.measure, order.echo),)
        self.lap()

    def times(
        self, exchange_s: float, waiting_s: dict[str, float], sending_s: dict[str, float] | None = None
    ) -> StepTimes:
        """Return the step's times for the lighthouse, and start the next count."""
        times = StepTimes(
            compute_s=self.compute_s,
            exchange_s=exchange_s,
            optimizer_s=self.optimizer_s,
            waiting_s=dict(waiting_s),
            work=dict(self.work),
            samples=self.samples,
            squares=self.squares,
            micro_batches=self.micro_batches,
            waited_s=self.waited_s,
            measured=self.measured,
            sending_s=dict(sending_s or {}),
            loss=self.loss,
        )
        self.measured = ()
        self.compute_s = self.optimizer_s = self.wait_s = self.samples = self.squares = self.waited_s = 0.0
        self.micro_batches = 0
        self.work.clear()
        return times
