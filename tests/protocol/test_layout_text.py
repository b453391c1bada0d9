"""A layout written as text reads back equal, and any other text is refused with a sentence."""

import base64
import json
import zlib

import pytest
from hypothesis import given
from protocol.test_lanes import LINEAR, jobs, sharded, single

from fabric.errors import ProtocolError
from fabric.protocol.rules.lanes import ReplicaLayout
from fabric.protocol.rules.layout_text import MAX_CHARACTERS, check_layout, layout_text, read_layout


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
    with pytest.raises(ProtocolError, match="r0 announced a layout that cannot be: the ranks of r0 hold"):
        check_layout("r0", layout_text(half), 1)
