"""Traces and recovery records as input: what is read, and what is refused by line."""

import json

import pytest

from fabric.plan.failures import phases_of, read_trace

GOOD = "time_h,unit,event\n1,a,fail\n3,a,repair\n4,b,fail\n4,a,fail\n10,a,repair\n"


def write(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_csv_gives_failures_repairs_and_rates(tmp_path):
    trace = read_trace(write(tmp_path, GOOD))
    assert trace.failures == ((3600.0, 0), (4 * 3600.0, 1), (4 * 3600.0, 0))
    assert trace.repairs_s == (2 * 3600.0, 6 * 3600.0)
    assert trace.mtbf_s == pytest.approx(10 * 3600 / 3)
    assert trace.median_repair_s == 4 * 3600.0
    assert trace.span_s == 36000.0


def test_a_second_fault_of_a_unit_that_is_down_is_the_same_failure(tmp_path):
    trace = read_trace(write(tmp_path, "time_s,unit,event\n1,a,fail\n2,a,fail\n3,a,repair\n"))
    assert trace.failures == ((1.0, 0),)


def test_the_json_of_the_public_trace_is_read_in_days(tmp_path):
    entries = [
        {"node_id": "n1", "event_time": 0.5, "event_type": "fault_start", "fault_type": {"Class": "GPU"}},
        {"node_id": "n1", "event_time": 1.0, "event_type": "fault_end", "fault_type": {"Class": "GPU"}},
    ]
    trace = read_trace(write(tmp_path, json.dumps(entries), "trace.json"))
    assert trace.failures == ((43200.0, 0),)
    assert trace.repairs_s == (43200.0,)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("time,unit,event\n1,a,fail\n", "needs the columns unit, event and one of time_s"),
        ("time_s,unit,event\nsoon,a,fail\n", "line 2: the time is no number: 'soon'"),
        ("time_s,unit,event\n-4,a,fail\n", "line 2: the time must be zero or more, not -4"),
        ("time_s,unit,event\nnan,a,fail\n", "line 2: the time must be zero or more"),
        ("time_s,unit,event\n1,,fail\n", "line 2: the unit is missing"),
        ("time_s,unit,event\n1,a\n", "line 2: the event must be 'fail' or 'repair'"),
        ("time_s,unit,event\n1,a,explode\n", "line 2: the event must be 'fail' or 'repair', not 'explode'"),
        ("time_s,unit,event\n1,a,repair\n", "has no failure"),
        ("time_s,unit,event\n0,a,fail\n", "spans no time"),
        ("", "needs the columns"),
        ("[1]", "entry 0: an object"),
        ("[", "is no valid JSON"),
    ],
)
def test_a_fault_in_a_trace_is_named(tmp_path, text, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_trace(write(tmp_path, text))


def record(detected, **others):
    return {"kind": "death", "detected": detected, "step_committed": detected + 2.0, "steps_lost": 0} | others


def test_recovery_records_give_rates_and_phases():
    records = [
        record(100.0, lost={"r1": {"joined": 160.0}}),
        record(400.0, lost={"r2": {"joined": 0.0}}),
        record(700.0, step_committed=704.0, lost={"r1": {"joined": 800.0}}),
        {"kind": "join", "detected": 500.0},
    ]
    phases = phases_of(records)
    assert (phases.failures, phases.mtbf_s, phases.stall_s, phases.away_s) == (3, 300.0, 2.0, 80.0)


@pytest.mark.parametrize("records", [[], [record(5.0)], [{"kind": "death", "detected": "soon"}, {"lost": 3}]])
def test_a_job_with_fewer_than_two_failures_has_no_rate(records):
    with pytest.raises(ValueError, match="a rate needs at least 2"):
        phases_of(records)
