"""``local_sgd`` and ``diloco``: the inner optimizer's steps count, and every so often an outer step follows.

A replica joins the job when ``diloco`` is called, and opens each later round at its next inner step. So a
loop that has ended opens no round that the other replicas would wait for.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fabric.client.attach import Choices, ends_with_a_sentence, make_session
from fabric.client.data.sampler import StepSampler
from fabric.client.gradients.forward_buffers import Buffers, choose_buffers
from fabric.client.gradients.gradient_backend import device_of
from fabric.client.loop.model_watch import refuse_optimizers
from fabric.client.loop.session import Session, SoloSession
from fabric.client.loop.step import Step
from fabric.errors import ConfigError, FabricError
from fabric.protocol.messages import member_events as io

# An outer step is a step of the job. Outer step s exchanges fragment s % fragments, and comes after every
# ``every / fragments`` inner steps, so each fragment is exchanged once in ``every`` inner steps (streaming
# DiLoCo, arXiv 2501.18512, with fragments of consecutive parameters).


@dataclass(frozen=True, slots=True)
class OuterSchedule:
    """The numbers given to ``fabric.client.diloco``. Raises ConfigError for those that do not fit."""

    every: int  # inner steps between two exchanges of the same parameter
    fragments: int = 1
    delay: int = 0  # inner steps from a contribution to the use of its result
    alpha: float = 0.0  # share of the local parameters in the mix after an outer step

    def __post_init__(self) -> None:
        for name, value, least in (("every", self.every, 1), ("fragments", self.fragments, 1)):
            if not is_whole(value) or value < least:
                raise ConfigError(f"{name} is {value!r}: give a whole number from {least}")
        if self.every % self.fragments:
            raise ConfigError(
                f"every is {self.every} and fragments is {self.fragments}: give an every that is a multiple "
                "of fragments, because fragments take turns at equal distances"
            )
        if not is_whole(self.delay) or not 0 <= self.delay < self.span:
            raise ConfigError(
                f"delay is {self.delay!r}: give a whole number from 0 to {self.span - 1}, so that one "
                f"fragment's exchange ends before the next begins (every / fragments is {self.span})"
            )
        if not isinstance(self.alpha, int | float) or not 0 <= self.alpha <= 1:
            raise ConfigError(
                f"alpha is {self.alpha!r}: give a number from 0 (global) to 1 (local parameters)"
            )

    @property
    def span(self) -> int:
        """The inner steps of one outer step."""
        return self.every // self.fragments

    def describe(self) -> dict[str, object]:
        """Return what must be equal on all members."""
        return {"loop": "diloco", **asdict(self), "alpha": float(self.alpha)}


def cut_fragments(sizes: Sequence[int], fragments: int) -> list[int]:
    """Return the fragment of each parameter: consecutive parameters, of about equal total size.

    ``sizes``: the elements of each parameter. Each fragment gets a parameter. Raises ConfigError.
    """
    if fragments > len(sizes):
        raise ConfigError(
            f"fragments is {fragments} and the model has {len(sizes)} trainable parameters: give at most one "
            "fragment per parameter"
        )
    chosen: list[int] = []
    total, before, fragment = sum(sizes), 0, 0
    for place, size in enumerate(sizes):
        left = len(sizes) - place
        must = left == fragments - fragment - 1  # each parameter that is left begins a fragment
        full = before + size / 2 > total * (fragment + 1) / fragments
        if place and chosen[-1] == fragment and fragment + 1 < fragments and (must or full):
            fragment += 1
        chosen.append(fragment)
        before += size
    return chosen


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A trainable parameter of the model with its global copy."""

    name: str
    local: torch.nn.Parameter
    shared: torch.nn.Parameter
    fragment: int


class GlobalParameters:
    """``module`` has copies of the model's trainable parameters, under the names of the model's state.

    Frozen parameters and buffers are the model's own tensors. ``cuts``: the fragment of each parameter, by
    name; by default consecutive parameters of about equal size. Raises ConfigError.

    A pseudo-gradient is the global parameters minus the local ones. It lies in the global parameters'
    ``.grad``, is averaged like any gradient, and the outer optimizer applies it to the global parameters.
    """

    def __init__(self, model: torch.nn.Module, fragments: int, cuts: Mapping[str, int] | None = None) -> None:
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        numbers = cut_fragments([p.numel() for _, p in trainable], fragments)
        if cuts is not None:
            numbers = [cuts[name] for name, _ in trainable]
            empty = set(range(fragments)) - set(numbers)
            if empty:
                raise ConfigError(
                    f"fragment {min(empty)} has no trainable parameter of its own: give each fragment one"
                )
        copies = {id(p): torch.nn.Parameter(p.detach().clone()) for _, p in trainable}
        self.fragments = {name: number for (name, _), number in zip(trainable, numbers, strict=True)}
        self.module = _mirror(model, copies, {})
        self._pairs = [_Pair(name, p, copies[id(p)], self.fragments[name]) for name, p in trainable]

    def move(self, outer: torch.optim.Optimizer) -> None:
        """Let ``outer``, which was made for the model's parameters, update their global copies.

        Raises ConfigError, and changes nothing, unless it has each trainable parameter and no state yet.
        """
        if outer.state:
            raise ConfigError(
                "the outer optimizer has made steps already: make it just before diloco is called"
            )
        copies = {id(x.local): x.shared for x in self._pairs}
        given = {id(p) for group in outer.param_groups for p in group["params"]}
        left_out = next((x.name for x in self._pairs if id(x.local) not in given), "")
        strange = bool(given - set(copies))
        if left_out or strange:
            what = "has a parameter that is not trainable in the model" if strange else f"lacks {left_out}"
            raise ConfigError(
                f"the outer optimizer {what}: make it of model.parameters(), as SGD(model.parameters(), ...)"
            )
        for group in outer.param_groups:
            group["params"] = [copies[id(p)] for p in group["params"]]

    @property
    def has_gradient(self) -> bool:
        """Whether a pseudo-gradient lies in ``.grad``."""
        return any(x.shared.grad is not None for x in self._pairs)

    @torch.no_grad()
    def set_gradient(self, fragment: int) -> None:
        """Put the pseudo-gradient of ``fragment`` into ``.grad``; the other fragments have None."""
        for x in self._pairs:
            x.shared.grad = x.shared - x.local if x.fragment == fragment else None

    def keep_gradient(self, fragment: int) -> None:
        """Drop the gradients of all other fragments: their optimizer state must not move."""
        for x in self._pairs:
            if x.fragment != fragment:
                x.shared.grad = None

    @torch.no_grad()
    def load(self, fragment: int | None = None, alpha: float = 0.0) -> None:
        """Set the local parameters to alpha * local + (1 - alpha) * global, of one or all fragments."""
        for x in self._pairs:
            if fragment is None or x.fragment == fragment:
                x.local.lerp_(x.shared, 1 - alpha) if alpha else x.local.copy_(x.shared)


def local_buffers(model: torch.nn.Module, buffers: Buffers) -> dict[str, str]:
    """Return the choice ``ignore`` for the buffers that inner steps change.

    Raises ConfigError for a model whose parts cannot be shared by outer steps.
    """
    trainable = tuple((name, p) for name, p in model.named_parameters() if p.requires_grad)
    if len({p.device for _, p in trainable}) > 1:
        device_of(trainable)  # raises an error that names two parameters
    if not trainable:
        raise ConfigError("the model has no parameter that requires a gradient: there is nothing to exchange")
    choices = choose_buffers(model, "average" if buffers == "refuse" else buffers)
    for name in choices.carried:
        raise ConfigError(
            f"forward changes the buffer {name!r} in inner steps, differently on each replica: "
            'pass buffers="ignore" to keep such buffers local, or use a layer without running statistics'
        )
    return dict.fromkeys(choices.local, "ignore")


def _mirror(
    module: torch.nn.Module, copies: dict[int, torch.nn.Parameter], met: dict[int, torch.nn.Module]
) -> torch.nn.Module:
    """Return a module with the names of ``module``, with ``copies`` in place of trainable parameters."""
    if id(module) in met:
        return met[id(module)]
    mirror = met[id(module)] = torch.nn.Module()
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        mirror.register_parameter(name, copies.get(id(parameter), parameter))
    kept = set(module.state_dict(keep_vars=True))
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        mirror.register_buffer(name, buffer, persistent=name in kept)
    for name, child in module._modules.items():  # noqa: SLF001  (named_children leaves out repeated ones)
        mirror.add_module(name, _mirror(child, copies, met) if child is not None else None)
    return mirror


class OuterUpdates:
    """Makes pseudo-gradients, and applies those that are committed."""

    def __init__(
        self, shared: GlobalParameters, outer: torch.optim.Optimizer, schedule: OuterSchedule
    ) -> None:
        self.shared, self.schedule, self._outer = shared, schedule, outer

    def hand_over(self, step: int) -> None:
        self.shared.set_gradient(step % self.schedule.fragments)

    def apply(self, step: Step) -> None:
        """Update the global parameters of the step's fragment, and then the local ones.

        If the step has nothing of this replica, the local parameters begin from the global ones.
        """
        fragment = step.number % self.schedule.fragments
        self.shared.keep_gradient(fragment)
        self._outer.step()
        self._outer.zero_grad(set_to_none=True)
        if step.contributed:
            self.shared.load(fragment, self.schedule.alpha)
        else:
            self.shared.load()


class JobRounds:
    """The rounds of a job: ``session`` joins the job at the first ``open``."""

    def __init__(self, session: Session, updates: OuterUpdates, until: int = sys.maxsize) -> None:
        self.is_open = False  # whether this replica may contribute to the round of the committed step
        self._session, self._updates, self._shared = session, updates, updates.shared
        self._until = until
        self._order: io.Compute | None = None
        self._arrived: io.Apply | io.Finish | None = None
        self._loads = 0  # the session's loads when the pseudo-gradient was handed over
        self._weight = 0.0
        session.start_exchanges(updates.schedule.describe(), until)

    def open(self) -> bool:
        """Begin the next outer step. Return whether the local parameters were replaced."""
        session = self._session
        loads, replayed = session.loads, 0
        while session.committed_step < self._until:
            order = session.reach_boundary()
            if isinstance(order, io.Compute):
                self._order, self.is_open = order, True
                break
            if isinstance(order, io.Finish) and session.committed_step >= self._until:
                break  # the state that was loaded on the way is the final one
            self._updates.apply(session.end_step(order))
            replayed += 1
        if session.loads != loads:
            self._shared.load()
        return replayed > 0 or session.loads != loads

    def hand_over(self) -> None:
        """Contribute the pseudo-gradient; never wait."""
        assert self._order is not None
        session, order = self._session, self._order
        self._loads, self._weight = session.loads, 1.0 if session.take_drawn() else 0.0
        self._updates.hand_over(order.step)
        session.contribute(order, self._weight)
        self.is_open = False
        self.poll()

    def poll(self) -> bool:
        """Do what the exchange under way needs; never wait. Return whether this replica fell behind."""
        if self._arrived is None and (order := self._session.orders.poll()) is not None:
            self._note(order)
        return isinstance(self._arrived, io.Apply) and self._arrived.prepared is None

    def commit(self) -> Step:
        """Wait for the round's commit, and apply it."""
        while self._arrived is None:
            self._note(self._session.orders.next())
        step = self._session.end_step(self._arrived)
        self._arrived = None
        self._updates.apply(step)
        if step.replayed:
            self.open()
        return step

    def _note(self, order: io.Compute | io.Apply | io.Finish) -> None:
        if not isinstance(order, io.Compute):
            self._arrived = order
            return
        # The round was redone. The kept gradient counts already, a dropped one is handed over again, unless
        # a loaded state has replaced the global parameters.
        assert self._order is not None
        dropped = not self._shared.has_gradient
        same = order.step == self._order.step and self._session.loads == self._loads
        if dropped and same:
            self._updates.hand_over(order.step)
        self._session.contribute(order, self._weight if dropped and same else 0.0)


class SoloRounds:
    """As JobRounds with FABRIC_DISABLE=1: this process's pseudo-gradient is the average."""

    is_open = True

    def __init__(self, session: SoloSession, updates: OuterUpdates) -> None:
        self._session, self._updates = session, updates

    def open(self) -> bool:
        return False

    def hand_over(self) -> None:
        self._updates.hand_over(self._session.committed_step)

    def poll(self) -> bool:
        return False

    def commit(self) -> Step:
        step = self._session.exchange()
        self._updates.apply(step)
        return step


class OuterLoop:
    """Made by ``local_sgd`` and ``diloco``. Not thread-safe: use it from the training loop's thread."""

    def __init__(
        self,
        session: Session | SoloSession,
        rounds: JobRounds | SoloRounds,
        shared: GlobalParameters,
        inner: torch.optim.Optimizer,
        schedule: OuterSchedule,
        until: int,
    ) -> None:
        self.session = session
        self.shared = shared.module  # the global parameters, under the names of the model's state
        self.step: Step | None = None  # the newest committed outer step
        self._rounds = rounds
        self._shared = shared
        self._schedule = schedule
        self._until = until
        self._made = 0  # inner steps since the last contribution
        self._under_way = False  # a contribution whose result is not applied yet
        rounds.open()
        self._hooks = [
            inner.register_step_pre_hook(self._before_inner_step),
            inner.register_step_post_hook(self._after_inner_step),
        ]

    @property
    def committed_step(self) -> int:
        """Committed outer steps that the global parameters have."""
        return self.session.committed_step

    @property
    def drawing_step(self) -> int:
        """The outer step for which the loop draws data now."""
        return self.session.committed_step + self._under_way

    def metrics(self, **values: float) -> None:
        """Add to the sums of the outer step; ``step.metrics`` has the totals of a committed one."""
        self.session.metrics(**values)

    def busy(self, reason: str, at_most_s: float) -> AbstractContextManager[None]:
        """As ``Session.busy``."""
        return self.session.busy(reason, at_most_s)

    def close(self) -> None:
        """Wait for the round under way and the end of the job. The model then has the global parameters."""
        if self._under_way:
            self._commit()
        for hook in self._hooks:
            hook.remove()
        self.session.close()
        self._shared.load()

    def _before_inner_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        if any(callable(x) for x in (*args[1:], named.get("closure"))):
            raise ConfigError(
                "the inner optimizer's step got a closure, which may count as several steps: call step()"
            )
        if self._under_way:
            return
        if self.committed_step >= self._until:
            raise FabricError(
                f"the job ends at outer step {self._until}, which is committed: end the loop when "
                "committed_step reaches until"
            )
        if not self._rounds.is_open and self._rounds.open():
            # The gradient is that of the replaced parameters. The step counts, because its data are drawn.
            optimizer.zero_grad(set_to_none=True)

    def _after_inner_step(self, *_: object) -> None:
        self._made += 1
        if self._under_way and (self._rounds.poll() or self._made >= self._schedule.delay):
            self._commit()
        if self._made >= self._schedule.span:
            self._made, self._under_way = 0, True
            self._rounds.hand_over()
            if not self._schedule.delay:
                self._commit()

    def _commit(self) -> None:
        self.step = self._rounds.commit()
        self._under_way = False


def diloco(
    model: torch.nn.Module,
    inner: torch.optim.Optimizer,
    outer: torch.optim.Optimizer,
    *,
    every: int,
    fragments: int = 1,
    delay: int = 0,
    alpha: float = 0.0,
    **arguments: Any,
) -> OuterLoop:
    """Join the job with inner steps on this replica alone and an outer step every ``every`` inner steps.

    ``inner``: the optimizer of your loop. ``outer``: made of ``model.parameters()``, without steps yet, as
    SGD with Nesterov momentum; it is moved to the global parameters. ``fragments``: the model is exchanged in
    that many parts, in turn, ``every / fragments`` inner steps apart. ``delay``: the inner steps that go on
    while a fragment is exchanged, below ``every / fragments``. ``alpha``: from 0 to 1, the share of the local
    parameters in the mix with the global ones after an outer step.

    ``arguments``: ``until``, the outer step at which all loops end; ``state``, ``buffers`` (``ignore``),
    ``snapshots``, ``unshared``, ``step`` and ``sampler`` as for ``attach``; and settings. A mistake of the
    user ends the process with one sentence and exit code 1.

    Sources: DiLoCo, arXiv 2311.08105; streaming DiLoCo, arXiv 2501.18512.
    """
    with ends_with_a_sentence():
        return make_outer_loop(model, inner, outer, OuterSchedule(every, fragments, delay, alpha), arguments)


def local_sgd(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, every: int, **arguments: Any
) -> OuterLoop:
    """Join the job with steps on this replica alone, and average the parameters every ``every`` steps.

    This is DiLoCo with SGD of learning rate 1 as outer optimizer. ``arguments``: as for ``diloco``. Source:
    arXiv 1805.09767.
    """
    with ends_with_a_sentence():
        average = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        return make_outer_loop(model, optimizer, average, OuterSchedule(every), arguments)


def make_outer_loop(
    model: torch.nn.Module,
    inner: torch.optim.Optimizer,
    outer: torch.optim.Optimizer,
    schedule: OuterSchedule,
    arguments: Mapping[str, Any],
    cuts: Mapping[str, int] | None = None,
) -> OuterLoop:
    """As ``diloco``, and raise its errors. ``cuts``: the fragment of each parameter, by name."""
    settings = dict(arguments)
    until, state = settings.pop("until", sys.maxsize), dict(settings.pop("state", None) or {})
    sampler: StepSampler | None = settings.get("sampler")
    given = {
        name: settings.pop(name) for name in ("snapshots", "unshared", "step", "sampler") if name in settings
    }
    buffers = settings.pop("buffers", "refuse")
    for role, optimizer in (("inner", inner), ("outer", outer)):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"the {role} optimizer is a {type(optimizer).__name__}: give a torch optimizer")
    if not is_whole(until) or until < 1:
        raise ConfigError(f"until is {until!r}: give the outer step at which all loops end, from 1")
    if inner is outer:
        raise ConfigError("inner and outer are one optimizer: make two, each of model.parameters()")
    refuse_optimizers([inner, outer])
    local = local_buffers(model, buffers)
    shared = GlobalParameters(model, schedule.fragments, cuts)
    shared.move(outer)
    choices = Choices(local, fragments=shared.fragments, **given)
    session = make_session(shared.module, outer, state, choices, settings)
    updates = OuterUpdates(shared, outer, schedule)
    rounds = (
        SoloRounds(session, updates)
        if isinstance(session, SoloSession)
        else JobRounds(session, updates, until)
    )
    loop = OuterLoop(session, rounds, shared, inner, schedule, until)
    if sampler is not None:
        sampler.bind(lambda: loop.drawing_step)
    return loop
