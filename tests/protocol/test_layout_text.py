"""A layout written as text reads back equal, and any other text is refused with a sentence."""

import base64
import itertools
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol.test_lanes import LINEAR, jobs, sharded, single

from fabric.errors import ProtocolError
from fabric.protocol.rules import lanes
from fabric.protocol.rules import layout_text as layout_text_module
from fabric.protocol.rules.lanes import ReplicaLayout, TensorRegion
from fabric.protocol.rules.layout_text import (
    MAX_CHARACTERS,
    check_layout,
    layout_summary,
    layout_text,
    read_layout,
)


@given(jobs())
def test_a_layout_survives_its_text(job):
    for layout in job[1].values():
        assert read_layout(layout_text(layout)) == layout


def test_equal_layouts_have_one_text_and_others_another():
    assert layout_text(sharded(LINEAR, 2)) == layout_text(sharded(LINEAR, 2))
    assert len({layout_text(x) for x in (single(LINEAR), sharded(LINEAR, 2), sharded(LINEAR, 4))}) == 3


def test_a_thousand_parameters_over_eight_ranks_fit_into_a_message():
    model = {
        f"model.layers.{i}.{kind}.weight": (4096, 4096 if kind != "norm" else 1)
        for i in range(143)
        for kind in ("q", "k", "v", "o", "up", "down", "norm")
    }
    text = layout_text(sharded(model, 8))
    assert len(model) > 1000
    assert len(text) < MAX_CHARACTERS and text.isprintable()


def test_a_layout_that_does_not_fit_is_refused_with_what_to_do():
    model = {f"p{i}.{i * 7919 % 10007}": (i % 911 + 1, i % 13 + 1) for i in range(20_000)}
    with pytest.raises(ProtocolError, match=r"at most 65536 are sent: turn FABRIC_UNEQUAL off"):
        layout_text(sharded(model, 4))


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "?",
        "AAAA",
        base64.b64encode(zlib.compress(b"{")).decode(),
        base64.b64encode(zlib.compress(b" " * (17 << 20))).decode(),
        packed([]),
        packed({"parameters": [], "ranks": [[[0]]]}),
        packed({"parameters": [["a", "float32", [2]]], "ranks": [[[-1]]]}),
        packed({"parameters": [["a", "float32", [2]]], "ranks": [[[True]]]}),
        packed({"parameters": [["a", "float32", [2]]], "ranks": [[[0, [0]]]]}),
        packed({"parameters": [["a", "float32", [2]]], "ranks": [[[0, [0], [-2]]]]}),
        packed({"parameters": [["a", "float32", [2.0]]], "ranks": [[[0]]]}),
        packed({"parameters": [[1, "float32", [2]]], "ranks": [[[0]]]}),
        packed({"parameters": [["a", "float32", 2]], "ranks": [[[0]]]}),
    ],
)
def test_text_that_is_no_layout_is_refused(text):
    with pytest.raises(ProtocolError, match="announced a layout that cannot be read"):
        read_layout(text)


def test_a_session_announces_the_whole_model_over_its_ranks():
    check_layout("r0", layout_text(sharded(LINEAR, 2)), 2)
    with pytest.raises(ProtocolError, match="r0 has 3 ranks and announced the layout of 2"):
        check_layout("r0", layout_text(sharded(LINEAR, 2)), 3)
    half = ReplicaLayout(sharded(LINEAR, 2).ranks[:1])
    with pytest.raises(ProtocolError, match="a layout that cannot be: the ranks of this replica hold"):
        check_layout("r0", layout_text(half), 1)


def cut(*counts: int) -> str:
    """One parameter that is cut into so many parts along each dimension, each part at a rank of its own."""
    ranks = [[[0, list(at), [1] * len(counts)]] for at in itertools.product(*map(range, counts))]
    return packed({"parameters": [["w", "float32", list(counts)]], "ranks": ranks})


def test_parts_along_one_dimension_are_compared_with_their_neighbours_only(monkeypatch):
    """All pairs of 4,000 parts are 8 million comparisons, which held the lighthouse for minutes."""
    monkeypatch.setattr(lanes, "MOST_COMPARISONS", 1)
    assert layout_summary(cut(4000)).parts == 4000


def test_a_grid_over_4096_ranks_is_compared_and_more_dimensions_are_refused():
    assert layout_summary(cut(64, 64)).ranks == 4096
    with pytest.raises(ProtocolError, match="too many ways beside each other: cut it along fewer dimensions"):
        layout_summary(cut(16, 16, 16))


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 4), min_size=2, max_size=8))
def test_the_sweep_finds_an_overlap_where_all_pairs_have_one(corners):
    regions = [TensorRegion((a, b), (c, d)) for a, b, c, d in corners]
    regions = list(dict.fromkeys(r for r in regions if r.elements))
    pairs = itertools.combinations(regions, 2)
    assert (lanes.overlapping(regions) is not None) == any(a.common(b).elements for a, b in pairs)


@pytest.mark.parametrize(
    "body",
    [
        '{"parameters":[],"ranks":[' + ",".join(["[]"] * (layout_text_module.MAX_CONTAINERS)) + "]}",
        '{"parameters":[],"ranks":[]' + " " * layout_text_module.MAX_JSON_BYTES + "}",
    ],
    ids=["lists", "bytes"],
)
def test_a_short_text_that_unpacks_to_much_is_refused_before_it_is_read(body, monkeypatch):
    monkeypatch.setattr(layout_text_module.json, "loads", None)
    text = base64.b64encode(zlib.compress(body.encode(), 9)).decode()
    assert len(text) < MAX_CHARACTERS
    with pytest.raises(ProtocolError, match="too long"):
        layout_summary(text)


def test_only_accepted_layouts_are_kept_and_only_some(monkeypatch):
    monkeypatch.setattr(layout_text_module, "_known", {})
    monkeypatch.setattr(layout_text_module, "MOST_KNOWN", 3)
    for count in range(2, 7):
        layout_summary(cut(count))
        with pytest.raises(ProtocolError):
            layout_summary(packed({"parameters": [["w", "float32", [count]]], "ranks": [[[0, [0], [1]]]]}))
    assert list(layout_text_module._known) == [cut(4), cut(5), cut(6)]
