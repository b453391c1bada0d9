"""The launcher's next action is a pure function of the ranks' exit codes."""

import pytest

from fabric.cli.launch.devices import select_devices
from fabric.cli.launch.restart_policy import (
    DEVICE_ERRORS_WITHIN_S,
    HEALTHY_S,
    DeviceHistory,
    RestartPolicy,
    choose_layout,
)
from fabric.protocol.nodes import NodeEnd
from fabric.runtime.rank_layout import RankLayout


def end(*codes: int, first: tuple[int, ...] | None = None, ran_s: float = 1.0) -> NodeEnd:
    """Make the end of an attempt; ``first`` are the ranks that failed first, by default all that failed."""
    failed = tuple(rank for rank, code in enumerate(codes) if code) if first is None else first
    return NodeEnd(dict(enumerate(codes)), failed, ran_s)


@pytest.mark.parametrize(
    ("codes", "first", "code"),
    [
        ((0,), None, 0),
        ((0, 0), None, 0),
        ((1,), None, 1),
        ((0, 1), None, 1),
        ((75, 1), None, 1),
        ((75, 1), (0,), 1),
        ((2,), None, 2),
        ((126,), None, 126),
        ((127, 127), None, 127),
        # The rank lost its peer before it could attach, and torch's error ended the rank.
        ((-9, 1), (0,), None),
        ((-9, 1), (0, 1), None),
        ((76, 1), (0,), None),
        # One rank ended with 1 first, and the launcher then ended the other rank.
        ((1, -15), (0,), 1),
        ((75,), None, None),
        ((75, 75), None, None),
        ((76, 75), None, None),
        ((-11,), None, None),
        ((139,), None, None),
        ((0, 75), None, None),
        ((3,), None, None),
    ],
)
def test_only_final_exit_codes_end_the_launcher(codes, first, code):
    move = RestartPolicy().judge(end(*codes, first=first))
    assert move.code == code and not move.refused


def test_a_refused_layout_is_neither_an_end_nor_a_restart():
    policy = RestartPolicy(most=0)
    for codes in ((78,), (78, 78), (1, 78), (-15, 78)):
        move = policy.judge(end(*codes))
        assert move.refused and move.code is None and move.pause_s == 0
    assert policy.restarts == 0


def test_quick_deaths_are_restarted_more_and_more_slowly():
    policy = RestartPolicy()
    pauses = [policy.judge(end(75)).pause_s for _ in range(9)]
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    assert policy.judge(end(75, ran_s=HEALTHY_S)).pause_s == 0
    assert [policy.judge(end(75)).pause_s for _ in range(2)] == [0, 1]


@pytest.mark.parametrize(("codes", "code"), [((75,), 75), ((-9,), 137), ((0, -11), 139), ((3, 75), 3)])
def test_used_up_restarts_pass_the_first_failures_code_on(codes, code):
    policy = RestartPolicy(most=1)
    assert policy.judge(end(*codes)).code is None
    move = policy.judge(end(*codes))
    assert move.code == code and "--restarts are used up" in move.why


def test_the_reason_names_rank_and_signal():
    assert "rank 1 was killed by SIGKILL" in RestartPolicy().judge(end(75, -9, first=(1,))).why
    assert "its device has failed" in RestartPolicy().judge(end(0, 76)).why


# --- devices ----------------------------------------------------------------------------------------------


def test_a_device_is_used_no_more_after_its_second_error_within_half_an_hour():
    history = DeviceHistory()
    assert not history.note("1", 0.0) and history.usable(("0", "1", "2")) == ("0", "1", "2")
    assert not history.note("2", 1.0)
    assert not history.note("1", DEVICE_ERRORS_WITHIN_S), "the first is too long ago"
    assert history.note("1", DEVICE_ERRORS_WITHIN_S + 1)
    assert history.usable(("0", "1", "2")) == ("0", "2")


def test_fewer_devices_lead_to_the_next_layout_that_the_script_builds():
    layouts = [RankLayout(4, 4), RankLayout(2, 2), RankLayout(1)]
    assert choose_layout(layouts, 4, []) == layouts[0]
    assert choose_layout(layouts, 3, []) == layouts[1]
    assert choose_layout(layouts, 3, [layouts[1]]) == layouts[2]
    assert choose_layout(layouts, 0, []) is None
    assert choose_layout(layouts, 4, layouts) is None


@pytest.mark.parametrize(
    ("listed", "devices"),
    [
        (None, ("0", "1", "2")),
        ("", ()),
        ("-1", ()),
        ("2,0", ("2", "0")),
        ("0,7,1", ("0", "1")),
        ("0,-1,1", ("0",)),
        ("1,1", ("1",)),
        ("GPU-abc,MIG-def", ("GPU-abc", "MIG-def")),
        ("none", ()),
    ],
)
def test_cuda_visible_devices_names_the_devices(listed, devices):
    assert select_devices(listed, ("0", "1", "2")) == devices
