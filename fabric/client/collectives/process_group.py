"""A ``torch.distributed.ProcessGroup`` over a session's collectives.

Its size and rank change with the members. Torch gets it as a group of one process per replica, registered
under a name, so that a DeviceMesh can have it as a dimension of size 1. A collective that fails raises its
error in ``wait`` and in the Work's future.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh

from fabric.client.collectives.calls import Payload
from fabric.client.collectives.collectives import TIMEOUT_S, Collectives, SoloCollectives
from fabric.errors import CollectiveFailed, ConfigError

BACKEND = "fabric"
_MOST = 2**63 - 1
_OPERATIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}


class CollectiveWork(dist.Work):
    """One collective under way; its result is in the caller's tensors once ``wait`` returns."""

    def __init__(
        self,
        started: "Future[Payload]",
        store: Callable[[Payload], None],
        tensors: list[torch.Tensor],
    ) -> None:
        super().__init__()
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

        def finish(done: "Future[Payload]") -> None:
            try:
                store(done.result())
            except Exception as error:  # noqa: BLE001  (the one who waits gets it)
                self._future.set_exception(error)  # type: ignore[arg-type]
            else:
                self._future.set_result(tensors)

        started.add_done_callback(finish)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the result is there; raise the collective's error. Its own timeout holds."""
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        if not self._future.done():
            return False
        try:
            self._future.value()
        except Exception:  # noqa: BLE001
            return False
        return True

    def result(self) -> list[torch.Tensor]:
        return self._future.wait()


class ReplicaGroup(dist.ProcessGroup):
    """The replicas of a job as a process group: see ``process_group``."""

    def __init__(self, collectives: Collectives | SoloCollectives, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._collectives = collectives
        self._timeout_s = timeout_s
        self._name = self._description = BACKEND  # torch sets others when it registers the group
        self._order: tuple[str, ...] = ()  # the members by rank, as a reconfiguration gave them

    # --- what torch asks --------------------------------------------------------------------------------

    def size(self) -> int:
        """The number of members that take part in a collective called now; 1 in a replica that is none."""
        return len(self._names())

    def rank(self) -> int:
        """This replica's position among the members."""
        names, replica = self._names(), self._collectives.replica
        return names.index(replica) if replica in names else 0

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """The name under which torch knows this backend."""
        return BACKEND

    # torch asks for these names when it registers the group, and for functional collectives.
    getSize, getRank = size, rank  # noqa: N815

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def _names(self) -> tuple[str, ...]:
        names = self._collectives.names_or_own()
        return self._order if set(self._order) == set(names) else names

    # --- reconfiguration: torch 2.14 and later ask for these names --------------------------------------

    # ``torch.distributed._reconfigure`` works.
    supports_reconfigure = True  # type: ignore[assignment, unused-ignore]

    def get_reconfigure_handle(self) -> str:
        """The name of this replica, by which ``reconfigure`` of every member knows it."""
        return self._collectives.replica

    def reconfigure(self, opts: Any) -> CollectiveWork:
        """Go on with the replicas of ``opts.handles``. A list gives their ranks; a set means ring order.

        The lighthouse decides which replicas are members. Where these are others, or where two members give
        unequal handles or uuids, the Work raises CollectiveFailed: reconfigure with the members' handles.
        """
        handles = tuple(opts.handles)
        if len(set(handles)) != len(handles) or self.get_reconfigure_handle() not in handles:
            raise ConfigError(
                f"the handles {', '.join(handles)} name a replica twice, or lack this one: give the handle "
                "of each member once"
            )
        order = handles if isinstance(opts.handles, list) else ()
        timeout = getattr(opts, "timeout", None)
        asked = torch.tensor(
            [opts.uuid & _MOST, xxhash.xxh3_64_intdigest(repr(order).encode()) & _MOST], device="cpu"
        )

        def take(payload: Payload) -> None:
            if set(payload.names or handles) != set(handles):
                raise CollectiveFailed(
                    f"the members are {', '.join(payload.names)}, and the handles are those of "
                    f"{', '.join(sorted(handles))}: reconfigure with the handles of the members"
                )
            if any(not torch.equal(x, asked) for x in payload.tensors):
                raise CollectiveFailed("members reconfigure with unequal uuids or orders: give equal ones")
            self._order = order

        limit_s = timeout.total_seconds() if timeout is not None else self._timeout_s
        return CollectiveWork(self._collectives.start("all_gather", asked, "", limit_s), take, [])

    # --- collectives ------------------------------------------------------------------------------------

    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> CollectiveWork:
        """Reduce one tensor in place: sum, average, minimum or maximum."""
        tensor = _one(tensors)
        return self._start("all_reduce", tensor, _operation(opts), opts, lambda x: _put(tensor, x.tensors[0]))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> CollectiveWork:
        """Reduce several tensors of one type in place, as one."""
        flat = torch.cat([x.reshape(-1) for x in tensors])

        def store(payload: Payload) -> None:
            parts = torch.split(payload.tensors[0], [x.numel() for x in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                _put(tensor, part.view(tensor.shape))

        return self._start("all_reduce", flat, _operation(opts), opts, store, tensors)

    def broadcast(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> CollectiveWork:
        """Write the tensor of the member at the root position into the tensors of all."""
        tensor, root = _one(tensors), int(opts.rootRank) if opts is not None else 0
        names = self._names()
        if not 0 <= root < len(names):
            raise ConfigError(
                f"a broadcast from rank {root} is not possible: the job has {len(names)} members"
            )
        return self._start("broadcast", tensor, names[root], opts, lambda x: _put(tensor, x.tensors[0]))

    def allgather(  # type: ignore[override]
        self, output: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None
    ) -> CollectiveWork:
        """Write every member's tensor into the list, which has ``size`` tensors."""

        def store(payload: Payload) -> None:
            _check_count(len(payload.tensors), len(output[0]))
            for target, tensor in zip(output[0], self._by_rank(payload), strict=True):
                _put(target, tensor)

        return self._start("all_gather", _one(tensors), "", opts, store, output[0])

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> CollectiveWork:
        """Write every member's tensor into one tensor, one after the other."""

        def store(payload: Payload) -> None:
            _check_count(len(payload.tensors) * tensor.numel(), output.numel())
            _put(output, torch.stack(self._by_rank(payload)).view(output.shape))

        return self._start("all_gather", tensor, "", opts, store, [output])

    def _by_rank(self, payload: Payload) -> list[torch.Tensor]:
        tensors = dict(zip(payload.names, payload.tensors, strict=True))
        order = self._order if set(self._order) == set(tensors) else payload.names
        return [tensors[name] for name in order]

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> CollectiveWork:
        """Write this member's part of the reduced tensor; an all_reduce moves all parts."""

        def store(payload: Payload) -> None:
            reduced = payload.tensors[0].view(-1)
            count = output.numel()
            _check_count(reduced.numel(), count * self.size())
            _put(output, reduced[self.rank() * count :][:count].view(output.shape))

        return self._start("all_reduce", tensor, _operation(opts), opts, store, [output])

    def reduce_scatter(  # type: ignore[override]
        self, output: list[torch.Tensor], tensors: list[list[torch.Tensor]], opts: Any = None
    ) -> CollectiveWork:
        """As ``_reduce_scatter_base``, from a list of ``size`` tensors."""
        return self._reduce_scatter_base(_one(output), torch.stack(tensors[0]), opts)

    def barrier(self, opts: Any = None) -> CollectiveWork:
        """Wait for all members."""
        return self._start("barrier", None, "", opts, lambda _: None)

    def _start(
        self,
        kind: str,
        tensor: torch.Tensor | None,
        option: str,
        opts: Any,
        store: Callable[[Payload], None],
        tensors: list[torch.Tensor] | None = None,
    ) -> CollectiveWork:
        started = self._collectives.start(kind, tensor, option, self._timeout_s)
        touched = tensors if tensors is not None else [tensor] if tensor is not None else []
        return CollectiveWork(started, store, touched)

    def _cannot(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            "the process group between replicas has all_reduce, broadcast, all_gather, reduce_scatter and "
            "barrier only: use one of them, or a group of ranks inside the replica"
        )

    send = recv = recv_anysource = scatter = gather = reduce = alltoall = alltoall_base = _cannot


def process_group(session: Any, timeout_s: float = TIMEOUT_S) -> ReplicaGroup:
    """Return the replicas of the session's job as a process group, for code that wants one.

    ``timeout_s`` bounds each collective, as in ``session.all_reduce``. With torch.distributed initialised,
    call it on every rank of the replica at the same point: the group is registered with torch, and functional
    collectives and ``replicate_mesh`` can use it.
    """
    group = ReplicaGroup(session.collectives, timeout_s)
    if not dist.is_initialized():
        return group
    name = f"{BACKEND}_{id(group)}"
    dist.Backend.register_backend(name, lambda *_: group, devices=["cpu", "cuda"])
    # Each rank has a group of its own with the equal ranks of other replicas; torch counts this process only.
    for rank in range(dist.get_world_size()):
        made = dist.new_group([rank], backend=name)
        if rank == dist.get_rank():
            assert made is group
    return group


def replicate_mesh(group: ReplicaGroup, mesh: DeviceMesh, name: str = "replicate") -> DeviceMesh:
    """Return ``mesh`` with the replicas as a first dimension ``name``, of size 1.

    ``mesh``: the replica's own mesh, of any dimensions, over all of its ranks. FSDP takes the new mesh for
    HSDP: its all-reduce between replicas goes over ``group``.
    """
    names = mesh.mesh_dim_names
    if names is None:
        raise ConfigError("the mesh has no names for its dimensions: give mesh_dim_names to init_device_mesh")
    groups: list[dist.ProcessGroup] = [group, *mesh.get_all_groups()]
    return DeviceMesh.from_group(
        groups, mesh.device_type, mesh=mesh.mesh.unsqueeze(0), mesh_dim_names=(name, *names)
    )


def _one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(tensors) != 1:
        raise ConfigError(f"a collective between replicas takes one tensor, not {len(tensors)}")
    return tensors[0]


def _operation(opts: Any) -> str:
    asked = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
    for operation, word in _OPERATIONS.items():
        if asked == operation:
            return word
    raise ConfigError(f"{asked} between replicas is not possible: use SUM, AVG, MIN or MAX")


def _check_count(arrived: int, expected: int) -> None:
    if arrived != expected:
        raise ConfigError(
            f"the members changed: {arrived} parts arrived for {expected} places, call group.size() again"
        )


def _put(target: torch.Tensor, value: torch.Tensor) -> None:
    """Write a result into the caller's tensor, before any other thread of the caller reads it."""
    with torch.no_grad():
        target.copy_(value)
    if target.is_cuda:
        torch.cuda.current_stream(target.device).synchronize()
