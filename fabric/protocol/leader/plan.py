"""The plan of a leader: a table of rules in order."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from fabric.model import Record, Value

if TYPE_CHECKING:
    from fabric.protocol.leader.core import LeaderCore


class PlanRule(Value):
    """One row of the plan."""

    name: str
    # Returns whether the rule made a move, which ends the pass; a rule that returns None never ends it.
    apply: Callable[["LeaderCore", Record], bool | None]


def first_move(rules: tuple[PlanRule, ...], leader: "LeaderCore", record: Record) -> bool:
    """Apply the rules in order until a rule makes its move; return whether a rule did."""
    return any(rule.apply(leader, record) for rule in rules)


def _fail(leader: "LeaderCore", record: Record) -> bool:
    if not leader.endings.fail(record):
        return False
    if leader.endings.restart_after_failure:
        leader.starts.start_again(record)
    return True


def _change_settled_roster(leader: "LeaderCore", record: Record) -> None:
    """Rule 4: a planned epoch only while every member runs in the epoch in force."""
    if leader.state.is_settled(record):
        first_move(SETTLED_RULES, leader, record)


# The first of these rules that applies makes the move, once every member runs in the epoch in force.
SETTLED_RULES: tuple[PlanRule, ...] = (
    PlanRule("rescale", lambda leader, record: leader.orders.rescale(record)),
    PlanRule("drain", lambda leader, record: leader.orders.drain(record)),
    PlanRule("admit", lambda leader, record: leader.joins.admit(record)),
    PlanRule("adapt shares", lambda leader, record: leader.adaptations.adapt(record)),
    PlanRule("change a layout", lambda leader, record: leader.relayouts.change(record)),
    PlanRule("serve newcomers", lambda leader, record: leader.joins.serve(record)),
)

# The rules of one planning pass over a job that has a record and is not complete.
PLAN_RULES: tuple[PlanRule, ...] = (
    PlanRule("go on above a restored store", lambda leader, record: leader.starts.go_on_above(record)),
    PlanRule("write overrides", lambda leader, record: leader.writer.write_overrides(record)),
    PlanRule("evict slow joiners", lambda leader, record: leader.evictions.evict_slow_joiners(record)),
    PlanRule(
        "evict unresponsive members", lambda leader, record: leader.evictions.evict_unresponsive(record)
    ),
    PlanRule("complete", lambda leader, record: leader.endings.complete(record)),
    PlanRule("fail, or start a failed job again", _fail),
    PlanRule("evict", lambda leader, record: leader.evictions.evict(record)),
    PlanRule("rebuild the ring", lambda leader, record: leader.rebuilds.rebuild(record)),
    PlanRule("decide", lambda leader, record: leader.decisions.decide_epoch(record)),
    PlanRule("serve blocking joins", lambda leader, record: leader.joins.serve_blocking_joins(record)),
    PlanRule("change a settled roster", _change_settled_roster),
    PlanRule("notify the replicas kept out", lambda leader, record: leader.admission.notify_kept_out(record)),
)


def make_plan(leader: "LeaderCore") -> None:
    """Make the first move that is due."""
    record = leader.state.record
    if record is None:
        leader.starts.start(None)
    elif not record.complete:
        first_move(PLAN_RULES, leader, record)
