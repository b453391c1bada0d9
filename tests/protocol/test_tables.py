"""Every event and message has its place in the tables of both cores, and every mode its moves."""

from typing import get_args

import pytest

from fabric.protocol import leader, leader_io, member, member_io
from fabric.protocol import messages as m
from fabric.protocol.member_state import TRANSITIONS, Mode


@pytest.mark.parametrize(
    ("table", "kinds"),
    [
        (member._HANDLERS, get_args(member_io.Event)),
        (member._FROM_LEADER, get_args(m.LeaderMessage)),
        (leader._HANDLERS, get_args(leader_io.Event)),
        # A session arrives as SessionOpened.
        (leader._FROM_MEMBER, set(get_args(m.MemberMessage)) - {m.Session}),
    ],
    ids=["member events", "from the leader", "leader events", "from a member"],
)
def test_a_table_names_every_kind_and_nothing_else(table, kinds):
    assert set(table) == set(kinds)


def test_every_mode_is_in_the_table_can_be_reached_and_can_be_left():
    assert set(TRANSITIONS) == set(Mode)
    reached = {Mode.OUTSIDE}
    for _ in Mode:
        reached |= {to for mode in reached for to in TRANSITIONS[mode]}
    assert reached == set(Mode)
    # Whoever is evicted goes outside, from wherever it is.
    assert all(Mode.OUTSIDE in moves for mode, moves in TRANSITIONS.items() if mode is not Mode.OUTSIDE)
