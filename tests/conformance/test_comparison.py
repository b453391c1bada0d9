"""The comparison notices another training: one other bit, sample, figure, counter or file."""

import json
from pathlib import Path

import pytest
import torch
from comparison import compare
from recipe_table import Recipe
from ways import Result

RECIPE = Recipe(Path("none.py"), "None.", "None", files=("*.csv",))


def leave(
    folder: Path,
    *,
    weight: float = 1.0,
    loss: float = 0.5,
    samples: tuple[int, ...] = (1, 2),
    epochs: int = 3,
    table: str = "step,loss\n0,1.5\n",
) -> Result:
    """Leave the evidence of a way with one process."""
    (folder / "evidence").mkdir(parents=True)
    (folder / "out").mkdir()
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, weight)
    torch.nn.init.zeros_(model.bias)
    body = {"weights": model.state_dict(), "optimizer": [], "counters": {"epochs": epochs}}
    torch.save(body, folder / "evidence" / "7.pt")
    (folder / "evidence" / "7.notes").write_text(json.dumps({"step": 0, "loss": loss}) + "\n")
    (folder / "evidence" / "7.samples").write_text(json.dumps({"step": 0, "samples": samples}) + "\n")
    (folder / "out" / "log.csv").write_text(table)
    return Result(folder, {"r0": 0}, "")


def test_two_equal_trainings_are_equal(tmp_path):
    compare(RECIPE, leave(tmp_path / "a"), leave(tmp_path / "b", weight=1.00001), "single")


@pytest.mark.parametrize(
    "other",
    [
        {"weight": 1.01},
        {"loss": 0.51},
        {"samples": (1, 3)},
        {"epochs": 4},
        {"table": "step,loss\n0,1.6\n"},
        {"table": "step,loss\n0,1.5\n0,1.5\n"},
    ],
    ids=lambda x: next(iter(x)),
)
def test_another_training_is_noticed(tmp_path, other):
    with pytest.raises(AssertionError):
        compare(RECIPE, leave(tmp_path / "a"), leave(tmp_path / "b", **other), "single")


def test_replicas_that_differ_by_one_bit_are_noticed(tmp_path):
    plain, killed = leave(tmp_path / "a"), leave(tmp_path / "b")
    report = torch.load(killed.evidence / "7.pt", weights_only=False)
    report["weights"]["weight"] += 1e-6
    torch.save(report, killed.evidence / "8.pt")
    with pytest.raises(AssertionError, match="not the same bits"):
        compare(RECIPE, plain, Result(killed.folder, {"r0": 0, "r1": 0}, ""), "killed")


def test_a_replica_that_never_reports_its_end_is_noticed(tmp_path):
    plain, killed = leave(tmp_path / "a"), leave(tmp_path / "b")
    with pytest.raises(AssertionError, match="1 of 2 reported"):
        compare(RECIPE, plain, Result(killed.folder, {"r0": 0, "r1": 0}, ""), "killed")
