"""Watches the user's backward passes: for gradients that are final, and for those that are left over.

The exchange starts while backward still runs: each bucket is exchanged as soon as its gradients are final.

A gradient is final once the last backward of a step's last micro-batch has added to it. To predict the last
backward, this module counts the ``step.backward`` calls of the micro-batch before. User code may change a
gradient after it was handed over (one more backward, clipping within the micro-batch). This module notices
the change before any member can commit: this round is redone and all later rounds run without overlap.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch

from fabric.errors import ConfigError, RoundAborted
from fabric.ftar.buckets import Bucket, FlatGradients
from fabric.ftar.device.cuda import CudaEvent, CudaStream

# Finds gradients that a loop keeps from one step to the next, or drops within a step, and refuses both.
#
# Backward adds to ``.grad``. If the gradient of the step before is still there, every member would add it to
# its own part, and the sum would have it once per member. Without fabric the sum has it once. A loop that
# calls ``zero_grad`` at each micro-batch would contribute the last one only, under the weight of all.


_LOOKS = 64  # steps of this process that are looked at
_NOTES = 256  # so many times the gradients of a step's earlier micro-batches are noted
_SAMPLED = 1024  # elements that are looked at in each gradient, unless its first bytes have a value
_FIRST_BYTES = 64


class StaleGradients:
    """``begin`` notes which gradients of ``optimizers`` are left over; their optimizer's step is refused.

    Within ``micro_batch`` the user's code computes, and only adds gradients.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._step = -1
        self._looks = self._notes = 0
        self._stale: set[int] = set()
        self.own_loop = True  # false: a framework drops the gradients of a step in the next one
        self._computes = self._frees = False  # the loop is at a micro-batch; fabric may free its gradients
        self._kept: list[torch.nn.Parameter] = []  # parameters with a gradient that the loop must keep
        self._with_value: torch.nn.Parameter | None = None  # one whose gradient must not become zero
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._before)

    def micro_batch(self, is_first: bool, is_only: bool, frees: bool = False) -> Self:
        """Let the user's code compute a micro-batch, and watch the gradients of the step's earlier ones.

        The first micro-batch may drop those of the step before. But where it is the only one, a loop that
        does so would drop gradients in a step that has a dead replica's micro-batches too. Raises ConfigError
        if the user's code has dropped all gradients since its last backward pass. ``frees``: fabric may have
        freed them, because it has sent them.
        """
        self._kept, self._with_value = [], None
        if not is_first or (is_only and self.own_loop):
            self.added()
        self._computes, self._frees = self.own_loop, frees
        return self

    def __enter__(self) -> None:
        """Enter the micro-batch."""

    def __exit__(self, kind: object, *_: object) -> None:
        self._computes = False  # the loop may leave the step
        watches = kind is None and not self._frees
        if watches and ((self._kept and all(p.grad is None for p in self._kept)) or self._became_zero()):
            raise _dropped()
        self._kept, self._with_value = [], None

    def added(self) -> None:
        """Note the gradients after a backward pass."""
        self._kept, self._with_value = [], None
        if self._notes < _NOTES:
            self._notes += 1
            self._kept = [p for o in self._optimizers for p in _parameters(o) if p.grad is not None]
            self._with_value = next((p for p in self._kept if _has_value(p.grad)), None)

    def begin(self, step: int) -> None:
        """Look at the gradients before a backward pass of ``step``. Raises ConfigError for dropped ones."""
        if any(p.grad is None for p in self._kept) or self._became_zero():
            raise _dropped()
        if step == self._step:
            return
        self._step = step
        if self._looks >= _LOOKS:
            self._stale = set()
            return
        gradients = [(p, p.grad) for o in self._optimizers for p in _parameters(o) if p.grad is not None]
        self._looks += 1
        self._stale = {id(p) for p, gradient in gradients if _has_value(gradient)}

    def end(self) -> None:
        """Note that a replayed step follows: its gradient is written over what is there."""
        self._stale = set()

    def _became_zero(self) -> bool:
        gradient = self._with_value.grad if self._with_value is not None else None
        # A part of it may have become zero: before a refusal all of it is read.
        return gradient is not None and not _has_value(gradient) and not gradient.any()

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._computes:
            raise ConfigError(
                f"{type(optimizer).__name__}.step was called within the loop over the micro-batches, before "
                "the gradients of all replicas are averaged: call it after that loop, and let the phases of "
                "a GAN take turns by step.number"
            )
        if self._stale and any(id(p) in self._stale for p in _parameters(optimizer)):
            raise ConfigError(
                "the gradient of the step before was still there when this step began, and each replica "
                "would add it once: call optimizer.zero_grad() after each step, and in place of an "
                "accumulation over steps choose a larger global batch"
            )


def _dropped() -> ConfigError:
    return ConfigError(
        "the gradients of this step's earlier micro-batches are gone, and would be missing from the average: "
        "call optimizer.zero_grad() once in each step, after optimizer.step(), and not at each micro-batch"
    )


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _has_value(gradient: Any) -> bool:
    if type(gradient) is torch.Tensor and gradient.is_cpu and gradient.is_contiguous():
        # Nearly always the first bytes answer: a zero of any sign and type has these two bytes only.
        first = ctypes.string_at(gradient.data_ptr(), min(gradient.nbytes, _FIRST_BYTES))
        if first.strip(b"\x00\x80"):
            return True
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    if local.layout != torch.strided:
        return False
    flat = local.detach().reshape(-1)
    return bool(flat[:: max(1, flat.numel() // _SAMPLED)].any())


_NOTHING = contextlib.nullcontext()


class BucketReadiness:
    """The final buckets of one Compute order: backward's thread marks them, the exchange thread waits.

    The gradients on a device are final once the events that come with the mark have happened.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._final: dict[int, tuple[CudaEvent, ...]] = {}
        self._all: tuple[CudaEvent, ...] | None = None
        self._cause: str | None = None

    def finish(self, bucket: Bucket, events: tuple[CudaEvent, ...]) -> None:
        """Mark ``bucket`` as final."""
        with self._changed:
            self._final[bucket.begin] = events
            self._changed.notify_all()

    def finish_all(self, events: tuple[CudaEvent, ...] = ()) -> None:
        """Mark all buckets as final: backward has ended, so no parameter gets a further gradient."""
        with self._changed:
            self._all = events if self._all is None else self._all
            self._changed.notify_all()

    def abort(self, why: str) -> None:
        """End the exchange thread's wait with RoundAborted; from any thread."""
        with self._changed:
            self._cause = why
            self._changed.notify_all()

    def wait(self, bucket: Bucket) -> tuple[CudaEvent, ...]:
        """Return the events of ``bucket`` when it is final. Raises RoundAborted."""
        with self._changed:
            while (events := self._final.get(bucket.begin, self._all)) is None:
                if self._cause is not None:
                    raise RoundAborted(self._cause)
                self._changed.wait()
            return events


class Overlap:
    """The main thread's side: finds the last backward of an order and hands over its final gradients.

    ``announce(step, weight)`` tells the core that the gradient of ``step`` is on its way. Hooks on the
    parameters call ``ready``. After ``unwatch`` the caller calls it instead (DDP).
    """

    def __init__(
        self, gradients: FlatGradients, announce: Callable[[int, float], None], wanted: bool = True
    ) -> None:
        self.stream: BucketReadiness | None = None
        # A context manager around each micro-batch except the last: DDP's no_sync.
        self.without_sync: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        self.may_begin: Callable[[], bool] = lambda: True  # whether a replica may wait for this gradient
        self.stale: StaleGradients | None = None  # set where the user's loop has optimizers
        # On a device: returns the stream of the calling thread, on which a gradient is accumulated.
        self.stream_of_thread: Callable[[], CudaStream] | None = None
        self._streams: dict[int, set[CudaStream]] = {}  # a bucket's begin -> streams that add to it
        self._parameters = [parameter for _, parameter in gradients.parameters]
        self._buckets = {id(p): bucket for bucket in gradients.buckets for _, p in bucket.parameters}
        self._announce = announce
        self._usable = wanted
        self._backwards_per_micro_batch = 0  # number of backward passes in the previous micro-batch
        self._weight = 0.0  # sum of the weights of this order's backward passes so far
        self._calls = 0
        self._last = False
        self._running = False
        self._missing: dict[int, int] = {}
        self._versions: dict[int, int] = {}
        self._handed_over: dict[int, torch.Tensor | None] = {}
        self._changed = False
        self._hooks = [
            p.register_post_accumulate_grad_hook(self.ready)  # type: ignore[no-untyped-call]
            for p in self._parameters
            if self._usable
        ]

    def unwatch(self) -> None:
        """Remove the hooks on the parameters: the caller calls ``ready``, or nothing is streamed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Enclose the user's work on one micro-batch. ``last``: it is the last micro-batch of its order."""
        self._backwards_per_micro_batch, self._calls, self._last = self._calls, 0, last
        return _NOTHING if last else self.without_sync()

    def backward(self, step: int, weight: float, run: Callable[[], None]) -> None:
        """Let ``run`` do one backward pass, which adds a gradient of this ``weight``."""
        if self.stale is not None:
            self.stale.begin(step)
        self._calls += 1
        self._weight += weight
        is_last = self._usable and self._last and self.stream is None
        is_last = is_last and self._calls == self._backwards_per_micro_batch and self.may_begin()
        if is_last:
            self._begin(step)
        run()
        if is_last:
            self._end()
        if self.stale is not None:
            self.stale.added()

    def _begin(self, step: int) -> None:
        self.stream = BucketReadiness()
        self._missing = {}
        for bucket in self._buckets.values():
            self._missing[bucket.begin] = len(bucket.parameters)
            self._streams[bucket.begin] = self._own_stream()
        self._versions.clear()
        self._changed = False
        self._running = True
        self._announce(step, self._weight)

    def _end(self) -> None:
        self._running = False
        for p in self._parameters:
            version = -1 if p.grad is None else p.grad._version  # noqa: SLF001  (torch has no public one)
            if self._versions.setdefault(id(p), version) != version:
                self._changed = True
            self._handed_over[id(p)] = p.grad
        assert self.stream is not None
        # torch lets this thread's stream wait for all streams of its backward.
        self.stream.finish_all(tuple(stream.record() for stream in self._own_stream()))

    def _own_stream(self) -> set[CudaStream]:
        return {self.stream_of_thread()} if self.stream_of_thread is not None else set()

    def ready(self, parameter: torch.Tensor, version: bool = True) -> None:
        """Note that the gradient of ``parameter`` is final, if this is the last backward.

        ``version`` False: ignore the tensor's version, because DDP writes the same bytes to it again.
        """
        if not self._running or (bucket := self._buckets.get(id(parameter))) is None:
            return
        missing = self._missing[bucket.begin] = self._missing[bucket.begin] - 1
        if id(parameter) in self._versions or missing < 0:
            self._changed = True  # activation checkpointing may add to a parameter's gradient more than once
        if version and parameter.grad is not None:
            self._versions[id(parameter)] = parameter.grad._version  # noqa: SLF001
        streams = self._streams[bucket.begin]
        streams |= self._own_stream()
        if missing == 0 and self.stream is not None:
            self.stream.finish(bucket, tuple(stream.record() for stream in streams))

    def end_order(self) -> str:
        """End an order whose micro-batches are computed.

        Return why a gradient has changed since it was handed over, or an empty string.
        """
        self._weight = 0.0
        if (stream := self.stream) is None:
            return ""
        self.stream = None
        changed = self._changed or self._running
        for p in self._parameters:
            handed_over = self._handed_over.get(id(p))
            current = p.grad
            same = current is handed_over and (
                current is None or current._version == self._versions[id(p)]  # noqa: SLF001
            )
            changed = changed or not same
        self._handed_over.clear()
        self._running = False
        stream.finish_all()
        if not changed:
            return ""
        self._usable = False
        self.unwatch()
        return (
            "a gradient was changed after the last backward of a micro-batch: this replica exchanges without "
            "overlap from now on"
        )
