"""The lighthouse orders shares by speed from the leader, and takes them back when all members are well."""

from dataclasses import dataclass

import pytest
from lighthouse.test_slowness import BEFORE, MICRO_BATCHES, Fleet
from msgspec.structs import replace

from fabric.cli.status import _slow
from fabric.lighthouse.diagnosis.slowness import SlownessWatch
from fabric.model import Adaptation, OperatorOverrides, Sharing
from fabric.protocol.messages.leader_events import SharesAdvised
from fabric.protocol.rules.assignment import apportion, asked_share, with_shares


@dataclass
class ActingFleet(Fleet):
    """A fleet whose leader does at once as it is told."""

    adapt: str = "act"
    obeys: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.orders: list[SharesAdvised] = []

    def run(self, steps: int, **factors: float) -> list[tuple[str, str]]:
        events = []
        for _ in range(steps):
            events += super().run(1, **factors)
            if (order := self.watch.remedies.take_order()) is not None:
                self.orders.append(order)
                if self.obeys:
                    self.adopt(order)
        return events

    def adopt(self, order: SharesAdvised) -> None:
        adaptation = Adaptation(order.speeds, order.gain, order.cost_s, order.reason, MICRO_BATCHES)
        asked = [asked_share(self.record, member) for member in self.record.roster]
        self.write(roster=with_shares(self.record.roster, asked, adaptation), adaptation=adaptation)

    def write(self, **fields) -> None:
        self.record = self.core.state.record = replace(self.record, epoch=self.record.epoch + 1, **fields)

    def counts(self) -> dict[str, int]:
        shares = [member.shares for member in self.record.roster]
        return dict(zip(self.names, apportion(MICRO_BATCHES, shares), strict=True))


EQUAL = {"r0": 4, "r1": 4, "r2": 4}
HALF = {"r0": 5, "r1": 2, "r2": 5}


def test_a_slow_replica_gets_fewer_micro_batches_once_and_all_of_them_back_when_it_is_well():
    fleet = ActingFleet()
    fleet.run(BEFORE)
    assert fleet.run(10, r1=2.0) == [("slow", "r1")]
    (order,) = fleet.orders
    assert order.epoch == 1 and order.gain == pytest.approx(8 / 5 - 1, rel=0.05) and order.cost_s == 0.0
    assert "r1 computes at 0.5" in order.reason and fleet.counts() == HALF
    fleet.run(100, r1=2.0)
    assert len(fleet.orders) == 1, "the shares stay while the speeds do"
    fleet.run(20)
    assert len(fleet.orders) == 2 and fleet.orders[1].speeds == () and fleet.counts() == EQUAL
    assert fleet.orders[1].reason == "r1 computes as fast as its equals again"


def test_the_shares_in_force_are_shown_to_people_with_gain_and_reason():
    fleet = ActingFleet()
    fleet.run(BEFORE)
    fleet.run(30, r1=2.0)
    shown = fleet.watch.to_json(fleet.core)
    assert shown["advice"] is None and shown["shares"]["micro_batches"] == HALF
    assert shown["shares"]["speeds"]["r1"] == pytest.approx(0.5, abs=0.06)
    assert any(line.startswith("shares by speed: ") and "r1 2" in line for line in _slow(shown))


def test_the_first_steps_of_a_slowdown_cost_no_change_of_shares_of_their_own():
    fleet = ActingFleet()
    fleet.run(BEFORE)
    fleet.run(3, r1=1.5)
    fleet.run(40, r1=4.0)
    (order,) = fleet.orders
    assert order.speeds[0].speed == pytest.approx(250, rel=0.05)


def test_a_replica_that_gets_much_slower_gets_fewer_micro_batches_again():
    fleet = ActingFleet()
    fleet.run(BEFORE)
    fleet.run(30, r1=2.0)
    fleet.run(40, r1=4.0)
    assert fleet.counts()["r1"] == 1 and len(fleet.orders) == 2


def test_an_order_that_is_not_followed_is_given_once_per_epoch():
    fleet = ActingFleet(obeys=False)
    fleet.run(BEFORE)
    fleet.run(60, r1=2.0)
    assert len(fleet.orders) == 1
    fleet.write()
    fleet.run(5, r1=2.0)
    assert [order.epoch for order in fleet.orders] == [1, 2]


def test_a_vetoed_replica_is_called_slow_and_keeps_its_share():
    fleet = ActingFleet()
    fleet.core.limits.overrides = OperatorOverrides(vetoed=("r1",))
    fleet.run(BEFORE)
    assert fleet.run(30, r1=2.0) == [("slow", "r1")]
    assert not fleet.orders and fleet.watch.to_json(fleet.core)["vetoed"] == ["r1"]


def test_in_the_mode_advise_nothing_is_ordered():
    fleet = ActingFleet(adapt="advise")
    fleet.run(BEFORE)
    assert fleet.run(30, r1=2.0) == [("slow", "r1"), ("advice", "r1")]
    assert not fleet.orders and fleet.counts() == EQUAL


def test_nothing_is_ordered_while_a_member_may_have_failed_or_the_whole_job_is_slow():
    fleet = ActingFleet()
    fleet.run(BEFORE)
    fleet.failed = {"r2"}
    fleet.run(10, r1=2.0)
    assert not fleet.orders
    fleet.failed = set()
    fleet.run(2, r1=2.0)
    assert len(fleet.orders) == 1
    whole = ActingFleet()
    whole.run(BEFORE)
    whole.run(30, r0=1.5, r1=1.5, r2=1.5)
    assert not whole.orders


def test_after_a_fail_over_shares_stay_until_the_new_lighthouse_has_measured_that_all_are_well():
    fleet = ActingFleet()
    fleet.run(BEFORE)
    fleet.run(30, r1=2.0)
    fleet.watch = SlownessWatch()
    fleet.run(BEFORE + 60, r1=2.0)
    assert fleet.counts() == HALF and len(fleet.orders) == 1
    fleet.watch = SlownessWatch()
    fleet.run(BEFORE)
    assert fleet.counts() == EQUAL and fleet.orders[-1].speeds == ()


def test_the_next_process_of_a_slow_replica_begins_with_a_full_share():
    fleet = ActingFleet()
    fleet.run(BEFORE)
    fleet.run(10, r1=2.0)
    again = tuple(
        replace(x, incarnation=2, shares=1) if x.replica == "r1" else replace(x, shares=1)
        for x in fleet.record.roster
    )
    fleet.write(roster=again, adaptation=Adaptation())
    fleet.incarnations["r1"] = 2
    fleet.run(40)
    assert fleet.counts() == EQUAL and len(fleet.orders) == 1


def test_advice_for_data_that_cannot_be_divided_unequally_says_why_it_is_not_followed():
    fleet = ActingFleet(adapt="advise")
    fleet.write(sharing=Sharing("shrink", data_slots=3))
    fleet.run(BEFORE)
    fleet.run(10, r1=2.0)
    assert "drain the slow replica instead" in fleet.watch.to_json(fleet.core)["advice"]["held"]
