"""``fabric status`` and ``fabric top`` show each replica's speed and share, and the slowest rank."""

from importlib.resources import files
from io import StringIO

import pytest
from rich.console import Console

from fabric.cli.status import WHOLE, _job, _slowest

ROWS = [
    {"replica": "r0", "rank": 0, "speed": 1.0, "speeds": [1.0, 0.31]},
    {"replica": "r1", "rank": 0, "speed": 1.01, "speeds": [1.0, None]},
    {"replica": "r1", "rank": 1, "speed": 0.49, "speeds": [0.5, 0.49]},
    {"replica": "r2", "rank": 0, "speed": None, "speeds": [None, 0.2]},
]


def member(replica: str, shares: int) -> dict:
    return {
        "replica": replica,
        "shares": shares,
        "leaving": False,
        "joining": False,
        "phase": "run",
        "step": 7,
        "session_age_s": 0.1,
        "connected": True,
        "trainer_status": None,
        "ckpt": "",
        "verdict": "alive",
    }


def job(speeds: dict[str, float | None]) -> dict:
    health = {
        "mode": "advise",
        "slow": [],
        "advice": None,
        "replicas": {name: {"speed": x, "seconds": 0.25 if x else None} for name, x in speeds.items()},
    }
    return {
        "job": "gpt",
        "record": None,
        "generation": 1,
        "epoch": 1,
        "step": 7,
        "members": [member("r0", 3), member("r1", 1)],
        "joiners": [{**member("late", 1), "spare": False}],
        "complete": False,
        "waiting_for": "nothing",
        "recoverable": None,
        "lighthouse": {"url": "http://l"},
        "store": {"id": "s"},
        "health": health,
    }


def printed(value: dict, width: int = 110) -> list[str]:
    out = StringIO()
    Console(file=out, width=width).print(_job(value, width))
    return out.getvalue().splitlines()


def cells(lines: list[str], name: str) -> list[str]:
    (line,) = [x for x in lines if x.startswith(("│", "┃")) and x[1:].strip().startswith(name)]
    return [x.strip() for x in line.replace("┃", "│").strip("│").split("│")]


@pytest.mark.parametrize(
    ("headline", "colour"),
    [
        ("3 of 3 replicas", "green"),
        ("1 of 1 replica", "green"),
        ("complete: all members have finished", "green"),
        ("failed: r3 failed at step 7: ValueError: 3 of 3 replicas", "red"),
        ("2 of 3 replicas; r1 down since 20:20:02 UTC (its process is gone)", "red"),
        ("2 of 3 replicas; 1 replica not seen since this lighthouse leads", "red"),
        ("0 of 3 replicas", "red"),
    ],
)
def test_only_a_whole_or_complete_job_has_a_green_first_line(headline, colour):
    """A failed job was green on the page, where no replica was missing."""
    (first, *_) = _job({**job({}), "headline": headline}, 110).renderables
    assert str(first.style) == f"bold {colour}"
    page = (files("fabric.lighthouse.http") / "page" / "dashboard.js").read_text()
    assert f"/^(?:{WHOLE.pattern})$/s.test(job.headline)" in page


def test_failing_checkpoints_and_the_loss_stand_in_the_first_lines():
    """A full disk stood in the sixth line, below states that nobody needs to look at."""
    why = "step 40: /ckpt: No space left on device"
    shown = {**job({}), "headline": "2 of 2 replicas", "loss": "0.25", "durable_failing": {"r0": why}}
    assert printed(shown)[:3] == [
        "2 of 2 replicas",
        f"durable checkpoints of r0 fail: {why}",
        "job gpt: generation 1, epoch 1, step 7, loss 0.25",
    ]
    assert str(_job(shown, 110).renderables[1].style) == "bold red"


def test_a_long_sentence_of_the_first_line_stands_on_the_screen_once():
    """A replica that was kept out had a verdict of twenty lines, and a failure was told three times."""
    why = "replica late failed 3 times, last: its process is gone; it is not admitted before 03:43:22 UTC"
    body = job({})
    body["joiners"][0]["verdict"] = why
    out = " ".join(
        " ".join(printed({**body, "headline": f"2 of 3 replicas; late outside ({why}, h9)"})).split()
    )
    assert out.count("not admitted") == 1 and "see above" in out
    failed = "failed: r3 failed at step 7: ValueError"
    out = " ".join(printed({**job({}), "headline": failed, "record": {"reason": failed}}))
    assert out.count("ValueError") == 1
    kept = " ".join(printed({**body, "headline": "2 of 2 replicas"}, 300))
    assert why in kept, "a spare's reason stands in no first line"


def test_a_dated_picture_names_no_leader():
    """It said "led by http://l over store", without a store, while no lighthouse led."""
    assert printed(job({}))[-1] == "led by http://l over store s"
    dated = printed({**job({}), "as_of": 0.0, "not_led_because": "its lease ended"})
    assert dated[0].startswith("as of 1970") and not any("led by" in line for line in dated)


def test_each_member_has_its_speed_and_its_part_of_the_micro_batches():
    lines = printed(job({"r0": 1.0, "r1": 0.487}))
    assert cells(lines, "replica")[4:8] == ["step", "s/step", "speed", "share"]
    assert cells(lines, "r0")[4:8] == ["7", "0.25", "1.00", "75%"]
    assert cells(lines, "r1")[4:8] == ["7", "0.25", "0.49", "25%"]
    assert cells(lines, "late")[4:8] == ["7", "", "", ""]


def test_the_columns_appear_once_a_speed_is_known():
    assert "share" not in cells(printed(job({})), "replica")
    assert "share" not in cells(printed(job({"r0": None, "r1": None})), "replica")
    assert cells(printed(job({"r0": 1.0, "r1": None})), "r1")[5:8] == ["", "", "25%"]


def test_a_lighthouse_of_an_older_release_has_no_speeds():
    older = job({})
    del older["health"]
    assert "speed" not in cells(printed(older), "replica")


def test_the_slowest_rank_over_several_steps_has_a_line():
    health = {"mode": "advise", "by_step": {"steps": [1, 2], "rows": ROWS, "left_out": 0}}
    assert _slowest(health) == ["speed: r1 rank 1 is slowest at 0.49, the median of 3 ranks is 1.00"]
    assert _slowest({**health, "mode": "off"}) == []
    assert _slowest({**health, "by_step": {"steps": [], "rows": [], "left_out": 0}}) == []
    assert _slowest({}) == []


@pytest.mark.parametrize("width", range(50, 181))
def test_no_word_of_the_table_breaks_at_any_width(width):
    shown = job({"r0": 1.72, "r1": 0.72})
    shown["members"][0] |= {
        "phase": "run, waiting",
        "joining": True,
        "verdict": "alive, but its server is silent",
    }
    for entry in shown["members"]:
        entry |= {"host": "10.77.0.10", "ckpt": "http://10.77.0.10:29500"}
        entry |= {"trainer_status": {"trainer": "running", "age_s": 0.1}}
    lines = printed(shown, width)
    assert max(map(len, lines)) <= max(width, len(f"r0: checkpoint server {entry['ckpt']}, status 0.1 s"))
    table = [line for line in lines if line[0] in "│┃"]
    words = {word for line in table for word in line.replace("┃", "│").replace("│", " ").split()}
    whole = "replica role host 10.77.0.10 phase step s/step 0.25 speed share session trainer verdict status"
    whole += " checkpoint server r0 r1 late new"
    whole += (
        " member outside run run, waiting 7 1.72 0.72 75% 25% 0.1 s running alive alive, but its is silent"
    )
    assert words <= {*whole.split(), entry["ckpt"]}
    assert {"replica", "role", "phase", "step", "verdict"} <= words
    assert width < 140 or {"host", "10.77.0.10", "s/step"} <= words
    assert any(f"checkpoint server {entry['ckpt']}" in line or entry["ckpt"] in line for line in lines)
