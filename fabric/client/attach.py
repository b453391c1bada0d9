"""``attach``: from a model and its optimizer to a session; what can be refused is refused here, by name."""

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fabric.ckpt_server.attach.server_handle import ServerHandle
from fabric.ckpt_server.fetch.fetcher import StateFetcher
from fabric.ckpt_server.reshard.relayout import Layout
from fabric.ckpt_server.state.snapshot import Copier, CpuCopier, CudaCopier, CudaLane
from fabric.ckpt_server.state.training_state import Describer, check_serialisable
from fabric.client.control.engine import EngineParts
from fabric.client.control.lighthouse_link import LighthouseLink
from fabric.client.control.peers import Peers
from fabric.client.gradients.averaged_buffers import AveragedBuffers, changing_buffers
from fabric.client.gradients.exchange_thread import ExchangeThread
from fabric.client.gradients.gradient_backend import choose_backend, device_of
from fabric.client.gradients.gradient_slots import GradientSlots
from fabric.client.loop.model_watch import ModelWatch, refuse_optimizers
from fabric.client.loop.session import Session
from fabric.client.loop.solo import SoloSession
from fabric.client.loop.unshared_schedulers import UNSHARED, UnsharedWatch
from fabric.client.process.crash_marker import CrashMarker
from fabric.client.process.excepthook import install_excepthook
from fabric.client.process.journal import Journal
from fabric.client.process.process_identity import ProcessIdentity
from fabric.client.process.rank_group import RankGroup
from fabric.client.process.worker import Worker
from fabric.client.state.durable_policy import DurableCheckpoints
from fabric.client.state.fetch_thread import FetchThread
from fabric.client.state.snapshot_policy import SnapshotPolicy, policy_of
from fabric.client.state.snapshots import Snapshots
from fabric.client.state.state_loader import StateLoader
from fabric.errors import ConfigError, FabricError, ServerLost
from fabric.ftar.buckets import FlatGradients
from fabric.protocol.rules.adaptive_timeout import Budget
from fabric.runtime import logs
from fabric.runtime.config import Settings, parse_replicas, settings
from fabric.runtime.failpoints import Failpoints
from fabric.runtime.http.http_service import parse_ports
from fabric.runtime.http.token_file import TokenFile
from fabric.runtime.private_folder import make_private, open_private
from fabric.transport.tcp import ListenerIdentity

MAX_STEP = 1 << 60
# What may become of buffers that forward changes.
BUFFERS = ("refuse", "average", "ignore")

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Choices:
    """What ``attach`` was told besides model, optimizer, state and settings. Raises ConfigError."""

    buffers: str = "refuse"
    snapshots: SnapshotPolicy | None = None
    unshared: str = "refuse"
    step: int = 0

    def __post_init__(self) -> None:
        if self.buffers not in BUFFERS:
            raise ConfigError(f'buffers is "{self.buffers}": it must be "average", "ignore" or "refuse"')
        if self.unshared not in UNSHARED:
            raise ConfigError(f'unshared is "{self.unshared}": it must be "refuse" or "ignore"')
        if not 0 <= self.step <= MAX_STEP:
            raise ConfigError(
                f"step is {self.step}: give the number of optimizer steps that are done already"
            )


def attach(
    model: torch.nn.Module,
    optimizer: Optimizers,
    *,
    state: Mapping[str, Any] | None = None,
    buffers: str = "refuse",
    snapshots: SnapshotPolicy | None = None,
    unshared: str = "refuse",
    step: int = 0,
    **arguments: Any,
) -> "Session | SoloSession":
    """Join this process to the job that the environment (or ``arguments``) names.

    ``optimizer``: one, several in a sequence, or several by name; all of them are part of the shared state.
    ``state``: further objects with ``state_dict`` and ``load_state_dict`` that are part of the shared state.
    ``buffers``: what to do with buffers that forward changes (BatchNorm): ``refuse``, ``average`` (by weight,
    at the commit: they are shared state) or ``ignore`` (each replica keeps its own, and they are not part of
    the shared state). ``snapshots``: when to take one, instead of what the settings say.
    ``unshared``: what to do with a learning rate scheduler, or a scaler, that is not in ``state``: ``refuse``
    or ``ignore``. ``step``: where a job begins that nobody remembers, such as the step of a checkpoint that
    you have loaded; a replica that joins takes the job's step instead.

    ``arguments`` are the fields of ``fabric.runtime.config.Settings``. A mistake that a person can mend ends
    the process with one sentence
    and exit code 1; with FABRIC_DISABLE=1 a session without any service is returned.
    """
    install_excepthook()
    try:
        choices = Choices(buffers, snapshots, unshared, step)
        return _attach(model, optimizer, dict(state or {}), choices, arguments)
    except FabricError as error:
        sys.stderr.write(f"fabric: {error}\n")
        # A checkpoint server that is stopped, or that has no room now, may answer the next process.
        raise SystemExit(75 if isinstance(error, ServerLost) else 1) from None


def _attach(
    model: torch.nn.Module,
    optimizer: Optimizers,
    state: dict[str, Any],
    choices: Choices,
    arguments: Mapping[str, Any],
) -> "Session | SoloSession":
    buffers = choices.buffers
    found = settings(**arguments)
    refuse_optimizers(_by_name(optimizer).values())
    group = RankGroup.find()
    objects = _shared_state(model, optimizer, state, buffers)
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError("the model has no parameter that requires a gradient: there is nothing to exchange")
    watch = UnsharedWatch(_by_name(optimizer).values(), state, ignored=choices.unshared == "ignore")
    watch.check()
    if found.disable:
        replicas = parse_replicas(found.replicas)[1]
        return SoloSession([p for _, p in parameters], objects, found.on_nan, replicas, group, choices.step)
    check_serialisable(objects)
    averaged = AveragedBuffers(model, changing_buffers(model) if buffers == "average" else [])
    gradients = FlatGradients([*parameters, *averaged.stand_ins])
    place = _take_place(found, group)
    found = found.of_rank(place.rank)
    incarnation = place.incarnation
    logs.set_up("trainer", found.log, whole_process=False)
    logs.describe(
        job=found.job,
        replica=found.replica,
        incarnation=incarnation,
        rank=place.rank or None,
        epoch=None,
        incident_id="",
    )
    points = Failpoints(found.points)
    journal = Journal(found.journal, found.replica, incarnation)
    handle = _server(found, place)
    policy = choices.snapshots or policy_of(found)
    describer = Describer(objects, averaged.standing)
    parts = _parts(found, place, handle, (gradients, averaged), (describer, policy), (journal, points))
    session = Session(found, place, describer, gradients, parts, ModelWatch(model, parameters, watch))
    session.begin_at(choices.step)
    session.start_debug_endpoint()
    return session


def _server(found: Settings, place: ProcessIdentity) -> ServerHandle:
    """This process's checkpoint server: one that lives still, or a new one."""
    return ServerHandle.start_or_attach(
        job=found.job,
        replica=found.replica,
        incarnation=place.incarnation,
        run_dir=found.home,
        bind=found.bind,
        port=_server_port(found.ports),
        advertise=found.advertise,
        token_file=found.token_file,
        lighthouse=found.lighthouse,
        orphan_s=found.orphan_s,
        rank=place.rank,
        tls=found.tls,
    )


def _server_port(ports: str) -> str:
    """A range is for all processes of a replica; a single port is for the trainer's links."""
    return ports if len(parse_ports(ports)) > 1 else "0"


def _parts(
    found: Settings,
    place: ProcessIdentity,
    handle: ServerHandle,
    model_parts: tuple[FlatGradients, AveragedBuffers],
    state: tuple[Describer, SnapshotPolicy],
    records: tuple[Journal, Failpoints],
) -> EngineParts:
    token, rank = TokenFile(found.token_file), place.rank
    describer, policy = state
    journal, points = records
    gradients, averaged = model_parts
    crash_marker = CrashMarker(handle)
    time_budget = Budget(found.exchange_s, found.user_code_s)

    crash = _crash(found.replica, crash_marker)
    plane, backend = choose_backend(found, gradients, lambda step: points.hit("ring", step))
    where = device_of(gradients.parameters)

    def recover() -> None:
        """The checkpoint server is gone: start another one, with new memory for the rounds to come."""
        with contextlib.suppress(FabricError):
            if handle.ensure():
                slots.reset()
                crash_marker.renew()

    who = (found.job, found.replica)
    own_rank = rank if place.group else None
    snapshots = Snapshots(
        handle, describer, _copier(where), policy, who, where.type == "cuda", recover, own_rank
    )
    snapshots.durable = durable = DurableCheckpoints(found, journal, place)
    plane.set_bounds(time_budget.exchange_s, time_budget.entry_s)
    slots = GradientSlots(handle, gradients.nbytes, gradients.layout, plane)
    identity = ListenerIdentity(found.job, found.replica, rank=rank)
    peers = Peers(identity, place.incarnation, token, plane, time_budget.link_s)
    state_loader = _state_loader(found, place, snapshots, durable, Layout(describer.objects))
    return EngineParts(
        handle=handle,
        plane=plane,
        peers=peers,
        leader=LighthouseLink(found),
        slots=slots,
        exchange=ExchangeThread(
            plane,
            gradients,
            slots,
            points,
            crash,
            backend,
            found.on_nan != "propagate",
            found.retain_gradients,
        ),
        backend=backend,
        fetch_thread=FetchThread(state_loader, gradients.nbytes, points, crash),
        snapshot_worker=Worker("fabric-snapshots", crash),
        recover=recover,
        journal=journal,
        points=points,
        snapshots=snapshots,
        crash_marker=crash_marker,
        buffers=averaged,
        durable=durable,
    )


def _state_loader(
    found: Settings, place: ProcessIdentity, snapshots: Snapshots, durable: DurableCheckpoints, layout: Layout
) -> StateLoader:
    tokens = TokenFile(found.token_file)
    tls, size = found.tls.client_context(), place.group.size if place.group is not None else 1

    def make_fetcher(rank: int = place.rank) -> StateFetcher:
        return StateFetcher(tokens, rank=rank, ssl_context=tls)

    return StateLoader(snapshots, durable, layout, (place.rank, size), make_fetcher)


def _copier(where: torch.device) -> Copier:
    return CudaCopier(CudaLane(where)) if where.type == "cuda" else CpuCopier()


def _crash(replica: str, crash_marker: CrashMarker) -> Callable[[BaseException], None]:
    """What is done about a defect in one of the threads."""

    def crash(error: BaseException) -> None:
        """Say so and end: the launcher starts this replica anew."""
        sys.stderr.write(f"fabric: {replica}: internal error: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        crash_marker.clear()
        os._exit(75)

    return crash


def _take_place(found: Settings, group: RankGroup | None) -> ProcessIdentity:
    """Claim this rank's folder; ranks of one replica have one incarnation between them."""
    incarnation, before = _claim(found.of_rank(group.rank if group is not None else 0).home)
    if group is None:
        return ProcessIdentity(incarnation, before)
    who = {"replica": found.replica, "job": found.job, "incarnation": incarnation, "before": before}
    said = group.gather(who)
    for rank, one in enumerate(said):
        if (one["replica"], one["job"]) != (said[0]["replica"], said[0]["job"]):
            raise ConfigError(
                f"rank {rank} says it is {one['replica']!r} and rank 0 says {said[0]['replica']!r}: give all "
                "ranks of a replica the same FABRIC_REPLICA and FABRIC_JOB"
            )
    newest = max(one["incarnation"] for one in said)
    _remember(_claims[-1], newest)  # the next process may have fewer ranks, and must be newer all the same
    # Rank 0 decides: when its earlier process has ended, nobody commits any more for the replica.
    return ProcessIdentity(newest, tuple(said[0]["before"]), group)


def _shared_state(
    model: torch.nn.Module, optimizer: Optimizers, state: dict[str, Any], buffers: str
) -> dict[str, object]:
    optimizers = _by_name(optimizer)
    for name, value in state.items():
        if name == "model" or name in optimizers:
            raise ConfigError(f'state has the name "{name}", which is taken: use another one')
        if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
            raise ConfigError(
                f"state[{name!r}] is a {type(value).__name__} without state_dict and load_state_dict: wrap it"
            )
    changing = changing_buffers(model)
    if changing and buffers == "refuse":
        raise ConfigError(
            f"forward changes the buffer {changing[0]!r} differently on every replica: pass "
            'buffers="average" to share their average, buffers="ignore" to keep them local, or use a layer '
            "without running statistics"
        )
    local = changing if buffers == "ignore" else []
    shared: object = WithoutBuffers(model, local) if local else model
    for value in state.values():
        if isinstance(value, torch.amp.GradScaler):
            # It makes its state when it first scales a loss; a newcomer unscales before that.
            value.scale(torch.zeros((), device=next(model.parameters()).device))
    return {"model": shared, **optimizers, **state}


def _by_name(optimizer: Optimizers) -> dict[str, torch.optim.Optimizer]:
    """The names that the optimizers have in the shared state."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return {"optimizer": optimizer}
    named = optimizer if isinstance(optimizer, Mapping) else dict(enumerate(optimizer))
    wrong = next((x for x in named.values() if not isinstance(x, torch.optim.Optimizer)), None)
    if not named or wrong is not None:
        raise ConfigError(
            f"attach takes an optimizer, or several of them in a sequence or by name, not "
            f"{'none' if wrong is None else 'a ' + type(wrong).__name__}"
        )
    return {f"optimizer.{name}": value for name, value in named.items()}


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


def _claim(home: Path) -> tuple[int, tuple[int, ...]]:
    """Take this replica's place on this host: the incarnation, and those that ran here before, newest first.

    The lock is a POSIX record lock: it ends with the process and is not inherited by forked workers. So
    whoever ran here before has ended. Of processes on other hosts the file knows nothing.
    """
    path = home / "trainer.lock"
    try:
        make_private(home)
        descriptor = open_private(path, os.O_CREAT | os.O_RDWR)
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
    text = os.pread(descriptor, _NUMBER_BYTES * (1 + _REMEMBERED), 0).decode("ascii", "replace")
    before = tuple(int(word) for word in text.split() if word.isdigit())[:_REMEMBERED]
    incarnation = max(int(time.time() * 1000), max(before, default=0) + 1)
    history = "".join(f"{number}\n".ljust(_NUMBER_BYTES) for number in (incarnation, *before))
    os.pwrite(descriptor, history.encode(), 0)
    return incarnation, before


# The lock file holds the newest incarnation first, each in as many bytes. One that was ended before it had a
# session is followed by others, so the leader may know an older one only.
_NUMBER_BYTES = 32
_REMEMBERED = 16


def _remember(descriptor: int, incarnation: int) -> None:
    os.pwrite(descriptor, f"{incarnation}\n".encode().ljust(_NUMBER_BYTES), 0)
