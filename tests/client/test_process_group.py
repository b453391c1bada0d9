"""The process group of replicas: torch's own collectives over real links between threads."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from client.collective_party import Parties

from fabric.client.collectives.collectives import SoloCollectives
from fabric.client.collectives.process_group import ReplicaGroup
from fabric.errors import CollectiveFailed, ConfigError

NAMES = "a b"


@pytest.fixture
def two():
    """Two members after the commit of step 4, each with its process group."""
    with Parties(*NAMES.split()) as parties:
        parties.announce(NAMES, 1)
        for party in parties:
            party.commit(4)
            party.group = ReplicaGroup(party.collectives)
        yield list(parties)


def both(parties, work):
    """Run ``work(group, number)`` on both members at once."""
    futures = [party.later(work, party.group, number) for number, party in enumerate(parties)]
    return [future.result(60) for future in futures]


def test_size_and_rank_are_those_of_the_members(two):
    assert [x.group.size() for x in two] == [2, 2] and [x.group.rank() for x in two] == [0, 1]
    assert dist.get_world_size(two[0].group) == 2


@pytest.mark.parametrize(
    ("operation", "result"),
    [(dist.ReduceOp.SUM, 5.0), (dist.ReduceOp.AVG, 2.5), (dist.ReduceOp.MIN, 1.0), (dist.ReduceOp.MAX, 4.0)],
)
def test_all_reduce_works_in_place(two, operation, result):
    def reduce(group, number):
        tensor = torch.full((3, 2), 1.0 + 3 * number)
        dist.all_reduce(tensor, op=operation, group=group)
        return tensor

    assert all(torch.equal(x, torch.full((3, 2), result)) for x in both(two, reduce))


def test_the_other_collectives_fill_the_tensors_of_the_caller(two):
    def collect(group, number):
        own = torch.tensor([number, number + 10])
        sent = own.clone()
        group.broadcast([sent], root_options(1)).wait()
        parts = [torch.empty(2, dtype=torch.int64) for _ in range(2)]
        group.allgather([parts], [own]).wait()
        flat = torch.empty(4, dtype=torch.int64)
        group._allgather_base(flat, own).wait()
        share = torch.empty(1, dtype=torch.int64)
        group._reduce_scatter_base(share, own).wait()
        listed = torch.empty(1, dtype=torch.int64)
        group.reduce_scatter([listed], [list(own.split(1))]).wait()
        several = [torch.ones(2), torch.full((1,), float(number))]
        group.allreduce_coalesced(several).wait()
        group.barrier().wait()
        shown = [sent, *parts, flat, share, listed, *several]
        return [x.tolist() for x in shown]

    common = [[1, 11], [0, 10], [1, 11], [0, 10, 1, 11]]
    several = [[2.0, 2.0], [1.0]]
    assert both(two, collect) == [[*common, [1], [1], *several], [*common, [21], [21], *several]]


def root_options(rank: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def test_work_is_asynchronous_and_has_a_future(two):
    tensors = [torch.ones(2), torch.ones(2)]
    first = dist.all_reduce(tensors[0], group=two[0].group, async_op=True)
    doubled = first.get_future().then(lambda done: done.value()[0] * 2)
    assert not first.is_completed() and not first.is_success()
    second = dist.all_reduce(tensors[1], group=two[1].group, async_op=True)
    assert second.wait() and first.wait() and first.is_success()
    assert doubled.wait().tolist() == [4.0, 4.0] and tensors[1].tolist() == [2.0, 2.0]


def test_a_failure_reaches_the_waiting_caller_and_leaves_the_tensor(two):
    two[0].group = ReplicaGroup(two[0].collectives, timeout_s=0.2)
    tensor = torch.ones(2)
    work = two[0].group.allreduce([tensor])
    with pytest.raises(CollectiveFailed, match="timed out: b did not call it in time"):
        work.wait()
    assert work.is_completed() and not work.is_success() and tensor.tolist() == [1.0, 1.0]


def test_what_the_group_cannot_do_is_refused_with_a_sentence(two):
    group = two[0].group
    with pytest.raises(
        ConfigError, match="has all_reduce, broadcast, all_gather, reduce_scatter and barrier"
    ):
        group.send([torch.ones(1)], 1, 0)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.PRODUCT
    with pytest.raises(ConfigError, match="between replicas is not possible: use SUM, AVG, MIN or MAX"):
        group.allreduce([torch.ones(1)], options)
    with pytest.raises(ConfigError, match="a broadcast from rank 2 is not possible: the job has 2 members"):
        group.broadcast([torch.ones(1)], root_options(2))
    with pytest.raises(ConfigError, match="takes one tensor, not 2"):
        group.allreduce([torch.ones(1), torch.ones(1)])


def test_alone_every_collective_returns_at_once():
    group = ReplicaGroup(SoloCollectives("r0"))
    tensor = torch.arange(3.0)
    dist.all_reduce(tensor, group=group)
    gathered = [torch.empty(3)]
    group.allgather([gathered], [tensor]).wait()
    assert tensor.tolist() == gathered[0].tolist() == [0.0, 1.0, 2.0] and group.size() == 1


def options(uuid, handles):
    """As torch.distributed._reconfigure of torch 2.14 and later makes them."""
    return SimpleNamespace(uuid=uuid, handles=handles, timeout=None, hints={})


def test_a_reconfiguration_gives_the_members_other_ranks(two):
    def turn(group, number):
        assert group.supports_reconfigure
        handles = ["b", "a"]
        group.reconfigure(options(7, handles)).wait()
        sent = torch.tensor([float(number)])
        group.broadcast([sent], root_options(0)).wait()
        parts = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
        group.allgather([parts], [torch.tensor([number])]).wait()
        flat = torch.empty(2, dtype=torch.int64)
        group._allgather_base(flat, torch.tensor([number])).wait()
        return group.rank(), sent.tolist(), [x.item() for x in parts], flat.tolist()

    assert both(two, turn) == [(1, [1.0], [1, 0], [1, 0]), (0, [1.0], [1, 0], [1, 0])]


def test_a_set_of_handles_gives_the_order_of_the_ring(two):
    def turn(group, number):
        group.reconfigure(options(7, ["b", "a"])).wait()
        group.reconfigure(options(8, {"b", "a"})).wait()
        return group.rank()

    assert both(two, turn) == [0, 1]


@pytest.mark.parametrize(
    ("handles", "sentence"),
    [
        (lambda _: ["a", "b", "c"], "the members are a, b, and the handles are those of a, b, c"),
        (lambda number: ["a", "b"] if number else ["b", "a"], "unequal uuids or orders"),
    ],
)
def test_a_reconfiguration_that_does_not_fit_can_be_repeated(two, handles, sentence):
    def turn(group, number):
        with pytest.raises(CollectiveFailed, match=sentence):
            group.reconfigure(options(7, handles(number))).wait()
        group.reconfigure(options(8, ["b", "a"])).wait()
        return group.rank()

    assert both(two, turn) == [1, 0]


def test_handles_name_this_replica_once(two):
    for handles in (["b"], ["a", "a"]):
        with pytest.raises(ConfigError, match="name a replica twice, or lack this one"):
            two[0].group.reconfigure(options(7, handles))


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch.distributed has no _reconfigure")
def test_torch_reconfigures_the_group(two):
    def turn(group, number):
        assert dist._supports_reconfigure(group) and dist._get_reconfigure_handle(group) == "ab"[number]
        dist._reconfigure(uuid=3, handles=["b", "a"], group=group).wait()
        return group.rank()

    assert both(two, turn) == [1, 0]
