"""``local_sgd`` and ``diloco``: the inner optimizer's steps count, and every so often an outer step follows.

A replica joins the job when ``diloco`` is called, and opens each later round at its next inner step. So a
loop that has ended opens no round that the other replicas would wait for.
"""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from fabric.client.attach import Choices, ends_with_a_sentence, make_session
from fabric.client.data.sampler import StepSampler
from fabric.client.loop.model_watch import refuse_optimizers
from fabric.client.loop.session import Session
from fabric.client.loop.solo import SoloSession, SoloStep
from fabric.client.loop.step import Step
from fabric.client.outer.global_parameters import GlobalParameters, local_buffers
from fabric.client.outer.outer_rounds import JobRounds, OuterRounds, SoloRounds
from fabric.client.outer.outer_schedule import OuterSchedule, is_whole
from fabric.errors import ConfigError, FabricError


class OuterLoop:
    """Made by ``local_sgd`` and ``diloco``. Not thread-safe: use it from the training loop's thread."""

    def __init__(
        self,
        session: Session | SoloSession,
        rounds: OuterRounds,
        shared: GlobalParameters,
        inner: torch.optim.Optimizer,
        schedule: OuterSchedule,
        until: int,
    ) -> None:
        self.session = session
        self.shared = shared.module  # the global parameters, under the names of the model's state
        self.step: Step | SoloStep | None = None  # the newest committed outer step
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
    rounds: OuterRounds
    if isinstance(session, SoloSession):
        rounds = SoloRounds(session, shared, outer, schedule)
    else:
        rounds = JobRounds(session, shared, outer, schedule, until)
    loop = OuterLoop(session, rounds, shared, inner, schedule, until)
    if sampler is not None:
        sampler.bind(lambda: loop.drawing_step)
    return loop
