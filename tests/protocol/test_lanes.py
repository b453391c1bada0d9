"""Lanes cut the parameters of differently laid out replicas into the coarsest common pieces."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.errors import ConfigError
from fabric.protocol.rules.lanes import (
    HeldParameter,
    Lane,
    ReplicaLayout,
    TensorRegion,
    lanes_of,
    lanes_of_rank,
)

Model = dict[str, tuple[int, ...]]


def held(name: str, shape: tuple[int, ...], begin: tuple[int, ...] = (), sizes: tuple[int, ...] = ()):
    region = TensorRegion(begin, sizes) if sizes else TensorRegion.whole(shape)
    return HeldParameter(name, "float32", shape, region)


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return offset and size of one of ``parts`` chunks, as DTensor's Shard cuts; the last chunks may be
    empty.
    """
    size = -(-length // parts)
    begin = min(index * size, length)
    return begin, min(size, length - begin)


def sharded(model: Model, ranks: int, dimension: int = 0) -> ReplicaLayout:
    """Return a layout that cuts every parameter in this dimension, or copies it if the dimension is too
    small.
    """
    rows = []
    for rank in range(ranks):
        row = []
        for name, shape in model.items():
            if dimension >= len(shape):
                row.append(held(name, shape))
                continue
            at, size = chunk(shape[dimension], ranks, rank)
            begin = tuple(at if d == dimension else 0 for d in range(len(shape)))
            sizes = tuple(size if d == dimension else n for d, n in enumerate(shape))
            row.append(HeldParameter(name, "float32", shape, TensorRegion(begin, sizes)))
        rows.append(tuple(row))
    return ReplicaLayout(tuple(rows))


def single(model: Model) -> ReplicaLayout:
    return sharded(model, 1)


def staged(model: Model, *counts: int) -> ReplicaLayout:
    """Return a layout of pipeline stages with this number of parameters each."""
    names = iter(model)
    assert sum(counts) == len(model)
    return ReplicaLayout(
        tuple(tuple(held(n, model[n]) for n in itertools.islice(names, count)) for count in counts)
    )


def copied(model: Model, ranks: int) -> ReplicaLayout:
    return ReplicaLayout((tuple(held(name, shape) for name, shape in model.items()),) * ranks)


def grid(model: Model, copies: int, ranks: int) -> ReplicaLayout:
    """Return an HSDP layout: ``copies`` groups of ranks, each of which cuts every parameter."""
    return ReplicaLayout(sharded(model, ranks).ranks * copies)


def places(region: TensorRegion):
    return itertools.product(*(range(at, end) for at, end in zip(region.begin, region.end, strict=True)))


def holders_of(layout: ReplicaLayout, name: str, place: tuple[int, ...]) -> list[int]:
    return [
        rank
        for rank, parameters in enumerate(layout.ranks)
        for p in parameters
        if p.name == name and place in set(places(p.region))
    ]


def part_of(layout: ReplicaLayout, name: str, place: tuple[int, ...]) -> TensorRegion:
    rows = itertools.chain.from_iterable(layout.ranks)
    return next(p.region for p in rows if p.name == name and place in set(places(p.region)))


# --- properties -------------------------------------------------------------------------------------------


@st.composite
def models(draw) -> Model:
    shapes = draw(st.lists(st.lists(st.integers(0, 7), max_size=2).map(tuple), min_size=1, max_size=5))
    return {f"p{index}": shape for index, shape in enumerate(shapes)}


@st.composite
def layout_of(draw, model: Model) -> ReplicaLayout:
    kind = draw(st.sampled_from(["single", "sharded", "staged", "copied", "grid"]))
    ranks = draw(st.integers(1, 4))
    if kind == "sharded":
        return sharded(model, ranks, draw(st.integers(0, 1)))
    if kind == "staged":
        cuts = sorted(draw(st.lists(st.integers(0, len(model)), max_size=3)))
        return staged(model, *(b - a for a, b in itertools.pairwise([0, *cuts, len(model)])))
    if kind == "copied":
        return copied(model, ranks)
    return grid(model, draw(st.integers(1, 2)), ranks) if kind == "grid" else single(model)


@st.composite
def jobs(draw) -> tuple[Model, dict[str, ReplicaLayout]]:
    model = draw(models())
    count = draw(st.integers(1, 4))
    return model, {f"r{i}": draw(layout_of(model)) for i in range(count)}


@given(jobs())
def test_every_copy_of_every_element_is_in_a_lane_that_its_rank_takes_part_in(job):
    model, layouts = job
    lanes = lanes_of(layouts)
    for index, layout in enumerate(layouts.values()):
        for name, shape in model.items():
            for place in places(TensorRegion.whole(shape)):
                ranks = [
                    lane.holders[index]
                    for lane in lanes
                    for piece in lane.pieces
                    if piece.name == name and place in set(places(piece.region))
                ]
                holders = holders_of(layout, name, place)
                assert set(ranks) == set(holders)
                copies = [len(holders_of(other, name, place)) for other in layouts.values()]
                assert len(ranks) == max(copies)
                if max(copies) == len(holders):
                    assert len(set(ranks)) == len(ranks), "the replica with most copies repeats one"


@given(jobs())
def test_a_piece_is_as_coarse_as_the_layouts_allow(job):
    """Two elements lie in one piece exactly if one part holds both in every replica."""
    model, layouts = job
    lanes = lanes_of(layouts)
    for name, shape in model.items():
        labels = {
            tuple(
                next(
                    p.region for row in x.ranks for p in row if p.name == name and at in set(places(p.region))
                )
                for x in layouts.values()
            )
            for at in places(TensorRegion.whole(shape))
        }
        regions = {piece.region for lane in lanes for piece in lane.pieces if piece.name == name}
        assert len([region for region in regions if region.elements]) == len(labels)
        assert sum(region.elements for region in regions) == math.prod(shape)


@given(jobs())
def test_no_two_lanes_have_the_same_holders(job):
    lanes = lanes_of(job[1])
    assert len({lane.holders for lane in lanes}) == len(lanes)
    assert all(lane.pieces for lane in lanes)


@given(jobs())
def test_every_rank_that_names_a_parameter_meets_every_replica_in_it(job):
    """So each rank hears whether any replica has a gradient, also where it holds none of the elements."""
    _, layouts = job
    lanes = lanes_of(layouts)
    for place, layout in enumerate(layouts.values()):
        for rank, row in enumerate(layout.ranks):
            numbers = lanes_of_rank(lanes, place, rank)
            assert {p.name for n in numbers for p in lanes[n].pieces} == {p.name for p in row}


@given(jobs(), st.integers(1, 4))
def test_equal_layouts_have_one_lane_per_rank_of_whole_parts(job, count):
    _, layouts = job
    layout = next(iter(layouts.values()))
    lanes = lanes_of({f"r{i}": layout for i in range(count)})
    holding = [rank for rank, row in enumerate(layout.ranks) if row]
    assert sorted(lane.holders for lane in lanes) == [(rank,) * count for rank in holding]
    for lane in lanes:
        row = layout.ranks[lane.holders[0]]
        assert sorted((p.name, p.region) for p in row if p.region.elements) == [
            (piece.name, piece.region) for piece in lane.pieces if piece.region.elements
        ]
        assert sorted(p.name for p in row) == [piece.name for piece in lane.pieces]


@settings(max_examples=50)
@given(jobs(), st.randoms(use_true_random=False))
def test_the_order_of_the_replicas_and_more_of_a_kind_change_the_holders_alone(job, chance: random.Random):
    _, layouts = job
    lanes = lanes_of(layouts)
    order = [*layouts, *(f"{name}again" for name in layouts)]
    chance.shuffle(order)
    others = lanes_of({name: layouts[name.removesuffix("again")] for name in order})
    assert [lane.pieces for lane in others] == [lane.pieces for lane in lanes]
    for before, after in zip(lanes, others, strict=True):
        expected = dict(zip(layouts, before.holders, strict=True))
        assert after.holders == tuple(expected[name.removesuffix("again")] for name in order)


@given(jobs())
def test_a_rank_finds_the_lanes_that_name_it(job):
    _, layouts = job
    lanes = lanes_of(layouts)
    for index, layout in enumerate(layouts.values()):
        numbers = [lanes_of_rank(lanes, index, rank) for rank in range(len(layout.ranks))]
        assert sorted(n for row in numbers for n in row) == list(range(len(lanes)))
        assert all(lanes[n].holders[index] == rank for rank, row in enumerate(numbers) for n in row)


# --- the layouts that replicas have -----------------------------------------------------------------------

LINEAR: Model = {"in.weight": (8, 4), "in.bias": (8,), "norm.weight": (4,), "out.weight": (4, 8)}


def described(lane: Lane) -> list[str]:
    return [
        f"{p.name}{[f'{at}:{end}' for at, end in zip(p.region.begin, p.region.end, strict=True)]}"
        for p in lane.pieces
    ]


def test_fsdp_over_four_beside_two_has_four_lanes():
    lanes = lanes_of({"r0": sharded(LINEAR, 4), "r1": sharded(LINEAR, 2)})
    assert [lane.holders for lane in lanes] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert described(lanes[2]) == [
        "in.bias['4:6']",
        "in.weight['4:6', '0:4']",
        "norm.weight['2:3']",
        "out.weight['2:3', '0:8']",
    ]


def test_tensor_parallel_of_two_beside_one_process_exchanges_copies_twice():
    """``in`` is cut by columns of its result, ``out`` by rows of its input, ``norm`` is copied."""
    cut = {"in.weight": 0, "in.bias": 0, "out.weight": 1}
    by_dimension = [sharded(LINEAR, 2, 0), sharded(LINEAR, 2, 1)]
    rows = [
        tuple(
            held(name, shape)
            if name not in cut
            else next(p for p in by_dimension[cut[name]].ranks[rank] if p.name == name)
            for name, shape in LINEAR.items()
        )
        for rank in range(2)
    ]
    lanes = lanes_of({"r0": ReplicaLayout(tuple(rows)), "r1": single(LINEAR)})
    assert [lane.holders for lane in lanes] == [(0, 0), (1, 0)]
    assert described(lanes[1]) == [
        "in.bias['4:8']",
        "in.weight['4:8', '0:4']",
        "norm.weight['0:4']",
        "out.weight['0:4', '4:8']",
    ]


def test_pipeline_splits_of_4_4_4_and_5_2_5_have_a_lane_per_pair_of_stages():
    model = {f"layer{index:02}.weight": (2,) for index in range(12)}
    lanes = lanes_of({"r0": staged(model, 4, 4, 4), "r1": staged(model, 5, 2, 5), "r2": single(model)})
    assert [(lane.holders, len(lane.pieces)) for lane in lanes] == [
        ((0, 0, 0), 4),
        ((1, 0, 0), 1),
        ((1, 1, 0), 2),
        ((1, 2, 0), 1),
        ((2, 2, 0), 4),
    ]


def test_three_beside_two_cuts_where_neither_is_whole():
    lanes = lanes_of({"r0": sharded({"w": (6,)}, 3), "r1": sharded({"w": (6,)}, 2)})
    assert [(lane.holders, described(lane)) for lane in lanes] == [
        ((0, 0), ["w['0:2']"]),
        ((1, 0), ["w['2:3']"]),
        ((1, 1), ["w['3:4']"]),
        ((2, 1), ["w['4:6']"]),
    ]


def test_a_rank_without_elements_takes_part_in_a_lane_of_empty_pieces():
    lanes = lanes_of({"r0": sharded({"w": (2,)}, 4), "r1": single({"w": (2,)})})
    assert [(lane.holders, lane.elements) for lane in lanes] == [
        ((0, 0), 1),
        ((1, 0), 1),
        ((2, 0), 0),
        ((3, 0), 0),
    ]
    assert lanes_of_rank(lanes, 0, 3) == (3,)
    assert lanes_of_rank(lanes, 1, 0) == (0, 1, 2, 3)


def test_without_replicas_there_are_no_lanes():
    assert lanes_of({}) == ()


def test_a_large_model_in_two_layouts_is_cut_within_its_kinds_of_parameters():
    """With a thousand parameters of two kinds, equal cuts are refined once, and the time stays short."""
    model = {f"layer{i}.{kind}": (64, 8) if kind == "w" else (64,) for i in range(500) for kind in "wb"}
    lanes = lanes_of({"r0": sharded(model, 16), "r1": sharded(model, 8), "r2": single(model)})
    assert len(lanes) == 16
    assert sum(lane.elements for lane in lanes) == sum(math.prod(shape) for shape in model.values())


# --- refusals ---------------------------------------------------------------------------------------------


def refusal(**layouts: ReplicaLayout) -> str:
    with pytest.raises(ConfigError) as caught:
        lanes_of(layouts)
    return str(caught.value)


def layout(*ranks: list[HeldParameter]) -> ReplicaLayout:
    return ReplicaLayout(tuple(tuple(row) for row in ranks))


def test_a_missing_parameter_is_named_with_both_replicas():
    less, more = single({"a": (2,)}), single({"a": (2,), "b": (2,)})
    text = "r1 has the parameter b and r0 has not: start every replica with the same model"
    assert refusal(r0=less, r1=more) == text
    assert refusal(r1=more, r0=less) == text


def test_a_different_shape_or_dtype_is_named_with_both_replicas():
    assert refusal(r0=single({"a": (2,)}), r1=single({"a": (3,)})) == (
        "a is float32[2] in r0 and float32[3] in r1: start every replica with the same model"
    )
    half = layout([HeldParameter("a", "bfloat16", (2,), TensorRegion.whole((2,)))])
    assert "a is float32[2] in r0 and bfloat16[2] in r1" in refusal(r0=single({"a": (2,)}), r1=half)


def test_parts_that_overlap_are_refused():
    rows = [held("a", (6,), (0,), (4,))], [held("a", (6,), (3,), (3,))]
    assert "ranks 0 and 1 of r0 hold parts of a that overlap and are not equal" in refusal(r0=layout(*rows))


def test_parts_that_leave_a_gap_are_refused():
    rows = [held("a", (6,), (0,), (2,))], [held("a", (6,), (3,), (3,))]
    assert "the ranks of r0 hold 5 of the 6 elements of a" in refusal(r0=layout(*rows))


@pytest.mark.parametrize(("begin", "sizes"), [((4,), (3,)), ((-1,), (3,)), ((7,), (-1,)), ((0, 0), (6, 1))])
def test_a_part_outside_of_the_whole_is_refused(begin, sizes):
    text = refusal(
        r0=layout([held("a", (6,))], [HeldParameter("a", "float32", (6,), TensorRegion(begin, sizes))])
    )
    assert "rank 1 of r0 describes a part of a that lies outside of float32[6]" in text


def test_one_name_for_parameters_of_two_stages_is_refused():
    text = refusal(r0=layout([held("0.weight", (2,))], [held("0.weight", (3,))]))
    assert "0.weight is float32[2] at rank 0 of r0 and float32[3] at rank 1" in text
    assert "give parameters of different pipeline stages different names" in text


def test_a_name_that_a_rank_lists_twice_is_refused():
    assert "rank 0 of r0 has two parameters named a" in refusal(r0=layout([held("a", (2,)), held("a", (2,))]))
