"""The judge accepts an honest drill, and notices each violation of each expectation."""

import copy
from collections.abc import Callable

import pytest
from cli.journals import STEPS, VICTIM, Entry, SyntheticRun, to_bytes
from msgspec import structs
from msgspec.structs import replace

from fabric.audit.journal import LostReplica, RecordedRun, RecoveryFacts, parse_journal, read_recoveries
from fabric.audit.summary import judge
from fabric.drill.judge.drill_record import (
    DrillRecord,
    HeadlineSighting,
    InjectedFault,
    StepSighting,
)
from fabric.drill.judge.drill_verdict import DrillVerdict, Outcome, judge_drill
from fabric.drill.judge.expectations import DEFAULTS, MEASURES, parse_expectation
from fabric.errors import ConfigError, ProtocolError

Entries = dict[str, list[Entry]]
RUN = SyntheticRun()
KILL = next(event for event in RUN.supervisor if event["event"] == "kill")
END = 1000 + RUN.now
FAULT = InjectedFault(
    "kill",
    (VICTIM,),
    KILL["t"],
    KILL["t"],
    "",
    "process 101 is gone",
    "process 177 started",
    {VICTIM: 101},
)
RECOVERY = RecoveryFacts(
    "death",
    detected=KILL["t"] + 0.1,
    step=3,
    epoch=2,
    step_committed=KILL["t"] + 0.3,
    lost={VICTIM: LostReplica(KILL["t"] + 2)},
)
HONEST = DrillRecord(
    RecordedRun({}),
    END,
    (FAULT,),
    (RECOVERY,),
    (StepSighting(END, "r0", STEPS), StepSighting(1012.2, "r2", 4)),
)


def record(entries: Entries | None = None, **changes: object) -> DrillRecord:
    journals = {n: parse_journal(n, to_bytes(x)) for n, x in (entries or RUN.entries).items()}
    return replace(HONEST, run=RecordedRun(journals), **changes)


def altered(change: Callable[[Entries], object]) -> Entries:
    entries = copy.deepcopy(RUN.entries)
    change(entries)
    return entries


def outcome(verdict: DrillVerdict) -> Outcome:
    assert len(verdict.outcomes) == 1
    return verdict.outcomes[0]


def lines(entries: Entries, replica: str, event: str) -> list[Entry]:
    return [entry for entry in entries[replica] if entry["event"] == event]


def shift(entries: Entries, replica: str, after: float, seconds: float) -> None:
    for entry in entries[replica]:
        if entry["t"] > after:
            entry["t"] += seconds
            entry["mono"] += seconds


# --- an honest drill ------------------------------------------------------------------------------------


def test_an_honest_drill_meets_the_default_expectations():
    verdict = judge_drill(record())
    assert [o for o in verdict.outcomes if not o.holds] == []
    assert verdict.mistakes == verdict.broken == verdict.disagreements == ()
    assert verdict.holds


def test_the_demo_and_the_drill_have_one_checker():
    verdict, evidence = judge_drill(record()), record().evidence()
    assert verdict.summary == judge(evidence).summary
    damaged = altered(lambda e: lines(e, "r0", "commit").pop().update(gradient_digest="other"))
    assert judge_drill(record(damaged)).broken == judge(record(damaged).evidence()).broken != ()


def test_each_fault_has_a_cost_and_a_timeline():
    (fault,) = judge_drill(record()).faults
    assert fault.stall_s is not None and 0 <= fault.stall_s < 0.1
    assert 1 < fault.rejoined_s[VICTIM] < 3
    assert any("forced epoch 2 with r0, r2" in text for text in fault.timeline)
    assert any(f"{VICTIM}: joined at step 7" in text for text in fault.timeline)


def test_the_measured_values_are_those_of_the_journals():
    def value(measure: str) -> float | None:
        unit = {"seconds": "<=1s", "count": "<=1", "yes or no": ""}[MEASURES[measure][0]]
        return outcome(judge_drill(record(), [f"{measure}{unit}"])).value

    assert value("steps") == STEPS
    assert value("restarts") == value("steps_lost") == value("samples_skipped") == 0
    assert value("standstill") == pytest.approx(0.5, abs=0.05)
    assert value("unexplained_wait") == pytest.approx(0.5, abs=0.05)
    assert value("stall") == pytest.approx(0.0, abs=0.05)
    assert value("rejoined") == pytest.approx(2.0, abs=0.1)


# --- for each expectation, a drill that violates it -----------------------------------------------------


def lose_a_step(entries: Entries) -> None:
    for replica in entries:
        entries[replica] = [
            e for e in entries[replica] if not (e["event"] in ("commit", "contribute") and e["step"] == 8)
        ]


def undo_steps(entries: Entries) -> None:
    """The last three steps were committed twice, the second time in a younger generation."""
    for replica in entries:
        again = [
            copy.deepcopy(e) for e in entries[replica] if e["event"] == "commit" and e["step"] >= STEPS - 3
        ]
        entries[replica] += [entry | {"generation": 2} for entry in again]


def repeat_a_sample(entries: Entries) -> None:
    contribution = lines(entries, "r0", "contribute")[1]
    first = next(iter(contribution["samples"]))
    contribution["samples"][first][0] = contribution["samples"][first][1]


def other_digest(entries: Entries) -> None:
    lines(entries, "r2", "state")[4]["digest"] = "other"


def never_return(entries: Entries) -> None:
    entries[VICTIM] = [e for e in entries[VICTIM] if e["incarnation"] == 1]


def return_late(entries: Entries) -> None:
    for entry in entries[VICTIM]:
        if entry["incarnation"] == 2:
            entry["t"] += 300
            entry["mono"] += 300


def die_unasked(entries: Entries) -> None:
    """r2 ends after step 8, and no fault of the drill hit r2."""
    last = lines(entries, "r2", "commit")[8]
    entries["r2"] = entries["r2"][: entries["r2"].index(last)]


def go_on(entries: Entries) -> None:
    """Make a drill in which no process has ended."""
    for replica in entries:
        entries[replica] = [e for e in entries[replica] if e["event"] not in ("finish", "stop")]


STANDING = record(altered(go_on), is_over=False, ended=END + 60)
VIOLATIONS: dict[str, tuple[str, DrillRecord]] = {
    "a step has no commit": ("steps_lost==0", record(altered(lose_a_step))),
    "a cold start undoes steps": ("steps_lost==0", record(altered(undo_steps))),
    "a sample is counted twice": ("samples-exactly-once", record(altered(repeat_a_sample))),
    "a sample is repeated": ("samples_repeated==0", record(altered(repeat_a_sample))),
    "a sample is skipped": ("samples_skipped==0", record(altered(repeat_a_sample))),
    "two states differ": ("digests-equal", record(altered(other_digest))),
    "a promise is broken": ("promises-kept", record(altered(other_digest))),
    "a survivor stalls": (
        "stall<=1s",
        record(altered(lambda e: shift(e, "r0", 1014.2, 3.0)), ended=END + 60),
    ),
    "a killed replica never returns": ("rejoined<=60s", record(altered(never_return))),
    "a killed replica returns late": ("rejoined<=60s", record(altered(return_late))),
    "a survivor ends": ("restarts==0", record(altered(die_unasked))),
    "the job stands still": (
        "standstill<=1s",
        record(altered(lambda e: [shift(e, name, 1014.2, 3.0) for name in e]), ended=END + 60),
    ),
    "a wait has no reason": (
        "unexplained-wait<=1s",
        record(altered(lambda e: [shift(e, name, 1014.2, 3.0) for name in e]), ended=END + 60),
    ),
    "the job has too few steps": ("steps>=11", record()),
    "the job never commits again": ("stall<=10s", STANDING),
    "the job never steps again": ("unexplained-wait<=10s", STANDING),
    "a death has no recovery record": ("sources-agree", record(recoveries=())),
    "a recovery record has no death": (
        "sources-agree",
        record(
            recoveries=(RECOVERY, structs.replace(RECOVERY, detected=END + 40, lost={"r0": LostReplica()})),
            ended=END + 60,
        ),
    ),
    "a recovery record counts lost steps": (
        "sources-agree",
        record(recoveries=(structs.replace(RECOVERY, steps_lost=2),)),
    ),
    "the status names a step that no journal has": (
        "sources-agree",
        record(sightings=(StepSighting(1011.0, "r0", 9),)),
    ),
    "the first line of the status counts a replica too many": (
        "status-true",
        record(headlines=(HeadlineSighting(1014.3, "4 of 4 replicas"),)),
    ),
}


def test_a_cold_start_may_lose_steps_that_the_lighthouse_had_not_heard_of():
    undone = altered(undo_steps)
    cold = structs.replace(RECOVERY, kind="cold start", steps_lost=1)
    assert outcome(judge_drill(record(undone, recoveries=(cold,)), ["sources-agree"])).holds
    assert not outcome(judge_drill(record(undone), ["sources-agree"])).holds


def test_a_process_that_dies_before_it_commits_belongs_to_the_loss_before_it():
    def die_again(entries: Entries) -> None:
        shift(entries, VICTIM, KILL["t"], 10.0)
        place = next(i for i, entry in enumerate(entries[VICTIM]) if entry["t"] > KILL["t"])
        start = dict(entries[VICTIM][place])
        for entry in entries[VICTIM][place:]:
            entry["incarnation"] += 1
        entries[VICTIM].insert(place, {**start, "t": KILL["t"] + 8, "mono": start["mono"] - 2, "pid": 150})

    second = replace(FAULT, began=KILL["t"] + 9, ended=KILL["t"] + 9, pids={VICTIM: 150})
    twice = record(altered(die_again), faults=(FAULT, second), ended=END + 20)
    assert len(judge_drill(twice).summary.failure_list) == 2
    assert outcome(judge_drill(twice, ["sources-agree"])).holds
    assert not outcome(judge_drill(replace(twice, recoveries=()), ["sources-agree"])).holds


def test_a_wiped_store_may_cost_steps_that_no_record_counts():
    wiped = replace(FAULT, name="wipe-store", targets=tuple(RUN.entries), pids={})
    undone = record(altered(undo_steps), faults=(FAULT, wiped))
    assert outcome(judge_drill(undone, ["sources-agree"])).holds
    assert "steps_lost==0" not in [o.expectation for o in judge_drill(undone).outcomes]


def test_a_step_that_all_replicas_took_to_their_death_is_no_disagreement():
    sighting = (StepSighting(1011.0, "r0", 9),)
    everybody = replace(FAULT, targets=tuple(RUN.entries))
    assert outcome(
        judge_drill(record(sightings=sighting, faults=(FAULT, everybody)), ["sources-agree"])
    ).holds


def test_a_drill_that_kills_all_trainers_has_no_default_bound_of_lost_steps():
    everybody = replace(FAULT, targets=tuple(RUN.entries))
    texts = [o.expectation for o in judge_drill(record(faults=(everybody,))).outcomes]
    assert texts == [text for text in DEFAULTS if text != "steps_lost==0"]
    assert [o.expectation for o in judge_drill(record()).outcomes] == list(DEFAULTS)


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_a_violated_expectation_is_noticed(violation):
    text, broken = VIOLATIONS[violation]
    judged = judge_drill(broken, [text])
    result = outcome(judged)
    assert not result.holds and result.value is not None
    assert result.why and "\n" not in result.why
    assert not judged.holds


def test_each_measure_has_a_violation():
    assert {parse_expectation(text).measure for text, _ in VIOLATIONS.values()} == set(MEASURES)


def test_a_violated_expectation_is_the_only_one_that_a_late_return_breaks():
    judged = judge_drill(record(altered(return_late), ended=END + 400, recoveries=None), DEFAULTS[-1:])
    assert not outcome(judged).holds
    assert judge_drill(record(recoveries=None), DEFAULTS[-1:]).holds


def test_a_replica_that_never_returned_is_named_with_its_fault():
    result = outcome(judge_drill(record(altered(never_return)), ["rejoined<=1s"]))
    assert result.why == f"{VICTIM} never returned after kill {VICTIM}"
    assert result.shown == "never"


def test_a_job_that_ended_before_a_replica_could_be_back_is_named():
    result = outcome(judge_drill(record(altered(never_return)), ["rejoined<=600s"]))
    assert (
        result.why.startswith("the job ended ")
        and f" s after kill {VICTIM}, before {VICTIM} was back" in result.why
    )
    assert "give the job more steps" in result.why and result.shown == "never"


# --- the drill's own mistakes ---------------------------------------------------------------------------


def test_a_fault_that_did_nothing_is_a_mistake_of_the_drill():
    judged = judge_drill(record(faults=(replace(FAULT, observed=""),)))
    assert judged.mistakes == (f"kill {VICTIM} was injected, and the drill saw no effect of it",)
    assert not judged.holds


def test_a_fault_whose_end_was_not_seen_is_a_mistake_of_the_drill():
    judged = judge_drill(record(faults=(replace(FAULT, undone=""),)))
    assert judged.mistakes == (f"kill {VICTIM} was to end, and the drill has not seen its end",)


def test_a_killed_process_that_goes_on_breaks_a_promise():
    judged = judge_drill(record(faults=(replace(FAULT, targets=("r0",), pids={"r0": 100}),)))
    assert any("was killed and its process 100 went on" in sentence for sentence in judged.broken)


# --- a job that still runs ------------------------------------------------------------------------------


def test_a_job_that_runs_is_judged_up_to_one_moment():
    judged = judge_drill(record(is_over=False, ended=1014.2))
    assert judged.broken == () and judged.holds
    assert judged.summary.steps < STEPS
    assert any("did not finish" in s for s in judge_drill(record(ended=1014.2)).broken)


# --- expectations that cannot be read or measured -------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cannot be read"),
        ("stall <= fast", "cannot be read"),
        ("stall<=1s; rm", "cannot be read"),
        ("speed<=1s", "names no measure: give one of digests-equal, promises-kept, rejoined"),
        ("stall", "has no bound: write stall<=1s"),
        ("steps_lost", "has no bound: write steps_lost<=0"),
        ("stall<=1", "needs a unit of time"),
        ("stall<=1h", "needs a unit of time"),
        ("steps_lost==0s", 'leave the unit "s" away'),
        ("digests-equal==1", "is yes or no"),
        ("stall<=1.2.3s", "not a number"),
        ("x" * 1000, "names no measure"),
    ],
)
def test_an_unreadable_expectation_is_one_sentence(text, why):
    with pytest.raises(ConfigError, match=why) as raised:
        judge_drill(record(), [text])
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("stall<=1s", 1.0, True),
        ("stall<1s", 1.0, False),
        ("stall <= 500ms", 0.6, False),
        ("rejoined<=2m", 120.0, True),
        ("steps>=3", 3, True),
        ("steps>3", 3, False),
        ("STEPS_LOST==0", 1, False),
        ("digests_equal", 1, True),
        ("digests-equal", 0, False),
    ],
)
def test_an_expectation_compares_its_bound(text, value, holds):
    assert parse_expectation(text).holds(value) is holds


@pytest.mark.parametrize("text", ["rejoined<=1s", "sources-agree", "samples-exactly-once", "stall<=1s"])
def test_an_expectation_that_nothing_measures_fails_where_it_was_asked_for(text):
    silent = replace(record(), faults=(), recoveries=None, sightings=())
    if text.startswith(("samples", "stall")):
        silent = replace(silent, run=RecordedRun({}))
    result = outcome(judge_drill(silent, [text]))
    assert not result.holds and result.value is None
    assert result.why == f"nothing in the records of this drill measures {parse_expectation(text).measure}"


def test_a_default_expectation_that_nothing_measures_is_passed_over():
    judged = judge_drill(replace(record(), faults=(), recoveries=None, sightings=()))
    assert [o.expectation for o in judged.outcomes if o.value is None] == [
        "sources-agree",
        "status-true",
        "rejoined<=120s",
    ]
    assert any("was killed" not in s for s in judged.broken) or judged.broken == ()


def test_recovery_records_are_read_with_unknown_fields_and_refused_with_wrong_ones():
    entry = {"kind": "death", "detected": 1.0, "lost": {"r1": {"joined": 2.0, "started": 1.5}}, "new": 1}
    assert read_recoveries([entry])[0].lost["r1"].joined == 2.0
    with pytest.raises(ProtocolError, match="a recovery record that cannot be used"):
        read_recoveries([{"kind": "death", "detected": "soon"}])
