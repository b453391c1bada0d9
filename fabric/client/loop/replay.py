"""How a joining replica catches up: it loads a fetched state, then replays published gradients.

The other members keep stepping, and the replay must not slow them down. On the CPU the heavy work runs in
another thread at low priority (``runtime.priority``), and the main thread waits for it. Heavy work is loading
and digesting the state, writing a replayed gradient into ``.grad``, and the steps of torch's own optimizers.
The main thread runs user code and, on a device or in a replica of several ranks, all other work. When a
roster lists this replica the others wait for it, and all work keeps its priority.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from fabric.ckpt_server.format.manifest import part_digest
from fabric.ckpt_server.state.training_state import restore, verify
from fabric.client.control.engine import Engine, EngineParts
from fabric.client.loop.local_state import LocalState, LoopProgress
from fabric.errors import FabricError
from fabric.protocol.messages import member_events as io
from fabric.runtime.priority import run_low_priority


class Replay:
    """Brings ``state`` up to the step of the other members."""

    def __init__(self, parts: EngineParts, engine: Engine, state: LocalState, progress: LoopProgress) -> None:
        self._parts = parts
        self._engine = engine
        self._state = state
        self._progress = progress
        self._replayed = 0  # number of steps replayed since this process loaded the state
        self._steps: LowPrioritySteps | None = None

    def begin(self) -> None:
        """Prepare for the user's code to apply a published gradient."""
        self._replayed += 1
        self._progress.behind = True
        if self._state.may_yield:
            objects = self._state.describer.objects.values()
            self._steps = LowPrioritySteps([x for x in objects if isinstance(x, torch.optim.Optimizer)])

    def end(self) -> None:
        """Note that the user's code has applied the gradient."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def install(self, order: io.Install) -> None:
        """Load the fetched state, and verify it once loaded. The fetch has verified it as a whole."""
        fetched_state = self._parts.fetch_thread.take_state()
        assert fetched_state is not None
        # The manifest has the digest of this rank's part; the order has the digest of the replica's state.
        fetched = fetched_state.fetched
        self._parts.points.hit("install", order.step)
        self._state.drop_gradient()
        self._state.wait_changeable()
        self._progress.behind = True
        objects, run = self._state.describer.objects, self._state.run
        try:
            restore(fetched_state.file, objects, run)
            verify(objects, order.step, fetched.manifest["digest"], run, self._state.describer.by_name)
            self._progress.state_step = order.step
            digest = self._state.name_installed(fetched_state.file, fetched.manifest)
        except FabricError as error:
            self._engine.post(io.InstallFailed(f"the state of step {order.step} does not fit: {error}"))
            return
        self._parts.buffers.begin()
        self._progress.loads += 1
        self._progress.source = ", ".join(sorted(fetched.sources)) or "this host"
        # A state that came from another kind of device has another name here.
        if not fetched_state.resharded and part_digest(fetched.manifest) == digest:
            self._parts.snapshots.serve(fetched_state.slot, fetched.manifest, fetched.seconds)
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
        self._state.note(digest)
        news = self._progress.take_news()
        self._engine.post(io.Installed(order.step, digest, order.step >= self._progress.until, news))

    def note_joined(self, prepared: io.PreparedRound) -> None:
        """Journal the first round of a replica that has caught up."""
        if self._progress.behind:
            self._progress.behind = False
            replayed, self._replayed = self._replayed, 0
            self._parts.journal.write("joined", epoch=prepared.epoch, step=prepared.step, replayed=replayed)


# --- optimizer steps at low priority ------------------------------------------------------------------------
# All user code stays in the main thread: hooks, closures, schedulers, optimizers of other classes.


class LowPrioritySteps:
    """Until ``close`` each plain ``step()`` of ``optimizers`` runs at low priority."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._open = True
        # Each optimizer with its new method ``step``, and its own attribute ``step``, where it had one.
        self._wrapped = [(x, *self._wrap(x)) for x in optimizers if _is_plain(x)]

    def close(self) -> None:
        """Run later steps in the thread that calls them."""
        self._open = False  # code may still call a new method after it was removed
        for optimizer, method, before in self._wrapped:
            if optimizer.__dict__.get("step") is method:
                optimizer.__dict__.pop("step")
                optimizer.__dict__.update(before)
        self._wrapped = []

    def _wrap(self, optimizer: torch.optim.Optimizer) -> tuple[Callable[..., Any], dict[str, Any]]:
        original = optimizer.step
        before = {"step": optimizer.__dict__["step"]} if "step" in optimizer.__dict__ else {}

        @functools.wraps(original)
        def step(_: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
            # A closure (user code) and torch's modes, which hold in one thread, need the step in this thread.
            own = self._open and not (arguments or named or _is_in_a_mode() or _has_hooks(optimizer))
            return run_low_priority(original) if own else original(*arguments, **named)

        # A scheduler created later wraps ``step`` too, and expects a bound method.
        method = optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        return method, before


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's ``step`` is torch's code on the CPU, wrapped at most by torch's schedulers."""
    kind, own = type(optimizer), optimizer.__dict__.get("step")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return (
        f"{kind.__module__}.".startswith("torch.optim.")
        and (own is None or getattr(own, "__wrapped__", None) is kind.step)
        and all(type(p) in (torch.Tensor, torch.nn.Parameter) and p.device.type == "cpu" for p in parameters)
    )


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step calls hooks of the user. Those of fabric may run in any thread."""
    tables: tuple[Any, ...] = (
        optimizer._optimizer_step_pre_hooks,  # noqa: SLF001  (torch has no public way to ask)
        optimizer._optimizer_step_post_hooks,  # noqa: SLF001
        torch_optimizer._global_optimizer_pre_hooks,  # noqa: SLF001
        torch_optimizer._global_optimizer_post_hooks,  # noqa: SLF001
    )
    hooks = (hook for table in tables for hook in table.values())
    return not all(str(getattr(hook, "__module__", "")).startswith("fabric.") for hook in hooks)


def _is_in_a_mode() -> bool:
    """Whether the calling thread has entered a mode that changes torch's operations."""
    inside: Any = torch._C  # noqa: SLF001
    return bool(
        inside._len_torch_function_stack()  # noqa: SLF001
        or inside._len_torch_dispatch_stack()  # noqa: SLF001
        or torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
    )
