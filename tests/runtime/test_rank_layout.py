"""Layouts are read, written and refused as docs/jobs.md says."""

import pytest

from fabric.cli.launch.command import candidates, parse_ranks
from fabric.errors import ConfigError
from fabric.runtime.config import asked_layout
from fabric.runtime.rank_layout import RankLayout, parse_layout


@pytest.mark.parametrize(
    ("text", "layout", "shown"),
    [
        ("", RankLayout(), ""),
        ("4", RankLayout(4), "ranks=4"),
        ("tp=2", RankLayout(0, 2), "tp=2"),
        ("ranks=8, tp=2, layers=5+7", RankLayout(8, 2, (5, 7)), "ranks=8,tp=2,layers=5+7"),
        ("ranks=4,tp=1", RankLayout(4), "ranks=4"),
    ],
)
def test_a_layout_is_read_and_written(text, layout, shown):
    assert parse_layout(text) == layout
    assert str(layout) == shown and parse_layout(shown) == layout


@pytest.mark.parametrize(
    "text",
    (
        *("0", "x", "tp=0", "tp=-1", "tp", "dp=2", "tp=2,tp=2", "layers=5+", "layers=+", "layers=0+4", "4,8"),
        *("tp=999999999", "ranks=9999999", "tp=２", "ranks=3,tp=2", "ranks=4,layers=1+1+1"),
    ),
)
def test_a_layout_that_cannot_be_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="FABRIC_LAYOUT is"):
        parse_layout(text)


def test_a_layout_gives_its_stages_and_data_parallel_ranks():
    layout = parse_layout("ranks=16,tp=2,layers=5+7")
    assert (layout.stages, layout.data_parallel) == (2, 4)
    assert (RankLayout(4).stages, RankLayout(4).data_parallel) == (1, 4)


@pytest.mark.parametrize(("text", "ranks"), [("4", (4, 4)), ("1:4", (1, 4)), ("2:2", (2, 2))])
def test_ranks_are_a_count_or_a_range(text, ranks):
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "0", "4:1", "1:2:3", "a", "1:", ":4", "-1", "1000000", "0:2"])
def test_impossible_numbers_of_ranks_are_refused(text):
    with pytest.raises(ConfigError, match="the number of ranks is"):
        parse_ranks(text)


def listed(layouts: tuple[str, ...], ranks: str) -> list[str]:
    return [str(layout) for layout in candidates(tuple(map(parse_layout, layouts)), ranks)]


def test_the_preferred_layout_comes_first_with_as_many_ranks_as_possible():
    assert listed((), "") == ["ranks=1"]
    assert listed((), "2:4") == ["ranks=4", "ranks=3", "ranks=2"]
    assert listed(("tp=2",), "1:5") == ["ranks=4,tp=2", "ranks=2,tp=2"]
    assert listed(("tp=4", "tp=2", "1"), "1:4") == ["ranks=4,tp=4", "ranks=4,tp=2", "ranks=2,tp=2", "ranks=1"]
    assert listed(("ranks=6,layers=2+2+2",), "") == ["ranks=6,layers=2+2+2"]


@pytest.mark.parametrize(("layouts", "ranks"), [(("tp=2",), ""), (("tp=4",), "3"), (("8",), "1:4")])
def test_ranks_that_no_layout_fits_are_refused(layouts, ranks):
    with pytest.raises(ConfigError, match="no layout of"):
        listed(layouts, ranks)


def test_a_script_is_told_its_layout_over_the_ranks_that_were_started():
    assert asked_layout({}) == RankLayout(1)
    assert asked_layout({"WORLD_SIZE": "4", "FABRIC_LAYOUT": "tp=2"}) == RankLayout(4, 2)
    with pytest.raises(ConfigError, match="this replica has 2 ranks: start 4"):
        asked_layout({"WORLD_SIZE": "2", "FABRIC_LAYOUT": "4"})
    with pytest.raises(ConfigError, match="a multiple of 2 ranks"):
        asked_layout({"WORLD_SIZE": "3", "FABRIC_LAYOUT": "tp=2"})
