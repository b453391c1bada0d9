"""The parts of ``benchmarks/scale.py`` at a small size, with real processes and connections."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import scale
import scale_day
from scale import Size

SMALL = Size(replicas=3, hosts=4, ranks=2, servers=2, window_s=2.0, deaths=1, launchers_s=1.0, steps=2)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(scale, "STEADY_S", 0.0)
    for name in ("PYTHONPATH",):
        monkeypatch.setenv(name, f"{scale.HERE.parent}{os.pathsep}{os.environ.get(name, '')}")


def test_a_lighthouse_tells_members_and_hosts_of_a_death_and_takes_no_other_for_dead():
    result: dict[str, float] = {}
    scale.lighthouse_figures(SMALL, result)
    assert result["host_connections"] == 3 * 4 * 2
    assert result["false_deaths"] == result["host_connections_lost"] == 0
    assert 0 < result["epoch_told_p99_s"] < scale.TOLD_WITHIN_S
    assert result["launchers"] == 2 * 4 and result["attempts_started_s"] > 0
    assert result["lighthouse_core_share"] > 0 and result["statuses_per_s"] > 0


@pytest.mark.parametrize(("per_host", "lost"), [(1, 1), (4, 4)])
def test_a_head_steps_and_tells_every_rank_of_a_death(per_host, lost):
    found = scale.head_run(3, 16, per_host, 2)
    assert found["commands_per_step"] == 4  # compute, exchange, publish, apply
    assert found["death_told"] == 16 - 1 - lost  # all but rank 0 and the lost host
    assert min(found[x] for x in ("step_cpu_s", "step_wall_s", "death_told_s", "start_s")) > 0


def test_what_a_rank_receives_at_the_start_does_not_grow_with_the_ranks():
    few: dict[str, int] = {}
    many: dict[str, int] = {}
    scale.start_figures(Size(hosts=2, ranks=8), few)
    scale.start_figures(Size(hosts=100, ranks=8), many)
    assert many["start_bytes_at_rank_0"] > 40 * few["start_bytes_at_rank_0"]
    assert many["start_bytes_per_rank"] < few["start_bytes_per_rank"] + 20


def test_a_day_counts_the_steps_and_the_deaths():
    day = scale_day.play(400.0, seed=3, undisturbed_steps=2)
    assert 19 < day.step_s < 22
    assert 0 < day.steps <= 400 / 17
    assert (day.deaths > 0) == (day.fewest < 12)
    assert 0.5 < day.effective < 1.1


def test_a_missed_aim_is_told(capsys):
    scale.judge({**dict.fromkeys(scale.KEYS), "head_step_s": 0.2, "false_deaths": 0})
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("MISSED") for line in lines) == len(lines) - 1
    assert any(line.startswith("met") and "false deaths: 0" in line for line in lines)
