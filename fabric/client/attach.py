"""``attach``: from a model and its optimizer to a session; what can be refused is refused here, by name."""

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fabric.ckpt_server.fetch import StateFetcher
from fabric.ckpt_server.handle import ServerHandle
from fabric.ckpt_server.snapshot import CpuCopier, CudaCopier
from fabric.ckpt_server.state import check_serialisable
from fabric.client.engine import Parts
from fabric.client.exchange import Exchange
from fabric.client.journal import Journal
from fabric.client.leader_link import LeaderLink
from fabric.client.mistakes import tell_uncaught_mistakes
from fabric.client.peers import Peers
from fabric.client.session import Session
from fabric.client.slots import GradientSlots
from fabric.client.snapshots import OverheadBudget, Snapshots
from fabric.client.solo import SoloSession
from fabric.client.transfer import Transfer
from fabric.client.worker import Worker
from fabric.errors import ConfigError, FabricError
from fabric.ftar.buckets import FlatGradients
from fabric.ftar.tcp_ring import TcpRing
from fabric.runtime.config import Settings, settings
from fabric.runtime.points import Points
from fabric.transport.tcp import Identity

# How long links of a new epoch may take before the leader hears of it and forms another one.
LINK_S = 5.0


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    state: Mapping[str, Any] | None = None,
    buffers: str = "refuse",
    **arguments: Any,
) -> "Session | SoloSession":
    """Join this process to the job that the environment (or ``arguments``) names.

    ``state``: further objects with ``state_dict`` and ``load_state_dict`` that are part of the shared state.
    ``buffers``: what to do with buffers that forward changes (BatchNorm): ``refuse`` or ``ignore`` (each
    replica keeps its own, and they are not part of the shared state). ``arguments`` are the fields of
    ``fabric.runtime.config.Settings``. A mistake that a person can mend ends the process with one sentence
    and exit code 1; with FABRIC_DISABLE=1 a session without any service is returned.
    """
    tell_uncaught_mistakes()
    try:
        return _attach(model, optimizer, dict(state or {}), buffers, arguments)
    except FabricError as error:
        sys.stderr.write(f"fabric: {error}\n")
        raise SystemExit(1) from None


def _attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    buffers: str,
    arguments: Mapping[str, Any],
) -> "Session | SoloSession":
    found = settings(**arguments)
    objects = _shared_state(model, optimizer, state, buffers)
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError("the model has no parameter that requires a gradient: there is nothing to exchange")
    if found.disable:
        return SoloSession([p for _, p in parameters], objects)
    check_serialisable(objects)
    gradients = FlatGradients(parameters)
    incarnation, gone = _claim(found.home)
    points = Points(found.points)
    journal = Journal(found.journal, found.replica, incarnation)
    token = found.token
    handle = ServerHandle.start_or_attach(
        job=found.job,
        replica=found.replica,
        incarnation=incarnation,
        run_dir=found.home,
        bind=found.bind,
        port="0",
        advertise=found.advertise,
        token_file=found.token_file,
        lighthouse=found.lighthouse,
        orphan_s=found.orphan_s,
    )
    parts, snapshots = _parts(found, (incarnation, token), handle, gradients, objects, (journal, points))
    return Session(found, incarnation, gone, objects, gradients, snapshots, parts)


def _parts(
    found: Settings,
    identity: tuple[int, bytes],
    handle: ServerHandle,
    gradients: FlatGradients,
    objects: Mapping[str, object],
    records: tuple[Journal, Points],
) -> tuple[Parts, Snapshots]:
    incarnation, token = identity
    journal, points = records

    def crash(error: BaseException) -> None:
        """A defect in one of the threads: say so and end, the launcher starts this replica anew."""
        sys.stderr.write(f"fabric: {found.replica}: internal error: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(75)

    on_device = any(p.is_cuda for _, p in gradients.parameters)
    copier = CudaCopier() if on_device else CpuCopier()
    budget = OverheadBudget(found.snapshot_share)
    slots = GradientSlots(handle, gradients.nbytes, gradients.layout)

    def recover() -> None:
        """The checkpoint server is gone: start another one, with new memory for the rounds to come."""
        with contextlib.suppress(FabricError):
            if handle.ensure():
                slots.reset()

    who = (found.job, found.replica)
    snapshots = Snapshots(handle, objects, copier, budget, who, on_device, recover)
    plane = TcpRing(exchange_s=found.exchange_s, on_piece=lambda step: points.reach("ring", step))
    peers = Peers(Identity(found.job, found.replica), incarnation, token, plane, LINK_S)
    leader = LeaderLink(found)
    parts = Parts(
        handle=handle,
        plane=plane,
        peers=peers,
        leader=leader,
        slots=slots,
        exchange=Exchange(plane, gradients, slots, points, crash),
        transfer=Transfer(lambda: StateFetcher(token.decode()), snapshots, gradients.nbytes, points, crash),
        keeper=Worker("fabric-keeper", crash),
        recover=recover,
        journal=journal,
        points=points,
    )
    return parts, snapshots


def _shared_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], buffers: str
) -> dict[str, object]:
    for name, value in state.items():
        if name in ("model", "optimizer"):
            raise ConfigError(f'state has the name "{name}", which is taken: use another one')
        if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
            raise ConfigError(
                f"state[{name!r}] is a {type(value).__name__} without state_dict and load_state_dict: wrap it"
            )
    changing = _changing_buffers(model)
    if buffers not in ("refuse", "ignore"):
        raise ConfigError(f'buffers is "{buffers}": it must be "refuse" or "ignore"')
    if changing and buffers == "refuse":
        raise ConfigError(
            f"forward changes the buffer {changing[0]!r} differently on every replica: pass "
            'buffers="ignore" to keep them local, or use a layer without running statistics'
        )
    shared: object = WithoutBuffers(model, changing) if changing else model
    return {"model": shared, "optimizer": optimizer, **state}


def _changing_buffers(model: torch.nn.Module) -> list[str]:
    """Names of buffers that forward changes: running statistics of normalisation layers."""
    return [
        name
        for name, _ in model.named_buffers()
        if name.rsplit(".", 1)[-1] in ("running_mean", "running_var", "num_batches_tracked")
    ]


class WithoutBuffers:
    """A module's state without the buffers that stay local."""

    def __init__(self, model: torch.nn.Module, names: list[str]) -> None:
        self._model = model
        self._names = frozenset(names)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The module's own, less the local buffers."""
        return {k: v for k, v in self._model.state_dict().items() if k not in self._names}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load everything else; the local buffers stay as they are."""
        own = {k: v for k, v in self._model.state_dict().items() if k in self._names}
        self._model.load_state_dict({**state, **own})


_claims: list[int] = []  # the lock lives as long as the process: nobody closes these descriptors


def _claim(home: Path) -> tuple[int, bool]:
    """Take this replica's place on this host: (incarnation, whether an earlier process surely ended).

    The lock is a POSIX record lock: it ends with the process and is not inherited by forked workers.
    """
    path = home / "trainer.lock"
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        before = path.exists()
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"the folder {home} cannot be used ({error.strerror}): name one of this user in FABRIC_RUN_DIR"
        ) from error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(
            f"another living process has this replica id on this host ({path} is locked): give every "
            "replica its own FABRIC_REPLICA, or end that process first"
        ) from None
    _claims.append(descriptor)
    text = os.pread(descriptor, 32, 0)
    last = int(text) if text.strip().isdigit() else 0
    incarnation = max(int(time.time() * 1000), last + 1)
    os.pwrite(descriptor, f"{incarnation}\n".encode().ljust(24), 0)
    return incarnation, before
