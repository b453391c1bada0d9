"""The judge finds each first line of the status that the journals contradict."""

import json

import pytest
from msgspec.structs import replace

from fabric.audit.audit import gather
from fabric.audit.journal import RecordedRun, parse_journal
from fabric.drill.judge.drill_record import DrillRecord, HeadlineSighting, InjectedFault
from fabric.drill.judge.drill_verdict import judge_drill, untrue_headlines
from fabric.drill.run.drill_loop import StatusPoller
from fabric.errors import Unreachable

# Four replicas commit a step each half second; r1 does not between 1020 and 1040.
AWAY = (1020.0, 1040.0)
DOWN = "3 of 4 replicas; r1 down since 19:35:01 UTC (its trainer is stopped, 10.77.0.11)"

COMMIT = {"generation": 1, "epoch": 1, "contributed": True, "replay": False, "contributions": {}}
COMMIT |= {"weight": 1.0, "gradient_digest": "d", "metrics": {}, "members": []}


def journal(name: str, first: float = 1000.0) -> bytes:
    lines = [{"event": "start", "t": first, "mono": first, "replica": name, "incarnation": 1}]
    lines[0] |= {"pid": 7, "data": {"micro_batches": 4}}
    for step in range(120):
        t = 1000.0 + step / 2
        if t >= first and not (name == "r1" and AWAY[0] <= t < AWAY[1]):
            commit = {"event": "commit", "t": t, "mono": t, "replica": name, "incarnation": 1}
            lines.append(commit | COMMIT | {"step": step})
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


RECORD = DrillRecord(
    RecordedRun({name: parse_journal(name, journal(name)) for name in ("r0", "r1", "r2", "r3")}),
    ended=1060.0,
    is_over=False,
)


def untrue(*headlines: tuple[float, str], record: DrillRecord = RECORD) -> list[str]:
    seen = tuple(HeadlineSighting(t, text) for t, text in ((1010.0, "4 of 4 replicas"), *headlines))
    given = replace(record, headlines=seen)
    return list(untrue_headlines(given, gather(given.evidence()), 0.5))


def test_a_true_first_line_holds_before_during_and_after_an_absence():
    assert untrue((1030.0, DOWN), (1050.0, "4 of 4 replicas")) == []


@pytest.mark.parametrize(
    ("t", "text", "why"),
    [
        (1030.0, "4 of 4 replicas", "the journals show 3 that train"),
        (1050.0, DOWN, "the journals show that r0, r1, r2, r3 trained all the time"),
        (1030.0, "3 of 3 replicas", "the job began with 4 replicas"),
        (1030.0, DOWN.replace("r1", "r2"), "it does not name r1, which is away"),
    ],
)
def test_an_untrue_first_line_is_found(t, text, why):
    (sentence,) = untrue((t, text))
    assert sentence.endswith(f"and {why}") and f'said "{text[:120]}"' in sentence


def test_a_first_line_may_be_late_and_a_job_that_stands_still_is_not_judged():
    assert untrue((AWAY[0] + 1.0, "4 of 4 replicas")) == []
    assert untrue((1100.0, "4 of 4 replicas"), record=replace(RECORD, ended=1200.0)) == []


def test_a_replica_under_a_fault_may_be_called_absent_while_it_still_trains():
    cut = InjectedFault("cut-lighthouse", ("r1",), 1049.0, 1051.0)
    assert untrue((1050.0, DOWN), record=replace(RECORD, faults=(cut,))) == []


def test_a_default_drill_fails_by_an_untrue_first_line():
    lied = replace(RECORD, headlines=(HeadlineSighting(1030.0, "4 of 4 replicas"),))
    (judged,) = judge_drill(lied, ["status-true"]).outcomes
    assert (judged.holds, judged.shown) == (False, "no") and "3 that train" in judged.why
    assert "status-true" in [x.expectation for x in judge_drill(lied).outcomes if not x.holds]


def test_the_poller_keeps_each_first_line():
    class Client:
        def path(self) -> str:
            return "/v1/jobs/j"

        def ask(self, path: str) -> object:
            if answers:
                return answers.pop(0)
            raise Unreachable("no lighthouse answers")

    answers = [{"headline": DOWN, "members": []}, {"headline": 7}, ["no status"]]
    poller = StatusPoller(Client())  # type: ignore[arg-type]
    for _ in range(4):
        poller._look()
    assert [seen.text for seen in poller.headlines] == [DOWN]
