"""The plane of one communicator per epoch, with gloo's real collectives in NCCL's place."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ftar.gathering import mean
from ring_harness import WAIT_S, names, same_bits, socket_ring, wait_until

from fabric.errors import ConfigError, IllegalTransition, RoundAborted
from fabric.ftar import process_group_plane
from fabric.ftar.plane import Ring
from fabric.ftar.process_group_plane import GroupPlane, Rendezvous
from fabric.ftar.reduce_ops import Reduction

OPERATIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class CountingCommunicator:
    """Gloo cannot be interrupted: an abort ends the exchange, and leaves the collective to its timeout."""

    def __init__(self, group, store) -> None:
        self.group, self.store, self.aborted = group, store, 0

    def start(self, tensor: torch.Tensor, operation: str) -> Callable[[], None]:
        options = dist.AllreduceOptions()
        options.reduceOp = OPERATIONS[operation]
        work = self.group.allreduce([tensor], options)
        return lambda: work.wait()

    def abort(self) -> None:
        self.aborted += 1


class CountingFactory:
    """NcclFactory's work, with gloo."""

    def __init__(self) -> None:
        self.made: dict[int, CountingCommunicator] = {}

    def open_rendezvous(self, ring: Ring, host: str):
        store = dist.TCPStore(host, 0, ring.world, is_master=True, wait_for_workers=False)
        return Rendezvous(host, store.port), store

    def make(self, ring: Ring, rendezvous: Rendezvous, kept, timeout_s: float, began):
        bound = timedelta(seconds=timeout_s)
        store = kept or dist.TCPStore(rendezvous.host, rendezvous.port, ring.world, False, bound)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=5)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        prefix = dist.PrefixStore(f"epoch{ring.epoch}", store)
        group = dist.ProcessGroupGloo(prefix, ring.position, ring.world, options)
        made = self.made[ring.epoch] = CountingCommunicator(group, store)
        began(made)
        made.start(torch.zeros(1), "sum")()
        return made


class Groups:
    """``world`` planes, each with a thread of its own."""

    def __init__(self, world: int, **options) -> None:
        self.factories = [CountingFactory() for _ in range(world)]
        self.planes = [GroupPlane(m, lambda t: t.device.type == "cpu", **options) for m in self.factories]
        self.world = world
        self.threads = ThreadPoolExecutor(world)

    def __enter__(self) -> "Groups":
        return self

    def __exit__(self, *_error: object) -> None:
        for plane in self.planes:
            plane.close()
        self.threads.shutdown()

    def install(self, epoch: int, who: list[int] | None = None) -> None:
        who = list(range(self.world)) if who is None else who
        links = socket_ring(len(who))
        for place, i in enumerate(who):
            sockets = links[place] if len(who) > 1 else (None, None)
            self.planes[i].install(Ring(epoch, place, tuple(f"m{j}" for j in who)), *sockets)

    def submit(self, i: int, epoch: int, source: torch.Tensor, *rest) -> Future:
        return self.threads.submit(self.planes[i].all_reduce, epoch, 0, source, *rest)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_are_equal_on_all_members_and_the_source_survives(world):
    with Groups(world) as groups:
        groups.install(1)
        for length in (0, 1, 1000):
            sources = [torch.full((length,), float(i + 1)) for i in range(world)]
            results = [torch.zeros(length) for _ in range(world)]
            for future in [groups.submit(i, 1, sources[i], results[i]) for i in range(world)]:
                future.result(WAIT_S)
            expected = torch.full((length,), float(sum(range(1, world + 1))))
            assert all(same_bits(result, expected) for result in results)
            assert all((sources[i] == i + 1).all() for i in range(world))


@pytest.mark.parametrize(
    ("reduction", "expected"), [(mean(2.0), 1.5), (Reduction("min"), 1.0), (Reduction("max"), 2.0)]
)
def test_every_reduction_operation_gives_its_result(reduction, expected):
    with Groups(2) as groups:
        groups.install(1)
        results = [torch.zeros(100) for _ in range(2)]
        futures = [
            groups.submit(i, 1, torch.full((100,), float(i + 1)), results[i], reduction) for i in range(2)
        ]
        for future in futures:
            future.result(WAIT_S)
        assert all((result == expected).all() for result in results)


def test_an_abort_ends_the_exchange_everywhere_and_the_next_epoch_has_its_own_communicator():
    with Groups(3) as groups:
        groups.install(1)
        wait_until(lambda: all(1 in factory.made for factory in groups.factories))
        futures = [groups.submit(i, 1, torch.ones(10), torch.zeros(10)) for i in (0, 1)]
        groups.planes[0].abort(1, "the leader says so", about="m2")
        for future in futures:
            with pytest.raises(RoundAborted, match="the leader says so") as aborted:
                future.result(WAIT_S)
            assert aborted.value.about == "m2"
        # Each member's watchdog aborts its own communicator once, because all members got the abort.
        wait_until(lambda: all(factory.made[1].aborted == 1 for factory in groups.factories))
        with pytest.raises(RoundAborted, match="the leader says so"):
            groups.planes[2].all_reduce(1, 0, torch.ones(10), torch.zeros(10))
        groups.install(2, [0, 2])
        results = {i: torch.zeros(10) for i in (0, 2)}
        for future in [groups.submit(i, 2, torch.ones(10), results[i]) for i in (0, 2)]:
            future.result(WAIT_S)
        assert all((result == 2).all() for result in results.values())
        assert groups.factories[0].made[2] is not groups.factories[0].made[1]
        for i in (0, 2):
            groups.planes[i].retire(3)
        wait_until(lambda: all(groups.factories[i].made[2].aborted == 1 for i in (0, 2)))


def test_the_end_of_a_neighbour_aborts_the_exchange():
    with Groups(2) as groups:
        groups.install(1)
        wait_until(lambda: all(1 in factory.made for factory in groups.factories))
        future = groups.submit(0, 1, torch.ones(10), torch.zeros(10))
        groups.planes[1].close()
        with pytest.raises(RoundAborted):
            future.result(WAIT_S)
        wait_until(lambda: groups.factories[0].made[1].aborted == 1)


def test_an_exchange_over_its_bound_is_ended_by_the_watchdog():
    with Groups(2) as groups:
        groups.install(1)
        # An exchange shows that both members use their communicators.
        for future in [groups.submit(i, 1, torch.ones(10), torch.zeros(10)) for i in (0, 1)]:
            future.result(WAIT_S)
        groups.planes[0].set_bounds(entry_s=0.2)
        with pytest.raises(RoundAborted, match="did not end within its bound"):
            groups.submit(0, 1, torch.ones(10), torch.zeros(10)).result(WAIT_S)
        wait_until(lambda: groups.factories[0].made[1].aborted == 1)


def test_an_abort_while_the_communicator_is_built():
    """The first member builds its communicator alone, and no other member comes."""
    groups = Groups(1, make_s=3.0)
    (next_, previous), _ = socket_ring(2)
    with groups:
        groups.planes[0].install(Ring(1, 0, names(2)), next_, previous)
        future = groups.submit(0, 1, torch.ones(10), torch.zeros(10))
        groups.planes[0].abort(1, "superseded")
        with pytest.raises(RoundAborted, match="superseded"):
            future.result(WAIT_S)


def test_garbage_from_a_neighbour_ends_the_epoch():
    groups = Groups(1)
    mine, others = socket_ring(2)
    with groups:
        groups.planes[0].install(Ring(1, 1, names(2)), *mine)
        others[0].sendall(b"FDC1" + bytes(100))
        with pytest.raises(RoundAborted, match="check that all members use the same data plane"):
            groups.planes[0].all_reduce(1, 0, torch.ones(10), torch.zeros(10))


def test_misuse_is_refused_in_a_sentence():
    with Groups(1) as groups:
        groups.install(1)
        plane, x = groups.planes[0], torch.ones(9)[:8]
        for arguments, sentence in [
            ((torch.ones(2, 2),), "flat contiguous"),
            ((x, torch.ones(9)), "must agree"),
            ((x, x.as_strided((8,), (1,), 1)), "lies in a part of the gradient"),
            ((torch.ones(8, device="meta"),), "on its own device, not shape"),
            ((x.int(), torch.zeros(8, dtype=torch.int32), mean(2.0)), "have no mean"),
        ]:
            with pytest.raises(ConfigError, match=sentence):
                plane.all_reduce(1, 0, *arguments)
        with pytest.raises(ConfigError, match="no memory of its own"):
            plane.allocate(10)
        with pytest.raises(IllegalTransition, match="no links yet"):
            plane.all_reduce(5, 0, x, torch.zeros(8))


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_without_nccl_a_sentence_says_so():
    with pytest.raises(ConfigError, match="has no NCCL"):
        process_group_plane.NcclFactory(torch.device("cuda", 0))
