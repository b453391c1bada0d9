"""Watches the user's backward passes: for gradients that are final, and for those that are left over.

The exchange starts while backward still runs: each bucket is exchanged as soon as its gradients are final.

A gradient is final once the last backward of a step's last micro-batch has added to it. To predict the last
backward, this module counts the ``step.backward`` calls of the micro-batch before. Where other code calls
backward, such as a pipeline schedule, it counts that micro-batch's additions to each gradient. User code may
change a gradient after it was handed over (one more backward, clipping within the micro-batch). This module
notices the change before any member can commit: this round is redone, all later ones run without overlap.
"""

import contextlib
import ctypes
import functools
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.nn.utils import clip_grad

from fabric.errors import ConfigError, RoundAborted
from fabric.ftar.buckets import Bucket, FlatGradients, is_complete, local_part
from fabric.ftar.device.cuda import CudaEvent, CudaStream
from fabric.ftar.reduce_ops import address_of

_LOOKS = 64  # steps of this process that are looked at
_NOTES = 256  # so many times the gradients of a step's earlier micro-batches are noted
_SAMPLED = 1024  # elements that are looked at in each gradient, unless its first bytes have a value
_FIRST_BYTES = 64
# Of all imports of clip_grad_norm_ the second part is called; of clip_grad_value_ torch has no such part.
_CLIPPING = (
    (clip_grad, "_clip_grads_with_norm_"),
    (clip_grad, "clip_grad_value_"),
    (torch.nn.utils, "clip_grad_value_"),
)
_STAGES = "torch.distributed.pipelining.stage"


class StaleGradients:
    """Refuses gradients that a loop keeps from one step to the next, or drops within a step.

    Backward adds to ``.grad``. If the gradient of the step before is still there, every member would add it
    to its own part, and the sum would have it once per member. Without fabric the sum has it once. A loop
    that calls ``zero_grad`` at each micro-batch would contribute the last one only, under the weight of all.

    ``begin`` notes which gradients of ``optimizers`` are left over; their optimizer's step is refused.
    Within ``micro_batch`` the user's code computes, and only adds gradients.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._step = -1
        self._looks = self._notes = 0
        self._stale: set[int] = set()
        self.own_loop = True  # false: a framework drops the gradients of a step in the next one
        self._frees = False  # fabric may free the gradients of this micro-batch
        self._kept: list[torch.nn.Parameter] = []  # parameters with a gradient that the loop must keep
        self._marks: list[tuple[int, int]] = []  # identity and version of these, in a framework's loop
        self._since_backward = False  # they were noted after a backward pass of this micro-batch
        self._with_value: torch.nn.Parameter | None = None  # one whose gradient must not become zero
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._before)
        _watch_clipping()
        if _STAGES in sys.modules:
            _watch_stages()

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
        self._since_backward = False  # the user's code may call backward itself
        self._frees = frees
        return self

    def __enter__(self) -> None:
        if self.own_loop:
            _computing.add(self)

    def __exit__(self, kind: object, *_: object) -> None:
        _computing.discard(self)  # the loop may leave the step
        watches = kind is None and not self._frees
        if watches and self._since_backward:
            self._check_unchanged()
        if watches and ((self._kept and all(p.grad is None for p in self._kept)) or self._became_zero()):
            raise _dropped()
        self._kept, self._with_value = [], None

    def added(self) -> None:
        """Note the gradients after a backward pass."""
        self._kept, self._with_value, self._since_backward = [], None, True
        if self._notes < _NOTES:
            self._notes += 1
            self._kept = [p for o in self._optimizers for p in _parameters(o) if p.grad is not None]
            self._with_value = next((p for p in self._kept if _has_value(p.grad)), None)
            self._marks = [] if self.own_loop else _marks(self._kept)

    def _check_unchanged(self) -> None:
        is_kept = self._marks and self._kept and all(p.grad is not None for p in self._kept)
        if is_kept and self._marks != _marks(self._kept):
            raise changed_early("the script changes gradients", own_loop=False)

    def begin(self, step: int) -> None:
        """Look at the gradients before a backward pass of ``step``. Raises ConfigError for dropped ones."""
        if any(p.grad is None for p in self._kept) or self._became_zero():
            raise _dropped()
        self._check_unchanged()
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
        if self in _computing:
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


_computing: set[StaleGradients] = set()  # their loops are at a micro-batch


@functools.cache
def _watch_clipping() -> None:
    """Let torch's clipping refuse itself, for the rest of this process, while a loop is at a micro-batch."""

    def watched(clip: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if _computing:
            raise changed_early("the script clips gradients")
        return clip(*arguments, **named)

    for owner, name in _CLIPPING:
        clip = getattr(owner, name)
        setattr(owner, name, functools.wraps(clip)(functools.partial(watched, clip)))


@functools.cache
def _watch_stages() -> None:
    """Let pipeline stages refuse to divide what the step's earlier micro-batches have added."""
    owner = sys.modules[_STAGES]._PipelineStageBase  # noqa: SLF001
    scale = owner.scale_grads

    def watched(stage: Any, grad_scale_factor: int) -> Any:
        if grad_scale_factor != 1 and _computing:
            raise changed_early("the pipeline's schedule divides gradients (scale_grads=True)")
        return scale(stage, grad_scale_factor)

    owner.scale_grads = functools.wraps(scale)(watched)


def changed_early(what: str, own_loop: bool = True) -> ConfigError:
    """Return the refusal of a loop that changes gradients before they are averaged."""
    where, later = "within the loop over the micro-batches", "after that loop"
    if not own_loop:
        where, later = (
            "after a backward pass",
            "right before the optimizer's step (on_before_optimizer_step, ",
        )
        later += "on_pre_optimizer_step, `if accelerator.sync_gradients:`)"
    return ConfigError(
        f"{what} {where}, before the gradients of all replicas are averaged, so the result would depend on "
        f"the number of replicas: do it {later}, or scale the loss"
    )


def _marks(parameters: Iterable[torch.nn.Parameter]) -> list[tuple[int, int]]:
    return [(id(p.grad), -1 if p.grad is None else p.grad._version) for p in parameters]  # noqa: SLF001


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
        first = ctypes.string_at(address_of(gradient), min(gradient.nbytes, _FIRST_BYTES))
        if first.strip(b"\x00\x80"):
            return True
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    if local.layout != torch.strided:
        return False
    flat = local.detach().reshape(-1)
    return bool(flat[:: max(1, flat.numel() // _SAMPLED)].any())


_NOTHING = contextlib.nullcontext()
_torch: Any = torch  # torch declares no types for what copies memory at the first write


class BucketReadiness:
    """The final buckets of one Compute order: backward's thread marks them, the exchange thread waits.

    The gradients on a device are final once the events that come with the mark have happened.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._final: dict[int, tuple[CudaEvent, ...]] = {}
        self._all: tuple[CudaEvent, ...] | None = None
        self._aborted = 0, ""  # the newest aborted epoch, and why
        self.changed: list[torch.Tensor] = []  # memory of changed gradients, which a round may still read

    def finish(self, bucket: Bucket, events: tuple[CudaEvent, ...] = ()) -> None:
        """Mark ``bucket`` as final, unless it is."""
        with self._changed:
            self._final.setdefault(bucket.begin, events)
            self._changed.notify_all()

    def finish_all(self, events: tuple[CudaEvent, ...] = ()) -> None:
        """Mark all buckets as final: the order has ended, so no parameter gets a further gradient."""
        with self._changed:
            self._all = events
            self._changed.notify_all()

    def abort(self, epoch: int, why: str) -> None:
        """End the waits of rounds up to ``epoch`` with RoundAborted; from any thread."""
        with self._changed:
            self._aborted = epoch, why
            self._changed.notify_all()

    def wait(self, bucket: Bucket, epoch: int) -> tuple[CudaEvent, ...]:
        """Return the events of ``bucket`` when it is final, for a round of ``epoch``. Raises RoundAborted."""
        with self._changed:
            while (events := self._final.get(bucket.begin, self._all)) is None:
                if epoch <= self._aborted[0]:
                    raise RoundAborted(self._aborted[1])
                self._changed.wait()
            return events


class SentGradients:
    """The gradients of one order that were handed over; it notices when one of them changes later.

    Gradients may share memory (FSDP2). Some writes change no version: by ``.data``, by numpy, and on a
    sharded gradient by ``torch._foreach_mul_``. So a gradient's memory gets a second owner once backward adds
    no more to it. Torch then gives the first writer a copy of its own.
    """

    def __init__(self) -> None:
        self.changed = False
        self._accumulated: set[int] = set()  # the parameters that have a gradient already
        self._versions: dict[int, int] = {}  # by memory, since a gradient in it was final
        self._additions_due: Counter[int] = Counter()  # by memory: the gradients that are not final yet
        self._watched: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by memory: both owners
        self._sent: dict[int, torch.Tensor | None] = {}  # by parameter

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin the last backward of an order, which adds to the gradients of ``parameters``."""
        gradients = {id(p): p.grad for p in parameters if p.grad is not None}
        self.changed = False
        self._accumulated = set(gradients)
        self._additions_due = Counter(_memory(local_part(x)) for x in gradients.values())
        self._versions.clear()
        self._sent.clear()

    def note_addition(self, parameter: torch.Tensor, is_final: bool) -> None:
        """Note that backward has added to the gradient of ``parameter``."""
        if (gradient := parameter.grad) is None:
            return
        key, part = id(parameter), local_part(gradient)
        memory, version = _memory(part), part._version  # noqa: SLF001  (torch has no public one)
        before, accumulates = self._versions.get(memory), key in self._accumulated
        if before is not None and version != before + accumulates:
            self.changed = True  # other code has written to this memory since a part of it was final
        if before is not None or is_final:
            self._versions[memory] = version
        self._additions_due[memory] -= accumulates
        self._accumulated.add(key)
        if not is_final:
            self._additions_due[memory] += 1
            return
        self._sent[key] = gradient
        if not self._additions_due[memory]:
            self._watch(part, memory)

    def hold(self, parameter: torch.Tensor) -> None:
        """Note at the end of backward that the gradient of ``parameter`` is handed over."""
        if (gradient := self._sent.setdefault(id(parameter), parameter.grad)) is not None:
            part = local_part(gradient)
            self._watch(part, _memory(part))

    def _watch(self, part: torch.Tensor, memory: int) -> None:
        if memory in self._watched:
            return
        try:
            self._watched[memory] = part, _torch._lazy_clone(part)  # noqa: SLF001
        except (RuntimeError, TypeError):  # memory that torch cannot share, such as a buffer of Python's
            self.changed = True

    def end(self, parameters: Iterable[torch.Tensor], stream: BucketReadiness) -> bool:
        """End the order; return whether one of its gradients has changed since it was handed over."""
        replaced = any(p.grad is not self._sent.get(id(p), p.grad) for p in parameters)
        shared = (_torch._C._is_cow_tensor(part) for part, _ in self._watched.values())  # noqa: SLF001
        self.changed = self.changed or replaced or not all(shared)
        if self.changed:
            stream.changed = [own for _, own in self._watched.values()]
        self._sent.clear()
        self._watched.clear()
        return self.changed


def _memory(part: torch.Tensor) -> int:
    """Return the name of a tensor's memory. Its address would be asked for in order to write."""
    try:
        return int(part.untyped_storage()._cdata)  # noqa: SLF001
    except NotImplementedError:  # a sparse gradient, which is refused when it is gathered
        return id(part)


@dataclass(slots=True)
class _DueBucket:
    """A bucket of which ``missing`` gradients are not final, and the device's streams that add to it."""

    missing: int
    streams: set[CudaStream]


class BackwardCount:
    """How often backward ran, and added to each gradient: in this micro-batch, and in the one before."""

    def __init__(self) -> None:
        self.calls = self.calls_before = 0  # of ``step.backward``
        self._additions: dict[int, int] = {}
        self._before: dict[int, int] = {}

    def begin_micro_batch(self) -> None:
        self.calls_before, self.calls = self.calls, 0
        self._before, self._additions = self._additions, {}

    def begin_backward(self) -> None:
        """Begin a call of ``step.backward``. Only the additions of a micro-batch's last one count."""
        self.calls += 1
        self._additions = {}

    def add(self, key: int) -> int:
        """Count an addition to the gradient ``key``; return how many there were."""
        self._additions[key] = self._additions.get(key, 0) + 1
        return self._additions[key]

    def expected(self, key: int) -> float:
        """Return how many additions make the gradient ``key`` final; infinity where nothing tells."""
        return self._before.get(key, 1 if self.calls_before else math.inf)

    @property
    def is_other_code(self) -> bool:
        """Whether code other than ``step.backward`` adds gradients, now and in the micro-batch before."""
        return self.calls == self.calls_before == 0 and bool(self._before)


class Overlap:
    """The main thread's side: finds the last backward of an order and hands over its final gradients.

    ``announce(step, weight)`` tells the core that the gradient of ``step`` is on its way. Hooks on the
    parameters call ``ready``. After ``unwatch`` the caller calls it instead (DDP).

    A backward pass may add to one gradient several times. So a gradient is final when this backward has added
    to it as often as the last backward of the micro-batch before. Where no ``step.backward`` ran in that one,
    all of its additions count. Late buckets are final when the order ends. So are gradients whose partial
    sums the replica's ranks add up then.
    """

    def __init__(
        self,
        gradients: FlatGradients,
        announce: Callable[[int, float], None],
        wanted: bool = True,
        fewest_buckets: int = 2,
    ) -> None:
        """``fewest_buckets``: with fewer no gradient is final before backward ends. Several ranks begin
        together, so each takes part with one."""
        self.stream: BucketReadiness | None = None
        # A context manager around each micro-batch except the last: DDP's no_sync.
        self.without_sync: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        self.may_begin: Callable[[], bool] = lambda: True  # whether a replica may wait for this gradient
        self.stale: StaleGradients | None = None  # set where the user's loop has optimizers
        # On a device: returns the stream of the calling thread, on which a gradient is accumulated.
        self.stream_of_thread: Callable[[], CudaStream] | None = None
        self._buckets = [bucket for bucket in gradients.buckets if not bucket.late]
        self._parameters = [p for bucket in self._buckets for _, p in bucket.parameters]
        self._bucket_of = {id(p): bucket for bucket in self._buckets for _, p in bucket.parameters}
        self._announce = announce
        self._usable = wanted and len(self._buckets) >= fewest_buckets
        self._weight = 0.0  # sum of the weights of this order's backward passes so far
        self._announced = 0.0  # the weight of this order that the core was told
        self._step = 0
        self._count = BackwardCount()
        self._last = False
        self._running = False
        self._due: dict[int, _DueBucket] = {}  # by its begin
        self._sent = SentGradients()
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

    def micro_batch(self, step: int, last: bool) -> contextlib.AbstractContextManager[object]:
        """Enclose the user's work on one micro-batch. ``last``: it is the last micro-batch of its order."""
        self._count.begin_micro_batch()
        self._step, self._last = step, last
        return _NOTHING if last else self.without_sync()

    def backward(self, step: int, weight: float, run: Callable[[], None]) -> None:
        """Let ``run`` do one backward pass, which adds a gradient of this ``weight``."""
        if self.stale is not None:
            self.stale.begin(step)
        self._count.begin_backward()
        self._weight += weight
        is_last = self._usable and self._last and self.stream is None
        is_last = is_last and self._count.calls == self._count.calls_before and self.may_begin()
        if is_last:
            self._begin(step, self._weight)
        run()
        if is_last:
            self._end()
        if self.stale is not None:
            self.stale.added()

    def _begin(self, step: int, weight: float) -> None:
        self._announced = weight
        self.stream = BucketReadiness()
        self._due = {x.begin: _DueBucket(len(x.parameters), self._own_stream()) for x in self._buckets}
        self._sent.begin(self._parameters)
        self._running = True
        self._announce(step, weight)

    def _begins_by_other_code(self) -> bool:
        """Whether code other than ``step.backward`` adds the first gradient of an order's last micro-batch.

        On a device the hooks run in a thread that may not announce it.
        """
        return (
            self._last
            and self._count.is_other_code
            and bool(self._hooks)
            and self.stream_of_thread is None
            and self.may_begin()
        )

    def _end(self) -> None:
        self._running = False
        assert self.stream is not None
        # torch lets this thread's stream wait for all streams of its backward.
        events = tuple(stream.record() for stream in self._own_stream())
        for bucket in self._buckets:
            if not all(is_complete(p) for _, p in bucket.parameters):
                continue
            for _, p in bucket.parameters:
                self._sent.hold(p)
            self.stream.finish(bucket, events)

    def _own_stream(self) -> set[CudaStream]:
        return {self.stream_of_thread()} if self.stream_of_thread is not None else set()

    def ready(self, parameter: torch.Tensor, version: bool = True) -> None:
        """Note that backward has added to the gradient of ``parameter``.

        ``version`` False: ignore the tensor's version, because DDP writes the same bytes to it again.
        """
        if (bucket := self._bucket_of.get(key := id(parameter))) is None:
            return
        times = self._count.add(key)
        if self.stream is None and self._begins_by_other_code():
            self._begin(self._step, 1.0)  # its weight is said later
        if not self._running or self.stream is None:
            return
        due = self._due[bucket.begin]
        if self.stream_of_thread is not None:
            due.streams.add(self.stream_of_thread())
        expected = self._count.expected(key)
        if version:
            self._sent.note_addition(parameter, times == expected)
        if times > expected:
            self._sent.changed = True  # this backward adds more often than the one before
        elif times == expected and is_complete(parameter):
            due.missing -= 1
            if due.missing == 0:
                self.stream.finish(bucket, tuple(stream.record() for stream in due.streams))

    def end_order(self, weight: float) -> str:
        """End an order whose micro-batches are computed, and have this weight.

        Return why a gradient has changed since it was handed over, or an empty string.
        """
        self._weight = 0.0
        if (stream := self.stream) is None:
            return ""
        if self._running and not self._count.calls:
            self._end()  # other code has called backward
        self.stream = None
        changed = self._sent.end(self._parameters, stream) or self._running
        changed = changed or weight == 0 < self._announced
        self._running = False
        stream.finish_all(tuple(own.record() for own in self._own_stream()))
        if not changed:
            return ""
        self._usable = False
        self.unwatch()
        return (
            "a gradient was changed after the last backward of a micro-batch: this replica exchanges without "
            "overlap from now on"
        )
