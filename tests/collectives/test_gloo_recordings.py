"""Dumps of real gloo processes with faults are read in both forms and explained."""

from pathlib import Path

from gloo_rank import LATE_ROUNDS
from gloo_world import GlooWorld

from fabric.collectives.recording import Process, Recording, read_recording
from fabric.collectives.report import CollectiveReport, explain


def recordings(files: list[Path]) -> list[Recording]:
    ranks = [int("".join(c for c in path.stem if c.isdigit())) for path in files]
    return [
        read_recording(path.read_bytes(), Process("", rank), path.name)
        for path, rank in zip(files, ranks, strict=True)
    ]


def explained(folder: Path, ranks: int, trouble: str, *, one_by_one: bool = False) -> CollectiveReport:
    with GlooWorld(folder, ranks, trouble) as world:
        world.get_into_trouble(one_by_one=one_by_one)
        by_json = explain(recordings(world.files("json")))
        by_pickle = explain(recordings(world.files("pickle")))
    # Between the pickle and the JSON dump a call may have noticed that its peer is gone.
    assert one_by_one or by_json.conclusions[0].why == by_pickle.conclusions[0].why
    assert by_json.conclusions[0].verdict == by_pickle.conclusions[0].verdict
    return by_pickle  # the pickle has the lines of the program, which the JSON lacks


def test_ranks_that_call_in_the_same_order_lead_to_no_mismatch(tmp_path):
    report = explained(tmp_path, 3, "in_order")
    # On a loaded machine the same process may come last every time.
    assert {c.verdict for c in report.conclusions} <= {"nothing found", "straggler"}
    assert [len(x.collectives) for x in report.calls.recordings] == [8, 8, 8]


def test_a_rank_that_never_enters_a_collective_is_named(tmp_path):
    report = explained(tmp_path, 3, "absent")
    [conclusion] = report.conclusions
    assert (conclusion.verdict, conclusion.about) == ("absent rank", ("rank 2",))
    assert conclusion.why == (
        "rank 2 has not come to all_reduce (number 5 of group 0 (default_pg)),"
        " in which rank 0 and rank 1 wait"
    )
    assert "the last that it came to is barrier (number 4" in conclusion.evidence[0]
    assert any("gloo_rank.py" in line and line.endswith(" absent") for line in conclusion.evidence[1:])


def test_a_rank_whose_dump_is_missing_is_named(tmp_path):
    with GlooWorld(tmp_path, 3, "absent") as world:
        world.get_into_trouble()
        left = recordings(world.files("pickle")[:2])
    [conclusion] = explain(left, {Process("", 2): "no answer within 3 s"}).conclusions
    assert (conclusion.verdict, conclusion.about) == ("absent rank", ("rank 2",))
    assert conclusion.why.endswith("has come; rank 2 was not read: no answer within 3 s")


def test_a_rank_in_another_operation_is_named(tmp_path):
    conclusion = explained(tmp_path, 3, "operation").conclusions[0]
    assert (conclusion.verdict, conclusion.about) == ("mismatched operation", ("rank 0",))
    assert "rank 0 is in broadcast where rank 1 and rank 2 are in all_reduce" in conclusion.why


def test_different_sizes_at_two_ranks_are_named(tmp_path):
    conclusion = explained(tmp_path, 2, "sizes", one_by_one=True).conclusions[0]
    assert (conclusion.verdict, conclusion.about) == ("mismatched sizes", ("rank 0", "rank 1"))
    assert "all_reduce of 5 Float" in conclusion.why and "all_reduce of 3 Float" in conclusion.why


def test_different_dtypes_at_two_ranks_are_named(tmp_path):
    conclusion = explained(tmp_path, 2, "dtype", one_by_one=True).conclusions[0]
    assert (conclusion.verdict, conclusion.about) == ("mismatched dtype", ("rank 0", "rank 1"))
    assert "5 Float" in conclusion.why and "5 Long" in conclusion.why


def test_two_groups_in_another_order(tmp_path):
    conclusion = explained(tmp_path, 3, "deadlock").conclusions[0]
    assert (conclusion.verdict, conclusion.about) == ("deadlock", ("rank 0", "rank 1", "rank 2"))
    assert conclusion.why == (
        "rank 0 waits in all_reduce (number 2 of group 1 (first)) for rank 1; rank 1 waits in all_reduce"
        " (number 2 of group 2 (second)) for rank 0: each waits for the next, so none of them goes on"
    )


def test_two_groups_in_another_order_of_a_world_of_two(tmp_path):
    conclusion = explained(tmp_path, 2, "strangers").conclusions[0]
    assert (conclusion.verdict, conclusion.about) == ("deadlock", ("rank 0", "rank 1"))


def test_groups_whose_members_gloo_does_not_record(tmp_path):
    absent, stuck = explained(tmp_path, 3, "strangers").conclusions
    assert (absent.verdict, absent.about) == ("absent rank", ()) and "are not recorded" in absent.why
    assert (stuck.verdict, stuck.about) == ("stuck transfer", ("rank 1", "rank 2"))
    assert "a rank that was not read may be absent" in stuck.why


def test_a_rank_that_comes_last(tmp_path):
    with GlooWorld(tmp_path, 3, "straggler", buffer=LATE_ROUNDS) as world:
        world.get_into_trouble()
        read = recordings(world.files("pickle"))
    report = explain(read)
    [conclusion] = report.conclusions
    assert (conclusion.verdict, conclusion.about) == ("straggler", ("rank 2",))
    late = report.arrivals[Process("", 2)].late_ms
    assert len(late) == LATE_ROUNDS - 1 and min(late) >= 20


def test_a_call_that_timed_out_is_not_done(tmp_path):
    with GlooWorld(tmp_path, 2, "timeout") as world:
        world.get_into_trouble()
        read = recordings(world.files("pickle"))
    [conclusion] = explain(read).conclusions
    assert (conclusion.verdict, conclusion.about) == ("absent rank", ("rank 1",))
    assert "(number 1 of group 1 (first)), in which rank 0 wait" in conclusion.why


def test_a_buffer_that_has_gone_round(tmp_path):
    with GlooWorld(tmp_path, 2, "straggler", buffer=3) as world:
        world.get_into_trouble()
        read = recordings(world.files("pickle"))
    assert all(x.is_partial and len(x.collectives) == 3 for x in read)
    assert {c.verdict for c in explain(read).conclusions} <= {"nothing found", "straggler"}
