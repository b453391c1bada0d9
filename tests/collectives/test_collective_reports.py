"""Conclusions from dumps in NCCL's form, generated in ``nccl_dumps.py``: none is from a run on GPUs."""

import json

import pytest
from msgspec.structs import replace
from nccl_dumps import dump, entry, pickled

from fabric.collectives.calls import side_by_side
from fabric.collectives.hangs import waits
from fabric.collectives.recording import Process, Recording, parse_recording, read_recording
from fabric.collectives.report import CollectiveReport, explain

WORLD = {"0": ("default_pg", [0, 1, 2])}
PAIRS = {"0": ("default_pg", [0, 1, 2]), "1": ("a", [0, 1]), "2": ("b", [1, 2]), "3": ("c", [0, 2])}


def recordings(ranks: dict[int, list[dict]], groups: dict = WORLD) -> list[Recording]:
    return [
        read_recording(pickled(dump(entries, groups)), Process("", rank), f"trace_{rank}")
        for rank, entries in ranks.items()
    ]


def explained(
    ranks: dict[int, list[dict]], groups: dict = WORLD, unread: dict | None = None
) -> CollectiveReport:
    report = explain(recordings(ranks, groups), unread)
    json.dumps(report.to_json())
    return report


def test_completed_collectives_lead_to_the_verdict_nothing_found():
    done = [entry(n) for n in range(1, 9)]
    [conclusion] = explained({0: done, 1: done, 2: done}).conclusions
    assert conclusion.verdict == "nothing found"


def test_no_entry_at_all_says_which_setting_records():
    [conclusion] = explained({0: [], 1: []}).conclusions
    assert conclusion.verdict == "nothing found" and "TORCH_FR_BUFFER_SIZE" in conclusion.why


def test_a_rank_with_an_empty_recording_is_absent():
    hung = [entry(1, state="started")]
    [conclusion] = explained({0: hung, 1: hung, 2: []}).conclusions
    assert (conclusion.verdict, conclusion.about) == ("absent rank", ("rank 2",))
    assert "rank 2: its recording is empty" in conclusion.evidence[0]


def test_a_rank_without_a_dump_is_absent():
    hung = [entry(1), entry(2, state="started")]
    [conclusion] = explained({0: hung, 1: hung}).conclusions
    assert conclusion.about == ("rank 2",) and conclusion.why.endswith("no recording of it was given")


def test_ranks_that_wait_for_ranks_that_wait_are_not_blamed():
    """Rank 0 waits for rank 1 in one group, rank 1 for rank 2 in another one, and rank 2 for no one."""
    first, second = entry(1, group=("1", "a"), state="started"), entry(1, group=("2", "b"), state="started")
    [conclusion] = explained({0: [first], 1: [second], 2: [entry(1)]}, PAIRS).conclusions
    assert (conclusion.verdict, conclusion.about) == ("absent rank", ("rank 2",))
    assert "rank 0: held up by the ranks that wait for rank 2" in conclusion.evidence


def test_a_circle_of_three_groups():
    waiting = {
        0: [entry(1, group=("1", "a"), state="started")],
        1: [entry(1, group=("2", "b"), state="started")],
        2: [entry(1, group=("3", "c"), state="started")],
    }
    [conclusion] = explained(waiting, PAIRS).conclusions
    assert (conclusion.verdict, conclusion.about) == ("deadlock", ("rank 0", "rank 1", "rank 2"))
    assert conclusion.why.count("waits in all_reduce") == 3
    assert len(conclusion.evidence) == 3 and "train.py:41 train" in conclusion.evidence[0]


def test_two_circles_and_who_waits_for_them():
    groups = {
        "1": ("a", [0, 1]),
        "2": ("b", [0, 1]),
        "3": ("c", [2, 3]),
        "4": ("d", [2, 3]),
        "5": ("e", [0, 4]),
    }
    names = {0: ("1", "a"), 1: ("2", "b"), 2: ("3", "c"), 3: ("4", "d"), 4: ("5", "e")}
    report = explained({r: [entry(1, group=g, state="started")] for r, g in names.items()}, groups)
    assert [(c.verdict, c.about) for c in report.conclusions] == [
        ("deadlock", ("rank 0", "rank 1")),
        ("deadlock", ("rank 2", "rank 3")),
    ]


def test_a_call_that_all_ranks_have_entered_is_explained():
    hung = [entry(1), entry(2, state="started")]
    [conclusion] = explained({0: hung, 1: hung, 2: hung}).conclusions
    assert (conclusion.verdict, conclusion.about) == ("stuck transfer", ("rank 0", "rank 1", "rank 2"))
    assert "every rank has come to all_reduce (number 2" in conclusion.why


def test_the_minority_is_blamed_for_another_operation():
    usual, odd = entry(2, state="started"), entry(2, "_reduce_scatter_base", state="started")
    [conclusion] = explained({0: [entry(1), usual], 1: [entry(1), odd], 2: [entry(1), usual]}).conclusions
    assert (conclusion.verdict, conclusion.about) == ("mismatched operation", ("rank 1",))
    assert conclusion.why == (
        "rank 1 is in _reduce_scatter_base where rank 0 and rank 2 are in all_reduce, at one place of the"
        " sequence (number 2 of group 0 (default_pg))"
    )


def test_calls_that_wait_behind_a_mismatch_are_not_reported_separately():
    usual = [entry(n, state="started") for n in (1, 2, 3)]
    odd = [entry(n, "broadcast", state="started") for n in (1, 2, 3)]
    assert len(explained({0: usual, 1: usual, 2: odd}).conclusions) == 1


@pytest.mark.parametrize(
    ("change", "verdict"),
    [({"size": (512,)}, "mismatched sizes"), ({"dtype": "Half"}, "mismatched dtype")],
)
def test_sizes_and_dtypes_that_differ(change, verdict):
    usual, odd = entry(1, state="started"), entry(1, state="started", **change)
    conclusion = explained({0: [usual], 1: [usual], 2: [odd]}).conclusions[0]
    assert (conclusion.verdict, conclusion.about) == (verdict, ("rank 2",))


def test_a_mismatch_that_ended_is_told_with_a_warning():
    conclusion = explained({0: [entry(1)], 1: [entry(1)], 2: [entry(1, size=(512,))]}).conclusions[0]
    assert conclusion.verdict == "mismatched sizes" and "its result may be wrong" in conclusion.why


@pytest.mark.parametrize(
    ("operation", "changes"),
    [
        ("all_reduce", {"size": (32, 32)}),  # another shape with the same number of elements
        ("all_to_all_single", {"size": (512,)}),
        ("gather", {"input_sizes": [[4]], "output_sizes": []}),
        ("all_gather_v", {"size": (512,)}),
    ],
)
def test_sizes_that_may_differ(operation, changes):
    usual = entry(1, operation)
    report = explained({0: [usual], 1: [usual], 2: [entry(1, operation, **changes)]})
    assert report.conclusions[0].verdict == "nothing found"


def test_a_receive_without_its_send():
    pair = {"0": ("default_pg", [0, 1])}
    received = [entry(1, "recv 0<-1"), entry(2, "recv 0<-1", state="started")]
    [conclusion] = explained({0: received, 1: [entry(1, "send 1->0")]}, pair).conclusions
    assert (conclusion.verdict, conclusion.about) == ("absent rank", ("rank 1",))
    assert "rank 1 has not come to recv from rank 1" in conclusion.why


def test_two_ranks_that_receive_first():
    pair = {"0": ("default_pg", [0, 1])}
    first, second = entry(1, "recv 0<-1", state="started"), entry(1, "recv 1<-0", state="started")
    [conclusion] = explained({0: [first], 1: [second]}, pair).conclusions
    assert (conclusion.verdict, conclusion.about) == ("deadlock", ("rank 0", "rank 1"))


def test_a_send_that_does_not_fit_its_receive():
    pair = {"0": ("default_pg", [0, 1])}
    sent = entry(1, "send 0->1", size=(8,), state="started")
    received = entry(1, "recv 1<-0", size=(4,), state="started")
    conclusion = explained({0: [sent], 1: [received]}, pair).conclusions[0]
    assert conclusion.verdict == "mismatched sizes"
    assert conclusion.why == "rank 0 sends 8 Float to rank 1, which receives 4 Float"


def test_the_straggler_by_durations_where_clocks_disagree():
    """Rank 1 comes 40 ms late, so its collectives last shortest; the clock of rank 2 is an hour ahead."""

    def calls(duration_ms: float, ahead_ns: int = 0) -> list[dict]:
        return [
            entry(n, duration_ms=duration_ms, time_created_ns=entry(n)["time_created_ns"] + ahead_ns)
            for n in range(1, 21)
        ]

    report = explained({0: calls(45.0), 1: calls(5.0), 2: calls(44.0, 3600 * 10**9)})
    [conclusion] = report.conclusions
    assert (conclusion.verdict, conclusion.about) == ("straggler", ("rank 1",))
    assert "rank 1 came last to 19 of 19 collectives, by 39.5 ms in the median" in conclusion.why


def test_two_hiccups_are_no_straggler():
    """One rank is late by a second twice, as a rank that writes a checkpoint."""
    usual = [entry(n, duration_ms=5.0) for n in range(1, 41)]
    late = [entry(n, duration_ms=5.0 if n not in (20, 30) else 1.0) for n in range(1, 41)]
    waited = [entry(n, duration_ms=5.0 if n not in (20, 30) else 1001.0) for n in range(1, 41)]
    assert explained({0: usual, 1: late, 2: waited}).conclusions[0].verdict == "nothing found"


def test_hsdp_groups_of_one_name_with_other_ranks_are_apart():
    """With local synchronisation, groups of different ranks have the same name."""
    left, right = {"7": ("shard", [0, 1])}, {"7": ("shard", [2, 3])}
    hung, done = [entry(1, group=("7", "shard"), state="started")], [entry(1, group=("7", "shard"))]
    read = recordings({0: hung, 1: []}, left) + recordings({2: done, 3: done}, right)
    [conclusion] = explain(read).conclusions
    assert conclusion.about == ("rank 1",)


def test_replicas_have_worlds_of_their_own():
    hung, done = dump([entry(1, state="started")], {}), dump([entry(1)], {})
    read = [
        parse_recording(body, Process(replica, rank), "x")
        for replica, rank, body in (
            ("r0", 0, done),
            ("r0", 1, done),
            ("r1", 0, hung),
            ("r1", 1, dump([], {})),
        )
    ]
    [conclusion] = explain(read).conclusions
    assert (conclusion.verdict, conclusion.about) == ("absent rank", ("r1 rank 1",))


def test_in_a_living_job_only_lasting_waits_are_reported():
    before, after = [entry(1, state="started")], [entry(1), entry(2, state="started")]
    first = waits(side_by_side(recordings({0: before, 1: [], 2: before})))
    assert first, "a look at a living job sees calls that are under way"
    moved = recordings({0: after, 1: [entry(1)], 2: after})
    assert explain(moved, earlier=first).conclusions[0].verdict == "nothing found"
    stayed = recordings({0: before, 1: [], 2: before})
    now = entry(1)["time_created_ns"] + 30 * 10**9
    [conclusion] = explain(stayed, earlier=first, now_ns=now).conclusions
    assert conclusion.about == ("rank 1",) and conclusion.why.endswith("wait for 30.0 s")


def own(process: str, calls: list[dict], roster: list[str], rank: int = 0) -> Recording:
    body = {
        "recorder": "fabric",
        "pg_config": {"epoch 3": {"desc": "exchange", "ranks": roster}},
        "entries": [
            {**call, "profiling_name": "fabric:all_reduce", "process_group": ["epoch 3", "exchange"]}
            for call in calls
        ],
    }
    return parse_recording(body, Process(process, rank), process)


def test_our_own_exchange_and_torch_are_one_graph():
    """r0 waits for r1 in the exchange, and rank 0 of r1 waits for its rank 1 in a collective of torch's."""
    roster = ["r0", "r1"]
    read = [
        own("r0", [entry(1), entry(2, state="started")], roster),
        own("r1", [entry(1)], roster),
        parse_recording(
            dump([entry(5, state="started")], {"0": ("default_pg", [0, 1])}), Process("r1", 0), "x"
        ),
        parse_recording(dump([entry(4)], {"0": ("default_pg", [0, 1])}), Process("r1", 1), "x"),
    ]
    [conclusion] = explain(read).conclusions
    assert (conclusion.verdict, conclusion.about) == ("absent rank", ("r1 rank 1",))
    assert "r0: held up by the ranks that wait for r1 rank 1" in " ".join(conclusion.evidence)


def test_the_collective_of_a_replica_is_named_before_the_exchange_that_waits_for_it():
    """Rank 1 of r0 came to the exchange before rank 0 of r1 came to the collective."""
    roster = ["r0", "r1"]
    read = [
        own("r0", [entry(1, state="started")], roster, rank=1),
        parse_recording(
            dump([entry(5, state="started")], {"0": ("default_pg", [0, 1])}), Process("r1", 0), "x"
        ),
        parse_recording(dump([entry(4)], {"0": ("default_pg", [0, 1])}), Process("r1", 1), "x"),
        own("r1", [], roster, rank=1),
    ]
    [conclusion] = explain(read).conclusions
    assert conclusion.about == ("r1 rank 1",)
    assert conclusion.why.startswith("r1 rank 1 has not come to all_reduce (number 5 "), conclusion.why


def test_an_aborted_round_is_history_once_the_process_goes_on():
    roster = ["r0", "r1"]
    aborted = {**entry(2, state="started"), "retired": True}
    later = {**entry(2), "process_group": ["epoch 4", "exchange"]}
    body = {
        "recorder": "fabric",
        "pg_config": {},
        "entries": [
            {"profiling_name": "fabric:all_reduce", **{k: v for k, v in e.items() if k != "profiling_name"}}
            for e in (aborted, later)
        ],
    }
    read = [parse_recording(body, Process(name, 0), name) for name in roster]
    assert explain(read).conclusions[0].verdict == "nothing found"


def test_a_call_that_has_ended_at_one_rank_may_be_about_to_end_at_another():
    """In a living job a second recording shows whether a wait lasts."""
    done, late = [entry(1), entry(2)], [entry(1), entry(2, state="started")]
    read = recordings({0: done, 1: late, 2: done})
    assert explain(read).conclusions[0].verdict == "nothing found"
    [conclusion] = explain(read, earlier=waits(side_by_side(read))).conclusions
    assert (conclusion.verdict, conclusion.about) == ("stuck transfer", ("rank 1",))


def test_the_stack_of_a_living_process_tells_where_json_has_no_lines():
    body = dump([entry(1, state="started", frames=[])], {"0": ("default_pg", [0, 1])})
    main = (
        "/v/site-packages/torch/distributed/distributed_c10d.py:3 all_reduce",
        "/home/user/train.py:7 fit",
    )
    waiting = replace(parse_recording(body, Process("", 0), "x"), main=main)
    away = parse_recording(dump([], {}), Process("", 1), "x")
    [conclusion] = explain([waiting, away]).conclusions
    assert conclusion.evidence[-1].endswith(", its main thread is at /home/user/train.py:7 fit")


def test_a_process_that_was_not_read_is_not_said_to_have_an_empty_recording():
    silent = Process("r1", 0)
    stack = replace(parse_recording({"entries": []}, silent, "x"), main=("/home/user/train.py:7 stuck",))
    read = [own("r0", [entry(2, state="started")], ["r0", "r1"]), stack]
    [conclusion] = explain(read, {silent: "the trainer did not answer"}).conclusions
    assert conclusion.why.endswith("r1 was not read: the trainer did not answer")
    assert conclusion.evidence[0] == "r1: its main thread is at /home/user/train.py:7 stuck"
    assert not any("its recording is empty" in line for line in conclusion.evidence)
