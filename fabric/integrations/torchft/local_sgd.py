"""torchft's LocalSGD and DiLoCo over ``fabric.client``: a step of the Manager is an outer step of the job."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from fabric.client.attach import ends_with_a_sentence
from fabric.client.outer.outer_loop import OuterLoop, OuterSchedule, make_outer_loop
from fabric.errors import ConfigError
from fabric.integrations.torchft.managed_steps import Manager
from fabric.integrations.torchft.wrappers import OptimizerWrapper

# torchft's arguments on where copies lie and how they are sent.
_WITHOUT_EFFECT = {"backup_device", "bucket_cap_mb", "pin_memory", "should_quantize", "use_bucketization"}


class DiLoCo:
    """Within this context, every ``sync_every`` steps of the inner optimizer exchange each fragment once.

    ``model_fragments``: the modules that are exchanged in turn; together they are the model. The context
    ends with the replica's part in the job: the model then has the global parameters. A mistake of the user
    ends the process with one sentence.
    """

    def __init__(
        self,
        manager: Manager,
        model_fragments: Sequence[torch.nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        sync_every: int,
        *,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        **named: Any,
    ) -> None:
        with ends_with_a_sentence():
            _refuse(inner_optimizer, named)
            optimizers = (
                [outer_optimizer]
                if isinstance(outer_optimizer, torch.optim.Optimizer)
                else [*outer_optimizer]
            )
            if len(optimizers) != 1:
                raise ConfigError(
                    f"DiLoCo got {len(optimizers)} outer optimizers: give one, made of the parameters of all "
                    "fragments"
                )
            self._outer = optimizers[0]
            self._schedule = OuterSchedule(
                sync_every, max(len(model_fragments), 1), fragment_sync_delay, fragment_update_alpha
            )
            self._model, self._cuts = _joined(model_fragments)
        self._manager, self._inner = manager, inner_optimizer
        self._loop: OuterLoop | None = None

    def __enter__(self) -> "DiLoCo":
        def begin(state: dict[str, Any], settings: dict[str, Any]) -> OuterLoop:
            arguments = {"state": state, "unshared": "ignore", "buffers": "ignore", **settings}
            return make_outer_loop(
                self._model, self._inner, self._outer, self._schedule, arguments, cuts=self._cuts
            )

        with ends_with_a_sentence():
            self._loop = self._manager.begin_outer(self._model, (self._inner, self._outer), begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # otherwise the end of the process says whether this is a death
            self._manager.shutdown()


class LocalSGD(DiLoCo):
    """Within this context the parameters are averaged after every ``sync_every`` steps of ``optimizer``."""

    def __init__(
        self, manager: Manager, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sync_every: int
    ) -> None:
        average = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        super().__init__(manager, [model], optimizer, average, sync_every)


def _refuse(inner: torch.optim.Optimizer, named: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that cannot be kept."""
    unknown = sorted(set(named) - _WITHOUT_EFFECT)
    if unknown:
        raise ConfigError(f"DiLoCo got {unknown[0]}=, which fabric cannot honour: leave it out")
    if named.get("should_quantize"):
        raise ConfigError(
            "DiLoCo got should_quantize=True: leave it out, and set FABRIC_EXCHANGE=int8 on all replicas"
        )
    if isinstance(inner, OptimizerWrapper):
        raise ConfigError(
            "the inner optimizer is wrapped in OptimizerWrapper, which exchanges every step: give the "
            "optimizer itself"
        )


def _joined(fragments: Sequence[torch.nn.Module]) -> tuple[torch.nn.Module, dict[str, int] | None]:
    """Return the fragments as one module, and the number of the fragment of each of its parameters."""
    if not fragments:
        raise ConfigError("DiLoCo got no model_fragments: give the modules that are exchanged in turn")
    if len(fragments) == 1:
        return fragments[0], None
    model = torch.nn.ModuleList(fragments)
    return model, {name: int(name.split(".", 1)[0]) for name, _ in model.named_parameters()}
