"""The verifier accepts an honest run and refuses every single alteration of its journals."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli.journals import (
    JOIN_STEP,
    KILL_STEP,
    SERVE_STEP,
    STEPS,
    VICTIM,
    Entry,
    SyntheticRun,
    samples,
    to_bytes,
)
from click.testing import CliRunner

from fabric.audit.audit import audit, gather, walk
from fabric.audit.journal import JournalLine, RecordedRun, parse_journal, read_run
from fabric.audit.summary import Verdict, judge, verify, write_summary
from fabric.cli.demo.command import demo

Entries = dict[str, list[Entry]]
HARMLESS = {"state", "epoch", "resume", "abort", "join", "joined", "stop"}


def judged(entries: Entries, supervisor: list[Entry] | None = None) -> Verdict:
    journals = {name: parse_journal(name, to_bytes(lines)) for name, lines in entries.items()}
    return judge(RecordedRun(journals, tuple(supervisor or ())))


@pytest.fixture(scope="module")
def honest() -> SyntheticRun:
    return SyntheticRun()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = SyntheticRun().write(tmp_path / "run")
    write_summary(directory, judge(read_run(directory)).summary)
    return directory


def run_verify(directory: Path) -> tuple[int, str]:
    result = CliRunner().invoke(demo, ["verify", str(directory)])
    return result.exit_code, result.output


def test_an_honest_run_is_accepted(honest: SyntheticRun) -> None:
    verdict = judged(honest.entries, honest.supervisor)
    assert verdict.broken == ()
    summary = verdict.summary.as_json()
    assert summary["steps"] == STEPS
    assert (summary["failures"], summary["joins"]) == (1, 1)
    assert (summary["steps_lost"], summary["samples_skipped"], summary["samples_repeated"]) == (0,) * 3
    assert summary["digests_equal"] is True
    assert summary["median_step_s"] == pytest.approx(0.5, abs=0.02)
    assert summary["max_survivor_stall_s"] >= summary["median_step_s"]
    assert summary["final_loss"] == pytest.approx(600 / STEPS / 120)
    join = summary["join_list"][0]
    assert (join["replica"], join["bytes"], join["replayed"]) == (VICTIM, 4_000_000, 2)
    assert summary["catch_up_s"] == pytest.approx(join["catch_up_s"]) and join["catch_up_s"] > 0.02
    failure = summary["failure_list"][0]
    assert failure["step"] == KILL_STEP
    assert 0 < failure["detected_s"] < failure["epoch_s"] < failure["first_commit_s"]


def test_a_run_without_failure_is_accepted() -> None:
    run = SyntheticRun(failure=False)
    verdict = judged(run.entries, run.supervisor)
    assert verdict.broken == ()
    assert verdict.summary.failure_list == () and verdict.summary.join_list == ()


def positions(run: SyntheticRun, *events: str) -> Iterator[tuple[str, int]]:
    for replica, entries in run.entries.items():
        for index, entry in enumerate(entries):
            if not events or entry["event"] in events:
                yield replica, index


def altered(run: SyntheticRun, replica: str, change: Callable[[list[Entry]], None]) -> Entries:
    entries = dict(run.entries)
    entries[replica] = copy.deepcopy(entries[replica])
    change(entries[replica])
    return entries


def test_every_deleted_line_is_noticed(honest: SyntheticRun) -> None:
    for replica, index in positions(honest):
        entries = altered(honest, replica, lambda lines, i=index: lines.pop(i))
        assert judged(entries, honest.supervisor).broken, (replica, honest.entries[replica][index])


def test_deleted_records_are_noticed_without_the_supervisor(honest: SyntheticRun) -> None:
    """The journals alone show every deleted line, except contributions to aborted rounds, which leave no
    trace.
    """
    aborted = 0
    for replica, index in positions(honest, "commit", "contribute", "state"):
        entry = honest.entries[replica][index]
        entries = altered(honest, replica, lambda lines, i=index: lines.pop(i))
        if entry["event"] == "contribute" and (entry["epoch"], entry["step"]) == (1, KILL_STEP):
            aborted += 1
            continue
        assert judged(entries).broken, (replica, entry)
    assert aborted == 2


def test_every_repeated_line_is_noticed(honest: SyntheticRun) -> None:
    """Where a repeated line changes nothing, as with links, only the supervisor's lines show it."""
    for replica, index in positions(honest):
        harmless = honest.entries[replica][index]["event"] in HARMLESS
        entries = altered(honest, replica, lambda lines, i=index: lines.insert(i, copy.deepcopy(lines[i])))
        broken = judged(entries, honest.supervisor if harmless else None).broken
        assert broken, (replica, honest.entries[replica][index])


@pytest.mark.parametrize("by", [-1, 1])
def test_every_altered_step_is_noticed(honest: SyntheticRun, by: int) -> None:
    for replica, index in positions(honest):
        entry = honest.entries[replica][index]
        if "step" not in entry or entry["step"] + by < 0:
            continue

        def change(lines: list[Entry], i: int = index) -> None:
            lines[i]["step"] += by

        assert judged(altered(honest, replica, change)).broken, (replica, entry)


@pytest.mark.parametrize("name", ["digest", "gradient_digest"])
def test_every_altered_digest_is_noticed(honest: SyntheticRun, name: str) -> None:
    seen = 0
    for replica, index in positions(honest):
        if name not in honest.entries[replica][index]:
            continue
        seen += 1

        def change(lines: list[Entry], i: int = index) -> None:
            lines[i][name] = "0" * 16

        verdict = judged(altered(honest, replica, change))
        assert verdict.broken and not verdict.summary.digests_equal
    assert seen > 3 * STEPS - 5


@pytest.mark.parametrize("kind", ["repeat", "drop", "swap", "replace"])
def test_every_altered_sample_is_noticed(honest: SyntheticRun, kind: str) -> None:
    for replica, index in positions(honest, "contribute"):
        for key in honest.entries[replica][index]["samples"]:

            def change(lines: list[Entry], i: int = index, key: str = key) -> None:
                listed = lines[i]["samples"][key]
                if kind == "repeat":
                    listed[1] = listed[0]
                elif kind == "drop":
                    listed.pop()
                elif kind == "swap":
                    listed.reverse()
                else:
                    listed[0] = (listed[0] + 1) % 50

            verdict = judged(altered(honest, replica, change))
            assert verdict.broken, (replica, honest.entries[replica][index])


def test_a_skipped_and_a_repeated_sample_are_counted(honest: SyntheticRun) -> None:
    index = next(i for r, i in positions(honest, "contribute") if r == "r0")

    def change(lines: list[Entry]) -> None:
        lines[index]["samples"]["0"][1] = lines[index]["samples"]["0"][0]

    summary = judged(altered(honest, "r0", change)).summary
    assert (summary.samples_skipped, summary.samples_repeated) == (1, 1)


def test_a_micro_batch_that_all_agree_to_leave_out_is_noticed(honest: SyntheticRun) -> None:
    """Agreement of all replicas is not enough, because all may agree on a wrong list."""
    entries = copy.deepcopy(honest.entries)
    for lines in entries.values():
        for entry in lines:
            if entry["event"] == "commit" and entry["step"] == 4:
                entry["contributions"]["r0"].remove(2)
    verdict = judged(entries)
    assert any("Micro-batch 2 of step 4 is counted 0 times" in line for line in verdict.broken)
    assert verdict.summary.samples_skipped == 2


@pytest.mark.parametrize(("generation", "is_broken"), [(1, True), (2, False)])
def test_a_living_process_goes_back_only_into_a_new_generation(generation: int, is_broken: bool) -> None:
    """An outvoted process goes back when the others have died: the new generation begins at an earlier
    step.
    """
    told = [
        ("start", {}),
        ("epoch", {"epoch": 1, "generation": 1, "forced": True}),
        ("resume", {"epoch": 1, "step": 0}),
        ("commit", {"generation": 1, "epoch": 1, "step": 0, "replay": False, "contributed": True}),
        ("state", {"step": 1}),
        ("epoch", {"epoch": 2, "generation": generation, "forced": True}),
        ("resume", {"epoch": 2, "step": 0}),
    ]
    lines = [JournalLine(event, t, t, "r0", 1, t, fields) for t, (event, fields) in enumerate(told, 1)]
    expected = ["r0 incarnation 1 (line 7) is told to go on at step 0 with the state of step 1."]
    assert walk(lines).broken == (expected if is_broken else [])


@pytest.mark.parametrize("event", ["abort", "outside"])
@pytest.mark.parametrize(("at_step", "is_broken"), [(0, True), (1, False)])
def test_a_commit_of_an_older_epoch_was_decided_before(event: str, at_step: int, is_broken: bool) -> None:
    """The deciding thread may go on before the main thread writes the commit line.

    It aborts the next round, or leaves the roster.
    """
    events = [
        ("start", {}),
        ("epoch", {"epoch": 1, "generation": 1, "forced": True}),
        ("resume", {"epoch": 1, "step": 0}),
        (event, {"epoch": 1, "step": at_step}),
        ("epoch", {"epoch": 2, "generation": 1, "forced": True}),
        ("commit", {"generation": 1, "epoch": 1, "step": 0, "replay": False, "contributed": True}),
        ("state", {"step": 1}),
    ]
    lines = [JournalLine(event, t, t, "r0", 1, t, fields) for t, (event, fields) in enumerate(events, 1)]
    expected = ["r0 incarnation 1 (line 6) commits step 0 in epoch 1 after 2."]
    assert walk(lines).broken == (expected if is_broken else [])


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_control_thread_may_abort_the_next_round_before_a_newcomer_has_written_its_first(
    is_broken: bool,
) -> None:
    told = [
        ("start", {}),
        ("join", {"generation": 1, "step": 3}),
        ("state", {"generation": 1, "step": 3}),
        ("epoch", {"epoch": 2, "generation": 1, "forced": True}),
        ("abort", {"epoch": 2, "step": 4}),
        ("joined", {"epoch": 2, "step": 3, "replayed": 0}),
    ]
    if not is_broken:
        told.append(
            ("commit", {"generation": 1, "epoch": 2, "step": 3, "replay": False, "contributed": False})
        )
        told.append(("state", {"generation": 1, "step": 4}))
    told.append(("finish", {"step": 3 if is_broken else 4}))
    lines = [JournalLine(event, t, t, "r0", 1, t, fields) for t, (event, fields) in enumerate(told, 1)]
    expected = ["r0 incarnation 1 (line 7) was to commit step 3 and did not."]
    assert walk(lines).broken == (expected if is_broken else [])


@pytest.mark.parametrize("has_contributed", [False, True])
def test_a_process_replays_until_it_contributes(has_contributed: bool) -> None:
    """The state with which a process starts may be the base: then it joins by replay alone."""
    told = [("start", {}), ("epoch", {"epoch": 1, "generation": 1, "forced": True})]
    if has_contributed:
        told.append(("contribute", {"generation": 1, "epoch": 1, "step": 0, "micro_batches": [0]}))
    told.append(("commit", {"generation": 1, "epoch": 1, "step": 0, "replay": True, "contributed": False}))
    lines = [JournalLine(event, t, t, "r0", 1, t, fields) for t, (event, fields) in enumerate(told, 1)]
    expected = [
        "r0 incarnation 1 (line 4) replays step 0 without having been outside of the roster or behind."
    ]
    assert walk(lines).broken == (expected if has_contributed else [])


def test_time_that_goes_back_is_noticed(honest: SyntheticRun) -> None:
    def change(lines: list[Entry]) -> None:
        lines[5]["mono"] -= 3

    assert judged(altered(honest, "r0", change)).broken


@pytest.mark.parametrize(("event", "is_broken"), [("plane", False), ("abort", True), ("epoch", True)])
def test_after_its_end_a_process_may_log_link_events_only(
    honest: SyntheticRun, event: str, is_broken: bool
) -> None:
    """The network thread may log links at the moment of the end; no other line may follow the end."""

    def change(lines: list[Entry]) -> None:
        source = next((e for e in lines if e["event"] == event), lines[-1])
        late = {**lines[-1], **source, "event": event, "t": lines[-1]["t"], "mono": lines[-1]["mono"]}
        lines.append(late)

    broken = judged(altered(honest, "r0", change)).broken
    assert any("after its end" in sentence for sentence in broken) is is_broken
    assert bool(broken) is is_broken


@pytest.mark.parametrize("name", ["event", "t", "mono", "replica", "incarnation"])
def test_a_line_without_its_envelope_is_noticed(honest: SyntheticRun, name: str) -> None:
    entries = altered(honest, "r0", lambda lines: lines[5].pop(name))
    assert any("journal of r0" in line for line in judged(entries).broken)


def test_a_missing_journal_is_noticed(directory: Path) -> None:
    (directory / "journal" / "r2.jsonl").unlink()
    code, output = run_verify(directory)
    assert code == 1 and "r2 is a member of step 0 and has no journal." in output


def test_a_killed_process_that_went_on_is_noticed(honest: SyntheticRun) -> None:
    supervisor = [{"event": "kill", "t": 1001.0, "replica": "r0", "pid": 100}]
    assert judged(honest.entries, supervisor).broken == ("r0 was killed and its process 100 went on.",)


@pytest.mark.parametrize(("event", "is_broken"), [("stop", False), ("finish", True)])
def test_a_drained_process_may_have_a_successor_and_a_finished_one_may_not(
    honest: SyntheticRun, event: str, is_broken: bool
) -> None:
    def change(lines: list[Entry]) -> None:
        _, second = (i for i, line in enumerate(lines) if line["event"] == "start")
        last = {"event": event, "code": 0, "reason": "drained", "step": KILL_STEP}
        lines[second - 1] = {
            key: lines[second - 1][key] for key in ("t", "mono", "replica", "incarnation")
        } | last

    broken = judged(altered(honest, VICTIM, change)).broken
    assert any("a second process that trained" in sentence for sentence in broken) is is_broken
    assert bool(broken) is is_broken


@pytest.mark.parametrize("trains_below", [False, True])
def test_only_a_process_that_never_trained_may_have_a_lower_incarnation(
    honest: SyntheticRun, trains_below: bool
) -> None:
    """A host whose clock is behind starts a process that is refused, and then one above the first."""

    def change(lines: list[Entry]) -> None:
        second = [i for i, line in enumerate(lines) if line["event"] == "start"][1]
        refused = {**lines[second], "incarnation": 20}
        for line in lines[:second]:
            line["incarnation"] = 40
        for line in lines[second:]:
            line["incarnation"] = 30 if trains_below else 50
        lines.insert(second, refused)

    broken = judged(altered(honest, VICTIM, change)).broken
    assert any("does not have a higher incarnation" in sentence for sentence in broken) is trains_below, (
        broken
    )


@pytest.mark.parametrize(("event", "is_broken"), [("stop", False), ("finish", True)])
def test_the_others_may_commit_the_last_round_of_a_process_that_was_drained(
    honest: SyntheticRun, event: str, is_broken: bool
) -> None:
    def change(lines: list[Entry]) -> None:
        second = [i for i, line in enumerate(lines) if line["event"] == "start"][1]
        committed = next(i for i, line in enumerate(lines) if line["event"] == "commit" and line["step"] == 2)
        envelope = {key: lines[committed][key] for key in ("t", "mono", "replica", "incarnation")}
        lines[committed:second] = [
            envelope | {"event": event, "code": 0, "reason": "drained", "step": KILL_STEP - 1}
        ]

    broken = judged(altered(honest, VICTIM, change)).broken
    assert (f"{VICTIM} is a member of step 2 and did not commit it." in broken) is is_broken
    assert bool(broken) is is_broken


def test_the_others_may_commit_the_first_round_of_a_newcomer_that_dies_in_its_replay() -> None:
    """The newcomer's own journal ends steps before the round, in which it had no part."""
    journals = {}
    for name, entries in SyntheticRun().entries.items():
        last = SERVE_STEP + 1 if name == VICTIM else JOIN_STEP + 1
        end = [i for i, x in enumerate(entries) if x["event"] == "state" and x["step"] == last][-1]
        journals[name] = parse_journal(name, to_bytes(entries[: end + 1]))
    assert audit(gather(RecordedRun(journals, ())), is_over=False) == []


@pytest.mark.parametrize(("generation", "is_broken"), [(2, False), (1, True)])
def test_a_new_generation_ends_the_round_of_a_living_member(generation: int, is_broken: bool) -> None:
    """The others commit the last step and die; r2 did not, and commits it again in a new generation."""
    entries = SyntheticRun().entries
    journals = {}
    for name, lines in entries.items():
        last = ("contribute", STEPS - 1) if name == "r2" else ("state", STEPS)
        end = next(i for i, x in enumerate(lines) if (x["event"], x.get("step")) == last)
        kept = lines[: end + 1]
        if name == "r2":
            kept += _alone_again(lines[end], generation)
        journals[name] = parse_journal(name, to_bytes(kept))
    broken = audit(gather(RecordedRun(journals, ())), is_over=False)
    assert bool(broken) is is_broken, broken


def _alone_again(last: Entry, generation: int) -> list[Entry]:
    """The lines of a process that goes on alone at its last step, after its line ``last``."""
    envelope = {key: last[key] for key in ("t", "mono", "replica", "incarnation")}
    at = {"generation": generation, "epoch": 4, "step": STEPS - 1}
    everything = list(range(6))
    table = {"contributions": {"r2": everything}, "members": ["r2"], "weight": 12.0}
    listed = {str(i): samples(STEPS - 1, i) for i in everything}
    outcome = {"gradient_digest": "1" * 16, "metrics": {}, "times": {}, "replay": False, "contributed": True}
    return [
        envelope | line
        for line in (
            {"event": "epoch", "epoch": 4, "generation": generation, "forced": True, "roster": ["r2"]},
            {"event": "resume", "epoch": 4, "step": STEPS - 1},
            {"event": "contribute", **at, "micro_batches": everything, "samples": listed, "weight": 12.0},
            {"event": "commit", **at, **table, **outcome},
        )
    ]


def _cut_at_restart(directory: Path) -> tuple[Path, list[bytes], int]:
    path = directory / "journal" / f"{VICTIM}.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if b'"start"' in line]
    return path, lines, starts[1]


@pytest.mark.parametrize("ending", [b"\n", b""])
def test_a_torn_line_before_a_restart_is_tolerated(directory: Path, ending: bytes) -> None:
    path, lines, restart = _cut_at_restart(directory)
    lines.insert(restart, b'{"event": "commit", "t": 10' + ending)
    path.write_bytes(b"".join(lines))
    assert verify(directory).broken == ()


def test_a_torn_line_elsewhere_is_noticed(directory: Path) -> None:
    path, lines, restart = _cut_at_restart(directory)
    lines.insert(restart - 3, b'{"event": "commit", "t": 10\n')
    path.write_bytes(b"".join(lines))
    assert any("cannot be read" in line for line in verify(directory).broken)


def test_the_verify_command_names_the_fault_and_exits_1(directory: Path) -> None:
    assert run_verify(directory)[0] == 0
    path = directory / "journal" / "r0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-4] + lines[-3:]))
    code, output = run_verify(directory)
    assert code == 1 and "r0" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("name", "value"), [("steps", 11), ("digests_equal", 1), ("final_loss", 0.1), ("joins", 0)]
)
def test_a_summary_that_contradicts_the_journals_is_noticed(
    directory: Path, name: str, value: object
) -> None:
    path = directory / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    code, output = run_verify(directory)
    assert code == 1 and f"summary.json says {name} = " in output


def test_a_directory_that_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    code, output = run_verify(tmp_path)
    assert code == 2 and "holds no journals" in output and output.count("\n") == 1


def test_damaged_files_are_one_sentence(directory: Path) -> None:
    (directory / "summary.json").write_text("{")
    code, output = run_verify(directory)
    assert code == 2 and "is not JSON" in output
    (directory / "supervisor.jsonl").write_text("nonsense\n")
    code, output = run_verify(directory)
    assert code == 2 and "supervisor.jsonl line 1" in output


def own_data(honest: SyntheticRun) -> Entries:
    """The journals of the same run, had its loop read its own data by ``session.exchange``."""
    entries = copy.deepcopy(honest.entries)
    for line in (line for lines in entries.values() for line in lines):
        if line["event"] == "start":
            line["data"] = {"micro_batches": line["data"]["micro_batches"]}
        elif line["event"] == "contribute":
            line["samples"] = {}
    return entries


def test_a_loop_that_reads_its_own_data_is_no_broken_run(honest: SyntheticRun) -> None:
    verdict = judged(own_data(honest), honest.supervisor)
    assert verdict.broken == () and verdict.evidence.order() is None


def test_a_part_that_counts_twice_is_noticed_without_a_known_order(honest: SyntheticRun) -> None:
    entries = own_data(honest)
    for line in (line for lines in entries.values() for line in lines):
        if line["event"] == "commit" and line["step"] == 0:
            first = next(iter(line["contributions"]))
            line["contributions"] = dict.fromkeys(line["contributions"], line["contributions"][first])
    assert any("is counted" in sentence for sentence in judged(entries, honest.supervisor).broken)


@pytest.mark.parametrize("data", [{}, {"micro_batches": 4, "seed": 1, "global_batch_size": 8}])
def test_half_of_a_data_order_is_refused(honest: SyntheticRun, data: dict[str, int]) -> None:
    entries = copy.deepcopy(honest.entries)
    for lines in entries.values():
        for line in lines:
            if line["event"] == "start":
                line["data"] = data
    assert any("no usable field 'data'" in sentence for sentence in judged(entries).broken)
