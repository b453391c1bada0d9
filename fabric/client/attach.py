"""``attach`` makes a session of a model and its optimizer. It refuses mistakes by name before training."""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import xxhash

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.fetch.fetcher import StateFetcher
from fabric.ckpt_server.reshard import Layout
from fabric.ckpt_server.state.content_digest import ContentDigests, first_copies
from fabric.ckpt_server.state.snapshot import CudaCopier, make_copier
from fabric.ckpt_server.state.training_state import StateDescriber, check_serialisable
from fabric.ckpt_server.wire.server_settings import ServerSettings
from fabric.client.control.engine import EngineParts
from fabric.client.control.lighthouse_link import LighthouseLink
from fabric.client.control.peers import Peers
from fabric.client.data.sampler import StepSampler
from fabric.client.gradients.exchange_thread import ExchangeThread
from fabric.client.gradients.forward_buffers import (
    Buffers,
    ForwardBuffers,
    RankMeans,
    ReplicaStates,
    check_choices,
    choose_buffers,
)
from fabric.client.gradients.gradient_backend import (
    GradientBackend,
    choose_backend,
    device_of,
)
from fabric.client.gradients.gradient_slots import GradientSlots
from fabric.client.loop.model_watch import ModelWatch, accept_optimizers, refuse_gradient_hooks
from fabric.client.loop.session import Session, SoloSession
from fabric.client.loop.shared_state import Optimizers, WithoutBuffers, optimizers_by_name, shared_state
from fabric.client.loop.shutdown import refuse_second_training
from fabric.client.loop.unshared_objects import UNSHARED, UnsharedWatch
from fabric.client.loop.user_functions import kept_by_calls
from fabric.client.process.excepthook import install_excepthook
from fabric.client.process.incarnation_lock import ProcessIdentity, claim_identity
from fabric.client.process.journal import Journal
from fabric.client.process.last_notes import CrashMarker
from fabric.client.process.rank_group import RankGroup
from fabric.client.process.worker import Worker
from fabric.client.state.durable_policy import DurableCheckpoints
from fabric.client.state.fetch_thread import FetchThread, PieceFetcher
from fabric.client.state.snapshots import SnapshotPolicy, Snapshots, policy_of
from fabric.client.state.state_loader import StateLoader
from fabric.errors import ConfigError, FabricError, ServerLost
from fabric.exit_codes import FAILED, RESTART
from fabric.ftar.buckets import FlatGradients
from fabric.ftar.lanes import LaneDirectory, held_parameters
from fabric.ftar.plane import DataPlane
from fabric.protocol.rules.adaptive_timeout import Budget
from fabric.protocol.rules.lanes import ReplicaLayout, lanes_of
from fabric.protocol.rules.layout_text import layout_text, read_layout
from fabric.runtime import config, logs
from fabric.runtime.config import Settings, advertised_host, armed_points
from fabric.runtime.failpoints import Failpoints
from fabric.runtime.http import parse_ports
from fabric.runtime.http.token_file import TokenFile
from fabric.runtime.process_environment import is_restarted
from fabric.runtime.rank_layout import parse_layout
from fabric.transport.tcp import ListenerIdentity

MAX_STEP = 1 << 60


@dataclass(frozen=True, slots=True)
class Choices:
    """The arguments of ``attach`` besides model, optimizer, state and settings. Raises ConfigError."""

    buffers: Buffers = "refuse"
    snapshots: SnapshotPolicy | None = None
    unshared: str = "refuse"
    step: int = 0
    sampler: StepSampler | None = None
    fragments: Mapping[str, int] | None = None  # the fragment of each parameter, for ``fabric.client.diloco``
    local_state: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_choices(self.buffers)
        if self.unshared not in UNSHARED:
            raise ConfigError(f'unshared is "{self.unshared}": it must be "refuse" or "ignore"')
        if not 0 <= self.step <= MAX_STEP:
            raise ConfigError(
                f"step is {self.step}: give the number of optimizer steps that are done already"
            )

    @property
    def refuses_others(self) -> bool:
        """Whether averages and optimizers are refused that the job does not share.

        In outer steps the inner optimizer moves the local model, which is not what the replicas share.
        """
        return self.unshared == "refuse" and self.fragments is None


def attach(
    model: torch.nn.Module,
    optimizer: Optimizers,
    *,
    state: Mapping[str, Any] | None = None,
    buffers: Buffers = "refuse",
    snapshots: SnapshotPolicy | None = None,
    unshared: str = "refuse",
    step: int = 0,
    sampler: StepSampler | None = None,
    local_state: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> "Session | SoloSession":
    """Join this process to the job that the environment (or ``arguments``) names.

    ``optimizer``: one, several in a sequence, or several by name; all of them are part of the shared state.
    ``state``: further objects of the shared state: with ``state_dict`` and ``load_state_dict``, dicts, or
    instances of ``torch.Generator``.
    ``buffers``: for tensors that forward passes change. For statistics (BatchNorm): ``refuse`` them,
    ``average`` them by weight at the commit, take those of the ``first`` replica, or ``ignore`` them (each
    replica keeps its own). Or by pattern of a name, as ``{"*.queue": "first"}``.
    ``snapshots``: a policy that says when to take a snapshot, instead of the settings' policy.
    ``unshared``: ``refuse`` or ``ignore`` a learning rate scheduler or scaler that is not in ``state``.
    ``step``: the step at which a new job begins, such as that of a checkpoint that you have loaded. A replica
    that joins takes the job's step instead.
    ``sampler``: the sampler of ``session.exchange``, where a DataLoader needed it before the session.
    ``local_state``: objects whose state is each replica's own, such as torchdata's StatefulDataLoader. A step
    commits the state of each data slot, which has at most 64 KiB. A replica that takes a slot over loads it.

    ``arguments`` are the fields of ``fabric.runtime.config.Settings``. A mistake of the user ends the process
    with one sentence and exit code 1. With FABRIC_DISABLE=1 the session uses no service.
    """
    with ends_with_a_sentence():
        choices = Choices(buffers, snapshots, unshared, step, sampler, local_state=local_state)
        return make_session(model, optimizer, dict(state or {}), choices, arguments)


@contextlib.contextmanager
def ends_with_a_sentence() -> Iterator[None]:
    """Let a FabricError within this context end the process with one sentence and its exit code."""
    install_excepthook()
    try:
        yield
    except FabricError as error:
        sys.stderr.write(f"fabric: {error}\n")
        # Exit code 75 asks for a restart: a stopped or full checkpoint server may answer the next process.
        raise SystemExit(RESTART if isinstance(error, ServerLost) else FAILED) from None


has_begun = False  # a session has been made in this process; ``fabric run`` ends a training without one


def make_session(
    model: torch.nn.Module,
    optimizer: Optimizers,
    state: dict[str, Any],
    choices: Choices,
    arguments: Mapping[str, Any],
) -> "Session | SoloSession":
    """As ``attach``, and raise its errors. ``choices``: the further arguments."""
    global has_begun
    config.check_main_guard()
    has_begun = True
    chosen = config.settings(**arguments)
    if choices.sampler is not None:
        choices.sampler.check(chosen)
    optimizers = optimizers_by_name(optimizer)
    group = RankGroup.find()
    parse_layout(chosen.layout).over(group.size if group is not None else 1)  # raises for another number
    buffers = choose_buffers(model, choices.buffers)
    objects = shared_state(model, optimizers, state, buffers)
    outside = accept_optimizers(model, optimizers, state)
    if choices.refuses_others:
        refuse_gradient_hooks(model)
        refuse_hook_memory(model, state.values())
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError("the model has no parameter that requires a gradient: there is nothing to exchange")
    unshared = UnsharedWatch(optimizers.values(), state, choices.unshared == "ignore")
    unshared.check()
    session: Session | SoloSession
    if chosen.disable:
        session = SoloSession([p for _, p in parameters], objects, chosen, group, choices.step)
    else:
        refuse_second_training(chosen)
        check_serialisable(objects)
        trainer = _Trainer(chosen, group, parameters, objects, ForwardBuffers(model, buffers), choices)
        kept = {x: objects[x] for x in state}
        compares = choices.unshared == "refuse"
        watch = ModelWatch(model, parameters, unshared, outside, kept, group, compares)
        if choices.refuses_others:
            watch.watch_others(objects.values(), optimizers.values(), [state, choices.local_state])
        session = Session(trainer.make_parts(), watch, choices.step)
    if choices.sampler is not None:
        session.draw_from(choices.sampler)
    return session


def refuse_hook_memory(model: torch.nn.Module, shared: Iterable[object]) -> None:
    """Raise ConfigError for a hook of the user's that changes gradients or outputs by its earlier calls.

    ``shared``: objects of the shared state, which may keep what they like.
    """
    hooks: list[Any] = []
    for parameter in model.parameters():
        hooks += (getattr(parameter, "_backward_hooks", None) or {}).values()
    for module in model.modules():
        tables = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
        called = [hook for table in tables for hook in getattr(module, table).values()]
        hooks += [MethodType(x, module) if isinstance(x, FunctionType) else x for x in called]
    kept = kept_by_calls(hooks, {id(x) for x in shared})
    if kept:
        raise ConfigError(
            f"a hook of the model goes by {kept}, and a replica that joins has not seen those calls: let the "
            'hook go by its call alone, keep the value in state=, or say unshared="ignore"'
        )


def _server(settings: Settings, process: ProcessIdentity) -> ServerHandle:
    """Attach to this host's checkpoint server of the replica, or start it."""
    spec = ServerSettings(
        job=settings.job,
        replica=settings.replica,
        run_dir=settings.home.parent if process.rank else settings.home,  # all ranks have one server
        bind=settings.host,
        # A single port is for the trainer's links.
        port=settings.ports if len(parse_ports(settings.ports)) > 1 else "0",
        advertise=advertised_host(settings, by_name=settings.tls.is_on),
        token_file=settings.token_file,
        lighthouse=settings.lighthouse,
        orphan_s=settings.orphan_s,
        rank=process.rank,
        tls_folder=settings.tls.folder,
    )
    return ServerHandle(spec, process.incarnation)


def _lanes(
    settings: Settings,
    process: ProcessIdentity,
    parameters: list[tuple[str, torch.nn.Parameter]],
    averaged: ForwardBuffers,
) -> LaneDirectory | None:
    """Return the layout that this replica announces, None where all replicas have equal layouts.

    All ranks of the replica must call it. Raises ConfigError for a layout that cannot match others.
    """
    if not settings.unequal:
        return None
    if settings.data_plane == "nccl":
        raise ConfigError("FABRIC_DATA_PLANE is nccl, which does not go with FABRIC_UNEQUAL: use auto or tcp")
    if averaged.of_one:
        name = min(averaged.of_one).partition(":")[2]
        raise ConfigError(
            f"FABRIC_UNEQUAL does not go with the values of one replica, which {name!r} takes: choose "
            f'buffers={{"{name}": "ignore"}}, or turn FABRIC_UNEQUAL off'
        )
    row = held_parameters([*parameters, *averaged.stand_ins])
    own = {"row": layout_text(ReplicaLayout((row,))), "late": [name for name, _ in averaged.stand_ins]}
    ranks = process.group.gather(own) if process.group is not None else [own]
    layout = ReplicaLayout(tuple(read_layout(x["row"]).ranks[0] for x in ranks))
    lanes_of({settings.replica: layout})  # raises one error for a layout that lacks parts of the model
    if process.group is not None:
        averaged.rank_means = RankMeans.of(process.group, layout)
    late = frozenset(name for x in ranks for name in x["late"])
    return LaneDirectory(settings.replica, process.rank, layout, layout_text(layout), late)


def _exact(
    settings: Settings,
    process: ProcessIdentity,
    parameters: list[tuple[str, torch.nn.Parameter]],
    carried: list[tuple[str, torch.nn.Parameter]],
) -> frozenset[str]:
    """Return the names of what must not travel in fewer bytes, if gradients do.

    These are all of ``carried``, which may be counters and bits, and the parameters whose part here another
    rank of this replica has too. Such gradients must stay equal at these ranks, but each rank has a ring of
    its own, whose blocks and links round otherwise. All ranks of the replica must call it. Raises
    ConfigError.
    """
    group, parts, coarse = process.group, {}, settings.exchange != "float32"
    exact = frozenset(name for name, _ in carried if coarse)
    if group is None:
        return exact
    if coarse:
        held = [x for x in held_parameters(parameters) if x.region.elements]
        parts = {xxhash.xxh3_64_hexdigest(f"{x.name} {x.region}".encode()): x.name for x in held}
    shared = group.ask({"exchange": settings.exchange, "parts": list(parts)}, _copies)["copies"]
    copies = frozenset(parts[part] for part in shared)
    if copies and len(copies) == len(parts):
        raise ConfigError(
            f"FABRIC_EXCHANGE is {settings.exchange}, and other ranks of this replica hold all parameters of "
            "this rank too, so its gradients must travel exactly: leave it out, or shard the parameters"
        )
    return exact | copies


def _copies(declared: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """Let rank 0 tell each rank which of its parts other ranks have too. Raises ConfigError."""
    for rank, other in enumerate(declared):
        if other["exchange"] != declared[0]["exchange"]:
            raise ConfigError(
                f"FABRIC_EXCHANGE is {other['exchange']} at rank {rank} and {declared[0]['exchange']} at "
                "rank 0: set it equally on all ranks and replicas"
            )
    holders = Counter(part for x in declared for part in x["parts"])
    return [{"copies": [part for part in x["parts"] if holders[part] > 1]} for x in declared]


@dataclass(frozen=True, slots=True)
class _ModuleEntries:
    """For each module of the shared state the names of its entries, by rank of this replica."""

    ranks: list[dict[str, list[str]]]

    @classmethod
    def gather(cls, process: ProcessIdentity, objects: Mapping[str, Any]) -> "_ModuleEntries":
        """All ranks of the replica must call it."""
        modules = (torch.nn.Module, WithoutBuffers)
        own = {name: sorted(x.state_dict()) for name, x in objects.items() if isinstance(x, modules)}
        group = process.group
        return cls([x["entries"] for x in group.gather({"entries": own})] if group is not None else [own])

    @property
    def everywhere(self) -> dict[str, frozenset[str]]:
        """The entries of all ranks, by module."""
        names = {name for rank in self.ranks for name in rank}
        return {name: frozenset(e for rank in self.ranks for e in rank.get(name, ())) for name in names}

    def lowest(self, rank: int) -> dict[str, dict[str, bool]]:
        """For each entry of ``rank``, whether no lower rank has it."""
        lower = [(name, entry) for x in self.ranks[:rank] for name, entries in x.items() for entry in entries]
        before = set(lower)
        return {
            name: {entry: (name, entry) not in before for entry in entries}
            for name, entries in self.ranks[rank].items()
        }


class _Trainer:
    """Makes the engine's parts. All ranks of the replica must make one."""

    def __init__(
        self,
        settings: Settings,
        group: RankGroup | None,
        parameters: list[tuple[str, torch.nn.Parameter]],
        objects: dict[str, Any],
        buffers: ForwardBuffers,
        choices: Choices,
    ) -> None:
        """``objects``: the shared state, which gets what the replica's own states and the buffers share."""
        self.process = process = claim_identity(settings, group)
        self.settings = settings = settings.of_rank(process.rank)
        logs.set_up("trainer", settings.log, whole_process=False)
        who = {"job": settings.job, "replica": settings.replica, "incarnation": process.incarnation}
        logs.describe(**who, rank=process.rank or None, epoch=None, incident_id="")
        self.buffers = buffers
        self.own_states = ReplicaStates.of(settings, choices.local_state or {}, device_of(tuple(parameters)))
        objects |= self.own_states.shared | buffers.shared
        self.lanes = lanes = _lanes(settings, process, parameters, buffers)
        carried = [*buffers.stand_ins, *self.own_states.stand_ins]
        exact = _exact(settings, process, parameters, carried) if lanes is None else frozenset()
        self.entries: dict[str, frozenset[str]] | None = None
        self.content: ContentDigests | None = None
        if lanes is not None:
            entries = _ModuleEntries.gather(process, objects)
            first = first_copies(dict(parameters), lanes.layout, lanes.rank)
            optimizers = frozenset(n for n, x in objects.items() if isinstance(x, torch.optim.Optimizer))
            self.entries = entries.everywhere
            self.content = ContentDigests(lanes.rank, first, entries.lowest(lanes.rank), optimizers)
        # Open the journal before the checkpoint server starts: a wrong path then leaves no server behind.
        self.journal = Journal(settings.journal, settings.replica, process.incarnation)
        self.handle = _server(settings, process)
        # Lanes carry all fragments in each step; a fragment that is not exchanged has no gradient, and stays.
        fragments, late = choices.fragments if lanes is None else None, frozenset(name for name, _ in carried)
        self.gradients = FlatGradients([*parameters, *carried], fragments=fragments, exact=exact, late=late)
        self.gradients.of_one = buffers.of_one
        if lanes is not None:  # pipeline stages hold parts of the model, which members compare as a whole
            self.gradients.layout = lanes.model_name
            self.gradients.described = lanes.described if self.gradients.described else ()
        self.describer = StateDescriber(objects, buffers.standing, by_name=settings.unequal)
        self.policy = choices.snapshots or policy_of(settings)
        self.failpoints = Failpoints(armed_points())
        if settings.drill:
            # Only a drilled trainer needs the room of drills, which is a tenth of what it would import.
            from fabric.client.process.drill_endpoint import DrillEndpoint
            from fabric.drill.injection.injector import start_injector

            self.failpoints.on_hit = DrillEndpoint(settings.home).hit
            if process.rank == 0:
                start_injector(settings)

    def make_parts(self) -> EngineParts:
        settings, handle, gradients, points = self.settings, self.handle, self.gradients, self.failpoints
        crash_marker = CrashMarker(handle)
        crash = _crash(settings.replica, crash_marker)
        budget = Budget(settings.exchange_s, settings.user_code_s)
        plane, backend = choose_backend(settings, gradients, partial(points.hit, "ring"), self.lanes)
        plane.set_bounds(budget.exchange_s, budget.entry_s)
        identity = ListenerIdentity(settings.job, settings.replica, rank=self.process.rank)
        token = TokenFile(settings.token_file)
        peers = Peers(identity, self.process.incarnation, token, plane, budget.link_s, self.lanes)
        slots = GradientSlots(handle, gradients.nbytes, gradients.layout, plane)

        def recover() -> None:
            """Start a checkpoint server in place of a lost server, with new memory for later rounds."""
            with contextlib.suppress(FabricError):
                if handle.ensure():
                    slots.reset()
                    crash_marker.renew()

        durable = DurableCheckpoints(settings, self.journal, self.process)
        snapshots = self._snapshots(recover, durable)
        loader = self._state_loader(snapshots, durable)
        pieces = PieceFetcher(self.lanes) if self.lanes is not None else None
        return EngineParts(
            settings=settings,
            process=self.process,
            describer=self.describer,
            gradients=gradients,
            handle=handle,
            plane=plane,
            peers=peers,
            leader=LighthouseLink(settings, is_restarted()),
            slots=slots,
            exchange=self._exchange_thread(plane, slots, backend, crash),
            fetch_thread=FetchThread(loader, gradients.nbytes, points, crash, pieces, backend.digest_of),
            snapshot_worker=Worker("fabric-snapshots", crash),
            recover=recover,
            journal=self.journal,
            points=points,
            snapshots=snapshots,
            crash_marker=crash_marker,
            buffers=self.buffers,
            own_states=self.own_states,
            durable=durable,
        )

    def _exchange_thread(
        self,
        plane: DataPlane,
        slots: GradientSlots,
        backend: GradientBackend,
        crash: Callable[[BaseException], None],
    ) -> ExchangeThread:
        exchange = ExchangeThread(
            plane,
            self.gradients,
            slots,
            self.failpoints,
            crash,
            backend,
            check_finite=self.settings.on_nan != "propagate",
            retain=self.settings.retain_gradients,
        )
        exchange.lanes, exchange.travels_as = self.lanes, self.settings.exchange
        return exchange

    def _snapshots(self, recover: Callable[[], None], durable: DurableCheckpoints) -> Snapshots:
        process, copier = self.process, make_copier(device_of(self.gradients.parameters))
        snapshots = Snapshots(
            self.handle,
            self.describer,
            copier,
            self.policy,
            (self.settings.job, self.settings.replica),
            isinstance(copier, CudaCopier),
            recover,
            process.rank if process.group is not None else None,
        )
        snapshots.content = self.content
        snapshots.durable = durable
        snapshots.points = self.failpoints
        return snapshots

    def _state_loader(self, snapshots: Snapshots, durable: DurableCheckpoints) -> StateLoader:
        tokens, tls = TokenFile(self.settings.token_file), self.settings.tls.client_context()
        own_rank = self.process.rank

        def make_fetcher(rank: int = own_rank) -> StateFetcher:
            return StateFetcher(tokens, rank=rank, ssl_context=tls)

        layout, unequal = Layout(self.describer.objects, self.entries), self.lanes is not None
        return StateLoader(snapshots, durable, layout, own_rank, self.process.size, make_fetcher, unequal)


def _crash(replica: str, crash_marker: CrashMarker) -> Callable[[BaseException], None]:
    """Make the handler of a defect in one of the threads."""

    def crash(error: BaseException) -> None:
        """Report the defect and end this process: its launcher starts the replica again."""
        sys.stderr.write(f"fabric: {replica}: internal error: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        crash_marker.clear()
        os._exit(RESTART)

    return crash
