"""Ranks of unequal layouts sum their gradients in lanes, each in its own flat buffer."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ftar.gathering import gather
from ftar.lane_harness import Process, start
from ftar.lane_layouts import COLUMNS, MODEL, ROWS, SINGLE, gradient_of, member
from ring_harness import WAIT_S, socket_ring, wait_until

from fabric.errors import ConfigError, IllegalTransition, RoundAborted
from fabric.ftar.buckets import FlatGradients
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.ftar.lanes import FlatPlaces, LaneDirectory, LanePlane, held_parameters
from fabric.ftar.plane import Ring
from fabric.model import Base, Record
from fabric.protocol.rules.lanes import HeldParameter, ReplicaLayout, TensorRegion
from fabric.protocol.rules.layout_text import layout_text

# A parameter that one layout cuts unevenly, and one of which it has a copy at each rank.
WIDE = {"cut": (40, 90), "norm": (900,)}
WHOLE_NORM = TensorRegion.whole(WIDE["norm"])


def wide(*columns: tuple[int, int]) -> ReplicaLayout:
    """``columns``: the first column and the number of columns of each rank."""
    return ReplicaLayout(
        tuple(
            (
                HeldParameter("cut", "float32", WIDE["cut"], TensorRegion((0, at), (WIDE["cut"][0], size))),
                HeldParameter("norm", "float32", WIDE["norm"], WHOLE_NORM),
            )
            for at, size in columns
        )
    )


def with_counter(layout: ReplicaLayout) -> ReplicaLayout:
    """The layout, and at its last rank a parameter that no other rank has."""
    counter = HeldParameter("counter", "float32", (5,), TensorRegion.whole((5,)))
    return ReplicaLayout((*layout.ranks[:-1], (*layout.ranks[-1], counter)))


def held_cut(process: Process) -> TensorRegion:
    return next(x.region for x in process.layout.ranks[process.rank] if x.name == "cut")


WIDE_SINGLE, WIDE_COLUMNS = wide((0, 90)), wide((0, 10), (10, 80))
WIDE_COUNTED = with_counter(WIDE_SINGLE)


@pytest.mark.parametrize("links", ["shm", "tcp"])
@pytest.mark.parametrize(
    "layouts",
    [
        {"r0": SINGLE, "r1": ROWS},
        {"r0": ROWS, "r1": COLUMNS},
        {"r0": COLUMNS, "r1": SINGLE, "r2": ROWS},
        {"r0": ROWS, "r1": ROWS},
        {"r0": SINGLE, "r1": SINGLE, "r2": COLUMNS},
    ],
)
def test_every_rank_has_the_sum_of_all_replicas_in_its_own_places(layouts, links):
    processes = start(layouts, links)
    gradients = {replica: gradient_of(seed) for seed, replica in enumerate(layouts)}
    expected = {name: sum(g[name] for g in gradients.values()) for name in MODEL}
    with ThreadPoolExecutor(len(processes)) as pool:
        for step in range(2):
            for process in processes:
                process.fill(gradients[process.replica])
            for future in [pool.submit(p.reduce, 1, step) for p in processes]:
                future.result(WAIT_S)
            for process in processes:
                process.check(expected)
    for process in processes:
        process.plane.close()


def test_all_copies_of_a_piece_have_equal_bits():
    """Three terms have other bits in another order, and the order follows from the place in a buffer."""
    layouts = {"r0": WIDE_COLUMNS, "r1": WIDE_SINGLE, "r2": WIDE_SINGLE}
    processes = start(layouts)
    for seed, replica in enumerate(layouts):
        generator = torch.Generator().manual_seed(seed)
        gradient = {name: torch.randn(shape, generator=generator) for name, shape in WIDE.items()}
        for process in (p for p in processes if p.replica == replica):
            process.fill(gradient)
    with ThreadPoolExecutor(len(processes)) as pool:
        for future in [pool.submit(p.reduce) for p in processes]:
            future.result(WAIT_S)
    copies = {
        (p.replica, p.rank): FlatPlaces(p.layout.ranks[p.rank]).view(p.flat, "norm", WHOLE_NORM)
        for p in processes
    }
    first = copies["r0", 0]
    assert all(torch.equal(first, copy) for copy in copies.values())
    for process in processes:
        process.plane.close()


@pytest.mark.parametrize("links", [("tcp", "shm"), ("mixed", "tcp")])
def test_in_fewer_bytes_copies_stay_equal_and_exact_pieces_exact_whatever_the_links(links):
    layouts = {"r0": with_counter(WIDE_COLUMNS), "r1": with_counter(WIDE_SINGLE), "r2": WIDE_COUNTED}
    processes = start(layouts, links, late={"counter"})
    gradients = {}
    for seed, replica in enumerate(layouts):
        generator = torch.Generator().manual_seed(seed)
        gradients[replica] = {n: torch.randn(shape, generator=generator) * 1e-6 for n, shape in WIDE.items()}
        gradients[replica]["counter"] = torch.full((5,), 2.0**20 + seed)
        for process in (p for p in processes if p.replica == replica):
            process.fill(gradients[replica])
    with ThreadPoolExecutor(len(processes)) as pool:
        for future in [pool.submit(p.reduce, exchange="int8") for p in processes]:
            future.result(WAIT_S)
    sums = {name: sum(g[name].double() for g in gradients.values()) for name in gradients["r0"]}
    whole = next(p for p in processes if p.replica == "r1")
    for process in processes:
        places = process.places
        for held in places.regions():
            part = places.view(process.flat, held.name, held.region)
            other = whole.places.view(whole.flat, held.name, held.region)
            assert torch.equal(part, other), (process.replica, process.rank, held.name)
            exact = sums[held.name][held.region.within(TensorRegion.whole(held.shape))]
            if held.name == "counter":
                assert torch.equal(part.double(), exact)
            else:
                assert torch.allclose(part.double(), exact, atol=2e-7)
        process.plane.close()
    assert not torch.equal(places.view(process.flat, "cut", held_cut(process)), sums["cut"].float())


def test_equal_layouts_have_one_ring_and_one_exchange_per_type():
    processes = start({"r0": ROWS, "r1": ROWS})
    assert [p.lanes.numbers for p in processes] == [(0,), (1,), (0,), (1,)]
    assert [len(p.lanes.sections) for p in processes] == [2, 2, 2, 2]
    for process in processes:
        process.plane.close()


def test_an_abort_ends_every_lane_and_the_first_reason_stays():
    processes = start({"r0": SINGLE, "r1": ROWS})
    single, rows = processes[0], processes[1:]
    single.fill(gradient_of(0))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(single.reduce)
        wait_until(lambda: single.plane.waiting_for == "r1")
        single.plane.abort(1, "r1 evicted", "r1")
        with pytest.raises(RoundAborted, match="r1 evicted"):
            waiting.result(WAIT_S)
    with pytest.raises(RoundAborted, match="r1 evicted"):
        single.plane.reduce_lane(1, 1, 0, torch.zeros(3))
    for process in [single, *rows]:
        process.plane.close()


def test_an_abort_holds_for_lanes_that_are_linked_later_and_a_retired_epoch_for_all():
    plane = LanePlane(CpuRing)
    plane.abort(3, "too late")
    with pytest.raises(RoundAborted, match="too late"):
        plane.reduce_lane(7, 3, 0, torch.zeros(3))
    plane.retire(5)
    with pytest.raises(RoundAborted, match="epoch 4 is over"):
        plane.reduce_lane(9, 4, 0, torch.zeros(3))
    plane.close()


def test_bounds_hold_for_lanes_that_come_later():
    plane = LanePlane(CpuRing)
    plane.set_bounds(entry_s=0.05)
    pairs = socket_ring(2)
    plane.install_lane(4, Ring(1, 0, ("r0", "r1")), *pairs[0])
    with pytest.raises(RoundAborted, match="r1"):
        plane.reduce_lane(4, 1, 0, torch.zeros(3))
    plane.close()
    for sock in pairs[1]:
        sock.close()


def test_a_link_or_an_exchange_without_a_lane_is_refused():
    plane = LanePlane(CpuRing)
    with pytest.raises(IllegalTransition, match="name the lane of every link"):
        plane.install(Ring(1, 0, ("r0",)), None, None)
    with pytest.raises(IllegalTransition, match="reduce one of them"):
        plane.all_reduce(1, 0, torch.zeros(1))
    plane.close()


@pytest.mark.parametrize("late", [(), ("1.bias",), ("0.weight", "2.weight", "3.bias")])
def test_the_places_are_those_of_the_flat_gradients(late):
    """Also where the gradients fill several buckets, each with its presence at the end."""
    wide = torch.nn.Linear(1500, 1500)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), wide, torch.nn.Linear(1500, 1500), wide.bfloat16())
    gradients = FlatGradients(model.named_parameters(), late=late)
    assert len(gradients.buckets) >= 2
    held = held_parameters(gradients.parameters)
    places = FlatPlaces(held, late)
    assert places.nbytes == gradients.nbytes
    flat = torch.zeros(places.nbytes, dtype=torch.uint8)
    for number, (_, parameter) in enumerate(gradients.parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0) if number % 3 else None
    gather(gradients, flat)
    for number, part in enumerate(held):
        has = number % 3 > 0
        assert (places.view(flat, part.name, part.region) == has * (number + 1)).all()
        assert bool(places.presence(flat, part.name).any()) == has


def test_a_type_that_torch_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="a is of 'float33'"):
        FlatPlaces([HeldParameter("a", "float33", (2,), TensorRegion.whole((2,)))])


def record(epoch: int, **layouts: ReplicaLayout) -> Record:
    roster = tuple(member(name, layout) for name, layout in layouts.items())
    return Record("s", 1, 1, epoch, epoch, "", roster, Base(1, 0))


def test_the_record_gives_a_rank_its_neighbours_in_each_lane():
    directory = LaneDirectory("r1", 0, SINGLE, layout_text(SINGLE))
    lanes = directory.enter(record(3, r0=ROWS, r1=SINGLE, r2=COLUMNS))
    assert directory.get(3) is lanes
    assert [x.lane for x in lanes.rings] == list(range(len(lanes.rank_lanes.lanes)))
    assert {x.next_rank for x in lanes.rings} == {0, 1, 2}
    assert {x.next_member.replica for x in lanes.rings} == {"r2"}


def test_the_lanes_of_an_epoch_stay_until_it_is_over():
    directory = LaneDirectory("r1", 0, SINGLE, layout_text(SINGLE))
    lanes = [directory.enter(record(epoch, r0=ROWS, r1=SINGLE)) for epoch in range(3, 23)]
    assert directory.get(3) is lanes[0], "the epoch runs while twenty others are announced"
    directory.retire(22)
    assert directory.get(22) is lanes[-1]
    with pytest.raises(RoundAborted, match="epoch 21 is over"):
        directory.get(21)


def test_the_name_of_the_layouts_follows_from_them_alone():
    names = {
        LaneDirectory("r0", 0, ROWS, layout_text(ROWS)).enter(record(3, r0=ROWS, r1=SINGLE)).name,
        LaneDirectory("r9", 0, SINGLE, layout_text(SINGLE)).enter(record(4, r9=SINGLE, r8=ROWS)).name,
    }
    assert len(names) == 1
    other = LaneDirectory("r0", 0, ROWS, layout_text(ROWS)).enter(record(3, r0=ROWS, r1=COLUMNS))
    assert other.name not in names
