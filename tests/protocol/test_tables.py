"""Every event, message and effect has its place in a table, and every mode its moves."""

import re
from pathlib import Path
from typing import get_args

import pytest
from protocol.makers import session_of

import fabric
from fabric.client.control.engine import MainThreadOrder
from fabric.protocol.leader import core as leader_core
from fabric.protocol.member.core import MemberCore
from fabric.protocol.member.state import TRANSITIONS, MemberConfig, Mode
from fabric.protocol.messages import leader_events, member_events
from fabric.protocol.messages import network as m

MEMBER = MemberCore(session_of("a"), MemberConfig(), 0.0)


@pytest.mark.parametrize(
    ("table", "kinds"),
    [
        (MEMBER._handlers, get_args(member_events.Event)),
        (MEMBER._leader_handlers, get_args(m.LeaderMessage)),
        (leader_core._HANDLERS, get_args(leader_events.Event)),
        # The message OpenSession reaches the core as the event SessionOpened.
        (leader_core._FROM_MEMBER, set(get_args(m.MemberMessage)) - {m.OpenSession}),
    ],
    ids=["member events", "from the leader", "leader events", "from a member"],
)
def test_a_table_names_every_kind_and_nothing_else(table, kinds):
    assert set(table) == set(kinds)


def test_the_engine_performs_every_effect_of_a_member_or_hands_it_to_the_main_thread():
    source = (Path(fabric.__file__).parent / "client" / "control" / "engine.py").read_text()
    performed = set(re.findall(r"^ {12}io\.(\w+): ", source, flags=re.MULTILINE))
    orders = {kind.__name__ for kind in get_args(MainThreadOrder)}
    assert {kind.__name__ for kind in get_args(member_events.Effect)} == performed | orders
    # The engine also ends its count of failed rounds at an Apply, and hands it on.
    assert performed & orders == {"Apply"}


def test_every_mode_is_in_the_table_can_be_reached_and_can_be_left():
    assert set(TRANSITIONS) == set(Mode)
    reached = {Mode.OUTSIDE}
    for _ in Mode:
        reached |= {to for mode in reached for to in TRANSITIONS[mode]}
    assert reached == set(Mode)
    # An evicted member moves to the mode OUTSIDE from every other mode.
    assert all(Mode.OUTSIDE in moves for mode, moves in TRANSITIONS.items() if mode is not Mode.OUTSIDE)
