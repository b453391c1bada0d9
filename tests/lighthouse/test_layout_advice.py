"""The lighthouse plans another layout for a replica that stays slow, and orders it from the leader."""

from types import SimpleNamespace

import pytest
from lighthouse.test_slow_ranks import RankedFleet
from lighthouse.test_slowness import BEFORE, Fleet
from msgspec.structs import replace

from fabric.cli.status import _slow
from fabric.lighthouse.diagnosis.remedies import LASTING
from fabric.model import Adaptation, LaunchedLayouts, LayoutChange, OperatorOverrides
from fabric.protocol.messages.leader_events import LayoutAdvised

FSDP = LaunchedLayouts("ranks=4", ("ranks=4", "ranks=3", "ranks=2", "ranks=1"))
PIPELINE = LaunchedLayouts("ranks=4,layers=4+4+4+4", ("ranks=4,layers=4+4+4+4",))


class LaunchedFleet(RankedFleet):
    """Replicas of four ranks that `fabric launch` has started."""

    adapt = "act"

    def __init__(self, launched: LaunchedLayouts, adapt: str = "act", stages=(0, 0, 0, 0)) -> None:
        super().__init__(adapt=adapt)
        self.stages = stages
        for peer in self.core.state.liveness.peers.values():
            peer.session.launched, peer.session.ranks = launched, (None,) * 3
            peer.session.micro_batches = peer.micro_batches = 48
        self.orders: list[LayoutAdvised] = []

    def run(self, steps: int, **factors: float) -> list[tuple[str, str]]:
        events = []
        for _ in range(steps):
            events += super().run(1, **factors)
            order = self.watch.remedies.take_order()
            self.orders += [order] if isinstance(order, LayoutAdvised) else []
        return events

    def shown(self) -> dict:
        return self.watch.to_json(self.core)


def slowed(launched: LaunchedLayouts, factor: float, steps: int = LASTING + 15, **more) -> LaunchedFleet:
    """A fleet whose rank 2 of r1 has been slow for so many steps."""
    fleet = LaunchedFleet(launched, **more)
    fleet.run(BEFORE)
    fleet.slow(steps, r1_2=factor)
    return fleet


def test_a_slow_rank_is_left_out_once_its_slowness_has_lasted():
    fleet = slowed(FSDP, 8.0, steps=LASTING - 5)
    assert not fleet.orders
    fleet.slow(15, r1_2=8.0)
    (order,) = fleet.orders
    assert order.process.replica == "r1" and order.layout == "ranks=3 without 2"
    assert order.epoch == 1 and order.gain == pytest.approx(11 / 8.5 - 1, rel=0.1) and order.cost_s > 0
    assert "with groups of 3 and not 4 ranks" in order.reason
    fleet.slow(50, r1_2=8.0)
    assert len(fleet.orders) == 1, "an order is given once in each epoch"


def test_the_next_smaller_layout_is_taken_where_the_script_has_refused_one():
    fleet = slowed(replace(FSDP, refused=("ranks=3",)), 8.0)
    assert [x.layout for x in fleet.orders] == ["ranks=2 without 2+3"]


def test_a_rank_that_is_a_little_slow_costs_less_than_its_absence():
    assert not slowed(FSDP, 1.2).orders


def test_a_slow_pipeline_stage_gets_fewer_layers():
    fleet = slowed(PIPELINE, 2.5, stages=(0, 1, 2, 3))
    (order,) = fleet.orders
    assert order.layout == "ranks=4,layers=5+5+2+4" and "stage 2 of replica r1" in order.reason
    assert order.gain > 0.05


def test_a_split_that_the_script_has_refused_is_not_ordered_again():
    refusing = replace(PIPELINE, refused=("ranks=4,layers=5+5+2+4",))
    assert not slowed(refusing, 2.5, stages=(0, 1, 2, 3)).orders


@pytest.mark.parametrize("launched", [LaunchedLayouts(), LaunchedLayouts("ranks=4"), LaunchedLayouts("bad")])
def test_a_replica_whose_launcher_takes_no_orders_keeps_its_layout(launched):
    assert not slowed(launched, 8.0).orders


def test_a_vetoed_replica_and_one_with_a_changed_layout_keep_their_layouts():
    for held in ("veto", "changed"):
        fleet = LaunchedFleet(FSDP)
        if held == "veto":
            fleet.core.limits.overrides = OperatorOverrides(vetoed=("r1",))
        else:
            changes = Adaptation(layouts=(LayoutChange("r1", 1, "ranks=3", "ranks=4", 0.0),))
            fleet.record = fleet.core.state.record = replace(fleet.record, adaptation=changes)
        fleet.run(BEFORE)
        fleet.slow(LASTING + 15, r1_2=8.0)
        assert not fleet.orders, held


def test_a_slower_replica_under_a_veto_does_not_hide_the_one_that_may_change():
    fleet = LaunchedFleet(FSDP)
    fleet.core.limits.overrides = OperatorOverrides(vetoed=("r0",))
    fleet.run(BEFORE)
    fleet.slow(LASTING + 15, r0_1=12.0, r1_2=8.0)
    assert [x.process.replica for x in fleet.orders] == ["r1"]


def test_in_the_mode_advise_the_layout_is_shown_and_not_ordered():
    fleet = LaunchedFleet(FSDP, adapt="advise")
    fleet.run(BEFORE)
    events = fleet.slow(LASTING + 15, r1_2=8.0)
    assert not fleet.orders and events.count(("advice", "r1")) == 2, "shares first, then the layout"
    shown = fleet.shown()["layout_advice"]
    assert (shown["remedy"], shown["replica"], shown["layout"]) == ("exclusion", "r1", "ranks=3 without 2")
    assert any("advice: r1 in the layout ranks=3 without 2" in line for line in _slow(fleet.shown()))
    fleet.slow(30)
    assert fleet.shown()["layout_advice"] is None


def test_layouts_in_force_are_shown():
    fleet = LaunchedFleet(FSDP)
    change = LayoutChange("r1", 1, "ranks=3 without 2", "ranks=4", 1.0, "rank 2 is slow")
    fleet.core.state.record = replace(fleet.record, adaptation=Adaptation(layouts=(change,)))
    assert _slow(fleet.shown()) == ["layout of r1: ranks=3 without 2, usually ranks=4: rank 2 is slow"]


# --- a spare ----------------------------------------------------------------------------------------------


def with_spare(fleet: Fleet) -> Fleet:
    session = SimpleNamespace(spare=True, launched=LaunchedLayouts(), micro_batches=12, ranks=())
    fleet.core.state.liveness.peers["s0"] = SimpleNamespace(session=session, connected=True, micro_batches=12)
    return fleet


def drained(fleet: Fleet, confirmed: bool) -> list[LayoutAdvised]:
    orders = []
    fleet.run(BEFORE)
    for step in range(LASTING + 20):
        fleet.run(1, r1=4.0)
        if confirmed and step == LASTING:
            fleet.watch.remedies.confirmed.add("r1")
        order = fleet.watch.remedies.take_order()
        orders += [order] if isinstance(order, LayoutAdvised) else []
    return orders


def test_a_spare_replaces_a_replica_whose_device_is_slow():
    (order,) = drained(with_spare(Fleet(adapt="act")), confirmed=True)
    assert (order.process.replica, order.layout) == ("r1", "")
    assert "with the spare s0 in its place" in order.reason


def test_no_replica_is_drained_for_a_slowness_that_no_micro_benchmark_has_confirmed():
    assert not drained(with_spare(Fleet(adapt="act")), confirmed=False)


def test_no_replica_is_drained_without_a_spare():
    assert not drained(Fleet(adapt="act"), confirmed=True)
