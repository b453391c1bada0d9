"""The arithmetic of ``benchmarks/faults.py`` on a run that was made up, where every figure is known."""

import sys
from pathlib import Path
from typing import ClassVar

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import faults_joins
import faults_record
from faults_record import InjectedFault, RunRecord

KILLED, RESUMED, STARTED, BACK = 10.3, 10.35, 16.0, 20.0


class MadeUp:
    """Three members step in 1 s, 0.3 s of it the exchange. At 10.3 s r2 is killed; r0 and r1 need 0.7 s
    more for that step, 0.4 s of them for an inherited micro-batch. As two they need 1.2 s a step, and 1.5 s
    while r2 comes back."""

    def __init__(self, begun_before: float = 0.0) -> None:
        whole = [float(t) for t in range(1, 11)]
        as_two = [11.7, 12.9, 14.1, 15.3]
        joining = [16.5, 18.0, 19.5]
        self.ends = {"r0": whole + as_two + joining, "r1": whole + as_two + joining, "r2": whole}
        self.begun_before = begun_before

    def steps(self, name):
        found = []
        for step, end in enumerate(self.ends[name]):
            extra = [(end - 0.8, end - 0.4)] if end == 11.7 else []
            batches = [(end - 1.0, end - 0.9), (end - 0.9, end - 0.8), *extra]
            members = 3 if end < 11 else 2
            found.append(
                {"step": step, "end": end, "batches": batches, "members": members, "mode": "timer", "pid": 1}
            )
        return found

    def journal(self, name):
        lines = []
        for step, end in enumerate(self.ends[name]):
            members = ["r0", "r1", "r2"] if end < 11 else ["r0", "r1"]
            epoch = 1 if end < 11 else 2
            at = {"epoch": epoch, "step": step}
            if end == 11.7 and self.begun_before:
                given = {"event": "contribute", "mono": KILLED - self.begun_before, "epoch": 1, "step": step}
                lines.append(given)
            lines.append({"event": "contribute", "mono": end - 0.3, **at})
            lines.append({"event": "commit", "mono": end, "members": members, **at})
        if name != "r2":
            lines.append({"event": "abort", "mono": KILLED + 0.02})
            lines.append({"event": "resume", "mono": RESUMED, "step": 10})
        return sorted(lines, key=lambda x: x["mono"])

    def events(self):
        return [
            {"kind": "evicting", "mono": KILLED + 0.01, "why": "its process is gone"},
            {"kind": "epoch", "mono": KILLED + 0.03, "why": "r2 evicted: its process is gone"},
        ]


def record(fleet: MadeUp) -> RunRecord:
    fault = InjectedFault("kill", "r2", KILLED, "timer", 0.3, started=STARTED, back=BACK)
    return RunRecord(fleet, [fault], [])


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch):
    monkeypatch.setattr(faults_record, "WARM_STEPS", 0)


def test_a_stall_is_the_time_that_no_work_explains():
    found = record(MadeUp())
    (fault,) = found.faults
    for stall in fault.stalls:
        assert stall.inherited == pytest.approx(0.4)
        assert stall.repeated == 0.0
        assert stall.stall == pytest.approx(1.7 - 1.0 - 0.4)
        # as one of two members it computes three micro-batches
        assert stall.as_two == pytest.approx(1.7 - 1.2)
    assert found.lost(fault) == 0
    stages = found.stages(fault)
    assert [round(x, 3) for x in stages.values()] == [0.01, 0.03, 0.02, 0.05]


@pytest.mark.parametrize(("before", "repeated"), [(0.1, 0.1), (2.0, 0.3)])
def test_only_exchanges_made_twice_are_repeated(before, repeated):
    # This time of the exchange had passed when the fault came, and none of it was waiting.
    (fault,) = record(MadeUp(begun_before=before)).faults
    assert all(s.repeated == pytest.approx(repeated) for s in fault.stalls)


def test_a_join_is_measured_against_undisturbed_steps_of_two():
    found = record(MadeUp())
    assert found.join_ratios(found.faults[0]) == pytest.approx(2 * [1.0, 1.25, 1.25])


def test_steps_that_are_gone_and_evictions_are_counted():
    fleet = MadeUp()
    fleet.ends["r2"] = [*fleet.ends["r2"], 10.25]  # r2 had committed one more step
    found = record(fleet)
    assert found.lost(found.faults[0]) == 1
    assert found.evictions(0.0, 100.0) == 1
    assert found.evictions(KILLED + 1, 100.0) == 0


class Used:
    """The newcomer computes all the time, each survivor half of it, nobody else anything."""

    def between(self, who, begun, end):
        return {"r0": 0.5, "r1": 0.5, "r2": 1.0}.get(who, 0.0) * (end - begun)


def test_the_phases_of_a_join_have_the_steps_that_end_in_them(monkeypatch, capsys):
    found = record(MadeUp())
    stages = {"registered": 1.0, "loaded": 2.5, "member": 3.0, "given": BACK - STARTED}
    monkeypatch.setattr(RunRecord, "join_stages", lambda self, fault: stages)
    faults_joins.tell_phases(found, found.faults, Used())
    rows = {line[:10].strip(): line[10:].split() for line in capsys.readouterr().out.splitlines()}
    # The columns: seconds, steps, their time over 1.2 s (median and range), processor seconds.
    assert rows["start"] == ["1.0", "2", "1.00", "(1.00-1.00)", "1.00", "0.00", "1.00", "0.00"]
    assert rows["state"] == ["1.5", "2", "1.25", "(1.25-1.25)", "1.50", "0.00", "1.50", "0.00"]
    assert rows["replay"] == ["0.5", "0", "0.50", "0.00", "0.50", "0.00"]
    assert rows["first step"] == ["1.0", "2", "1.25", "(1.25-1.25)", "1.00", "0.00", "1.00", "0.00"]


def test_processor_time_goes_on_counting_where_a_process_ended(tmp_path):
    class FleetStub:
        trainers: ClassVar = {}

        def server_pid(self, name):
            raise FileNotFoundError(name)

    used = faults_joins.ProcessorTime(FleetStub())
    now = iter([10.0, 11.0, 12.0])
    for pid, seconds in ((7, 2.0), (7, 3.0), (8, 0.5)):
        used.note(next(now), "r0", pid, seconds)
    assert used.between("r0", 10.0, 11.0) == 1.0
    assert used.between("r0", 10.5, 12.0) == 1.0
    assert used.between("r0", 0.0, 99.0) == 1.5
    assert used.between("nobody", 0.0, 99.0) == 0.0
