"""Schedules: drawn from a seed, read from a plan, checked against the job."""

import json
import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from fabric.cli.drill import read_plan
from fabric.drill.injection.played_faults import ORDERS
from fabric.drill.run.started_faults import SCRIPTS
from fabric.drill.schedule.drill_schedule import (
    DrillSchedule,
    ScheduledFault,
    check_schedule,
    parse_duration,
    parse_fault,
    parse_plan,
    random_schedule,
)
from fabric.drill.schedule.fault_table import FAULTS, FaultNeed, FaultScope, obstacle
from fabric.errors import ConfigError

NAMES = ("r0", "r1", "r2")
ALL = frozenset(FaultNeed)
PLAN = """
faults:
  - {fault: stop, target: r2, after: 90s, lasts: 2s, step: 7}
  - {fault: kill, target: r1, after: 1m}
expect: ["stall<=1s"]
"""


def drawn(seed: int, length_s: float = 3600.0) -> DrillSchedule:
    return random_schedule(f"{seed} every 20s for {length_s:g}s", NAMES, ALL)


def test_a_seed_gives_the_same_faults_again_and_another_seed_gives_others():
    assert drawn(7) == drawn(7) != drawn(8)
    assert drawn(7).origin == "--random '7 every 20s for 3600s'"


def test_the_drawn_times_are_those_of_a_poisson_process():
    times = [fault.after_s for fault in drawn(3, 200_000.0).faults]
    gaps = [after - before for before, after in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(20.0, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(20.0, rel=0.05)


def test_each_possible_kind_comes_before_a_kind_comes_again():
    faults = [fault.fault for fault in drawn(1).faults]
    possible = [name for name, kind in FAULTS.items() if not obstacle(kind, ALL)]
    assert sorted(faults[: len(possible)]) == sorted(possible)
    counts = Counter(faults)
    assert max(counts.values()) - min(counts[name] for name in possible) <= 1


def test_a_drawn_schedule_fits_its_job():
    for seed in range(20):
        check_schedule(drawn(seed), NAMES, ALL)


def test_a_fault_without_its_needs_is_not_drawn_and_says_why():
    few = frozenset((FaultNeed.TRAINERS,))
    names = {f.fault for f in random_schedule("1 every 1s for 1000s", NAMES, few).faults}
    inside = {"hang", "flip-gradient", "poison", "clock", "memory"}
    assert names == inside | {"kill", "stop", "slow", "kill-all", "kill-server", "cut-in", "lossy-link"}
    with pytest.raises(ConfigError, match="kill-two is not possible here: it needs a job of three replicas"):
        check_schedule(DrillSchedule((ScheduledFault("kill-two", "r1"),)), NAMES, few)
    with pytest.raises(ConfigError, match="no fault is possible here"):
        random_schedule("1 every 1s for 10s", NAMES, frozenset())


def test_a_plan_is_read_in_order_of_time(tmp_path: Path):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    plan = read_plan(path)
    assert plan.faults == (ScheduledFault("kill", "r1", 60.0), ScheduledFault("stop", "r2", 90.0, 2.0, 7))
    assert plan.expect == ("stall<=1s",) and plan.origin == f"--plan {path}"
    assert plan.faults[0].duration_s == 0.0 and plan.faults[1].duration_s == 2.0


def test_a_plan_may_be_json(tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"faults": [{"fault": "kill-all"}]}))
    assert read_plan(path).faults == (ScheduledFault("kill-all"),)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("faults: [", "is no YAML"),
        ("[1, 2]", "cannot be used"),
        ("faults: []", "cannot be used"),
        ("faults: [{target: r1}]", "missing required field `fault`"),
        ("faults: [{fault: kill, when: 3s}]", "unknown field `when`"),
        ("faults: [{fault: kil}]", 'there is no fault "kil"'),
        ("faults: [{fault: kill, after: soon}]", '"after" of fault 1 of the plan'),
        ("faults: [{fault: stop, lasts: 1 hour}]", '"lasts" of fault 1 of the plan'),
        ("faults: [{fault: kill, step: -1}]", "cannot be used"),
    ],
)
def test_a_malformed_plan_is_one_sentence(text: str, why: str, tmp_path: Path):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_plan(path)
    assert why in str(raised.value) and "\n" not in str(raised.value)


def test_a_plan_that_is_not_there_is_one_sentence(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(tmp_path / "none.yaml")


def test_a_plan_never_runs_code():
    with pytest.raises(ConfigError, match="there is no fault"):
        parse_plan({"faults": [{"fault": "!!python/object/apply:os.system [ls]"}]}, "plan")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill r2", ScheduledFault("kill", "r2")),
        ("kill", ScheduledFault("kill", "r1")),
        ("stop r1 5s", ScheduledFault("stop", "r1", 0.0, 5.0)),
        ("kill-lighthouse 500ms", ScheduledFault("kill-lighthouse", "", 0.0, 0.5)),
        ("kill-all", ScheduledFault("kill-all")),
        ("kill r2 @optimizer", ScheduledFault("kill", "r2", point="optimizer")),
        ("hang r0 3s @ring", ScheduledFault("hang", "r0", 0.0, 3.0, point="ring")),
    ],
)
def test_a_fault_is_read_from_words(text: str, fault: ScheduledFault):
    assert parse_fault(text, NAMES) == fault


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cannot be read"),
        ("kill r1 5s now", "cannot be read"),
        ("explode r1", 'there is no fault "explode"'),
        ("kill r9", 'names the replica "r9", which the job does not have: give one of r0, r1, r2'),
        ("kill-all r1", "hits all replicas: leave r1 away"),
        ("kill r1 5s", "lasts a moment"),
        ("stop r1 @ring", 'stop cannot hit the point "ring": kill and hang can'),
        ("kill r1 @nowhere", 'kill cannot hit the point "nowhere"'),
    ],
)
def test_an_impossible_fault_is_one_sentence(text: str, why: str):
    with pytest.raises(ConfigError) as raised:
        check_schedule(DrillSchedule((parse_fault(text, NAMES),)), NAMES, ALL)
    assert why in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "5", "-1s", "1e9s", "8d", "1 s s", "99999h"])
def test_a_wrong_duration_names_its_option(text: str):
    with pytest.raises(ConfigError, match="--every is"):
        parse_duration(text, "--every")


def test_durations_have_units():
    assert [parse_duration(x, "x") for x in ("500ms", "2s", "1.5m", "2min", "1h")] == [0.5, 2, 90, 120, 3600]
    with pytest.raises(ConfigError, match="every in --random must be more than 0s"):
        random_schedule("1 every 0s for 10s", NAMES, ALL)


def test_each_fault_says_what_it_does_how_it_is_seen_and_how_it_ends():
    for kind in FAULTS.values():
        assert kind.does and kind.seen and kind.undone and kind.needs, kind.name
        assert kind.scope in FaultScope


def test_each_fault_of_the_table_has_a_player_and_each_player_a_fault():
    assert set(SCRIPTS) == set(FAULTS)
    assert set(ORDERS) <= set(FAULTS)
