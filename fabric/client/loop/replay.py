"""A newcomer brings its state up to the others', who step on meanwhile and must not be slowed by it.

On the CPU the heavy work of that runs politely (``runtime.priority``) in other threads than the main one,
which waits for it: loading and digesting the state, writing a replayed gradient into ``.grad``, and the
steps of torch's own optimizers. What is the user's runs in the main thread as ever: their loop, hooks,
schedulers, other optimizers, ``state_dict`` and ``load_state_dict`` of what is not torch's. A device is not
the host's processor, and ranks of one replica wait for each other: there everything runs in the main thread.
"""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.optim import optimizer as torch_optimizer

from fabric.ckpt_server.state.training_state import StateDescriber, restore, verify
from fabric.client.gradients.gradient_backend import HostBackend
from fabric.client.loop.shutdown import Shutdown
from fabric.errors import FabricError
from fabric.ftar.buckets import FlatGradients
from fabric.protocol.messages import member_events as io
from fabric.runtime.priority import run_low_priority

_T = TypeVar("_T")


class Replay(Shutdown):
    """What a session does to get where the others are."""

    _state: StateDescriber
    _gradients: FlatGradients
    _state_step: int
    _until: int
    _metrics: dict[str, float]
    _replayed = 0
    _behind = False  # from a loaded state, or a replayed step, to the next round that I take part in
    _steps: "LowPrioritySteps | None" = None

    def digest(self) -> str:
        """xxh3_128 of the shared state as it is now; equal on all members after the same step."""
        return self._run_yielding(self._state.capture(self._state_step).digest)

    def _run_yielding(self, work: Callable[[], _T]) -> _T:
        """The result of ``work``, which is our own or torch's, done politely while I step with nobody."""
        return run_low_priority(work) if self._may_yield and (self._behind or not self.epoch) else work()

    @property
    def _may_yield(self) -> bool:
        return self._place.group is None and isinstance(self._parts.backend, HostBackend)

    def _begin_replay(self) -> None:
        """The user's code is about to apply a published gradient."""
        self._replayed += 1
        self._behind = True
        if self._may_yield:
            optimizers = [x for x in self._state.objects.values() if isinstance(x, torch.optim.Optimizer)]
            self._steps = LowPrioritySteps(optimizers)

    def _end_replay(self) -> None:
        """The user's code has applied it."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def _install(self, order: io.Install) -> None:
        """Load the fetched state; only after all of it was verified, and verified again when loaded."""
        fetched_state = self._parts.fetch_thread.state
        assert fetched_state is not None
        # Of this rank's part; the order's is of the whole replica.
        digest = fetched_state.fetched.manifest["digest"]
        self._parts.points.hit("install", order.step)
        self._drop_gradient()
        self._let_change()
        self._behind = True
        try:
            restore(fetched_state.file, self._state.objects, self._run_yielding)
            verify(self._state.objects, order.step, digest, self._run_yielding)
        except FabricError as error:
            self._engine.post(io.InstallFailed(f"the state of step {order.step} does not fit: {error}"))
            return
        self._parts.buffers.begin()
        self._state_step = order.step
        fetched = fetched_state.fetched
        if not fetched_state.resharded:
            self._parts.snapshots.serve(fetched_state.slot, fetched.manifest)
        self._replayed = 0
        self._parts.journal.write(
            "join",
            generation=fetched.manifest["generation"],
            step=order.step,
            bytes=fetched.nbytes,
            seconds=fetched.seconds,
            sources=dict(fetched.sources),
            compression=fetched.compression,
            resharded=fetched_state.resharded,
        )
        self._note_state(digest)
        self._engine.post(io.Installed(order.step, digest, last=order.step >= self._until))

    def _note_joined(self, held: io.PreparedRound) -> None:
        """The first round of a newcomer, or of one that had been evicted."""
        if self._behind:
            self._behind = False
            replayed, self._replayed = self._replayed, 0
            self._parts.journal.write("joined", epoch=held.epoch, step=held.step, replayed=replayed)

    _digest_begun = False

    def _let_change(self) -> None:
        """The state may change when this returns. A digest that nobody asked for, because the round went on
        without this process, is noted all the same. Raises StateError: see ``Snapshots``."""
        self._parts.snapshots.wait_copied()
        if self._digest_begun:
            self._digest_begun = False
            self._note_state(self._parts.snapshots.take_digest(self._state_step))

    def _note_state(self, digest: str) -> None:
        if digest:
            self._parts.journal.write(
                "state", generation=self._engine.generation, step=self._state_step, digest=digest
            )

    def _drop_gradient(self) -> None:
        for _, parameter in self._gradients.parameters:
            parameter.grad = None
        self._parts.buffers.drop()
        self._metrics.clear()


class LowPrioritySteps:
    """Until ``close`` a ``step()`` of ``optimizers`` runs politely, where it is torch's own code alone."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._wrapped = [(x, _wrap(x)) for x in optimizers if _is_plain(x)]

    def close(self) -> None:
        """Steps run in the thread that calls them again."""
        for optimizer, wrapper in self._wrapped:
            wrapper.open = False  # for whoever has wrapped it meanwhile, or kept it
            if optimizer.__dict__.get("step") is wrapper.method:
                optimizer.__dict__.pop("step")
                optimizer.__dict__.update(wrapper.before)
        self._wrapped = []


@dataclass(slots=True)
class _Wrapper:
    """What stands in an optimizer's ``step``, and what stood there ``before`` (in its own attributes)."""

    method: Callable[..., Any]
    before: dict[str, Any]
    open: bool = True


def _wrap(optimizer: torch.optim.Optimizer) -> _Wrapper:
    original = optimizer.step

    @functools.wraps(original)
    def step(self: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        # A closure is the user's code; a mode holds in the thread that has entered it.
        own = wrapper.open and not (arguments or named or _is_in_a_mode() or _has_hooks(optimizer))
        return run_low_priority(original) if own else original(*arguments, **named)

    # A scheduler that is made meanwhile wraps it in turn, and takes it for a method.
    before = {"step": optimizer.__dict__["step"]} if "step" in optimizer.__dict__ else {}
    wrapper = _Wrapper(types.MethodType(step, optimizer), before)
    optimizer.step = wrapper.method  # type: ignore[method-assign]
    return wrapper


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its steps are torch's own code, on the CPU, wrapped by nobody but torch's schedulers."""
    kind, own = type(optimizer), optimizer.__dict__.get("step")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return (
        f"{kind.__module__}.".startswith("torch.optim.")
        and (own is None or getattr(own, "__wrapped__", None) is kind.step)
        and all(type(p) in (torch.Tensor, torch.nn.Parameter) and p.device.type == "cpu" for p in parameters)
    )


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether user code runs within a step."""
    return bool(
        optimizer._optimizer_step_pre_hooks  # noqa: SLF001  (torch has no public way to ask)
        or optimizer._optimizer_step_post_hooks  # noqa: SLF001
        or torch_optimizer._global_optimizer_pre_hooks  # noqa: SLF001
        or torch_optimizer._global_optimizer_post_hooks  # noqa: SLF001
    )


def _is_in_a_mode() -> bool:
    """Whether the calling thread has entered anything that changes what torch's operations do."""
    inside: Any = torch._C  # noqa: SLF001
    return bool(
        inside._len_torch_function_stack()  # noqa: SLF001
        or inside._len_torch_dispatch_stack()  # noqa: SLF001
        or torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
    )
