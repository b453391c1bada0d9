"""Compares what one way of a recipe has left with the way without fabric."""

import csv
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from recipe_table import Recipe
from ways import Result

ABSOLUTE = 1e-6


def compare(recipe: Recipe, plain: Result, other: Result, way: str) -> None:
    """Assert that ``other`` is the training of ``plain``."""
    reports = compare_replicas(other, way)
    within = within_rounding(recipe.tolerance)
    same(plain.reports[0], reports[0], f"plain and {way}", within)
    compare_notes(plain, other, way, within)
    if plain.samples and other.samples:
        assert other.samples == plain.samples, f"{way}: other samples than without fabric"
    for pattern in recipe.files:
        compare_files(pattern, plain, other, way, within)


def compare_replicas(result: Result, way: str) -> list[dict[str, Any]]:
    """Assert that all replicas have reported the same bits; return their reports."""
    reports = result.reports
    assert len(reports) == len(result.codes), f"{way}: {len(reports)} of {len(result.codes)} reported an end"
    for report in reports[1:]:
        same(reports[0], report, f"{way}: replicas", exactly)
    return reports


Equal = Callable[[float, float], bool]


def exactly(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


def within_rounding(tolerance: float) -> Equal:
    def equal(left: float, right: float) -> bool:
        return exactly(left, right) or math.isclose(left, right, rel_tol=tolerance, abs_tol=ABSOLUTE)

    return equal


def same(left: Any, right: Any, where: str, equal: Equal) -> None:
    """Assert that two nested values are equal; ``where`` names them in the message."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        assert left.shape == right.shape and left.dtype == right.dtype, where
        _same_tensors(left, right, where, equal)
    elif isinstance(left, dict) and isinstance(right, dict):
        assert set(left) == set(right), f"{where}: {list(left)} and {list(right)}"
        for key in left:
            same(left[key], right[key], f"{where}/{key}", equal)
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        assert len(left) == len(right), f"{where}: {left} and {right}"
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            same(one, other, f"{where}/{number}", equal)
    elif isinstance(left, float) or isinstance(right, float):
        assert equal(float(left), float(right)), f"{where}: {left} and {right}"
    else:
        assert left == right, f"{where}: {left!r} and {right!r}"


def _same_tensors(left: torch.Tensor, right: torch.Tensor, where: str, equal: Equal) -> None:
    if torch.equal(left, right):
        return
    assert equal is not exactly, f"{where}: not the same bits"
    one, other = left.double().flatten(), right.double().flatten()
    # An element near zero may differ by the rounding of its neighbours.
    scale = float(one.abs().max())
    difference = float((one - other).abs().max())
    assert equal(scale, scale + difference), f"{where}: differ by {difference:g} of {scale:g}"


def compare_notes(plain: Result, other: Result, way: str, equal: Equal) -> None:
    """Assert that each step has the figures of the plain run at every process that reports the step."""
    expected = plain.notes[0] if plain.notes else {}
    reported = set()
    for process in other.notes:
        reported |= set(process)
        for step, figures in process.items():
            assert step in expected, f"{way}: step {step} is not a step of the plain run"
            same(expected[step], figures, f"{way}: step {step}", equal)
    assert reported == set(expected), f"{way}: no figures of steps {sorted(set(expected) - reported)}"
    for step in reported:
        seen = [process[step] for process in other.notes if step in process]
        for figures in seen[1:]:
            same(seen[0], figures, f"{way}: replicas, step {step}", exactly)


def compare_files(pattern: str, plain: Result, other: Result, way: str, equal: Equal) -> None:
    """Assert that the files of ``pattern`` have the same names, and the same content where we can read it."""
    names = [
        sorted(p.relative_to(x.folder / "out").as_posix() for p in (x.folder / "out").glob(pattern))
        for x in (plain, other)
    ]
    readers: dict[str, Callable[[Path], Any]] = {".csv": _read_table}
    if "tfevents" in pattern:
        same(_curves(plain, pattern), _curves(other, pattern), f"{way}: {pattern}", equal)
        return
    assert names[0], f"the plain run has written no {pattern}"
    assert names[0] == names[1], f"{way}: the files are {names[1]}, without fabric {names[0]}"
    for name in names[0]:
        read = readers.get(Path(name).suffix)
        if read is not None:
            left, right = (read(x.folder / "out" / name) for x in (plain, other))
            same(left, right, f"{way}: {name}", equal)


def _read_table(path: Path) -> list[dict[str, Any]]:
    with path.open() as file:
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _curves(result: Result, pattern: str) -> dict[str, dict[str, dict[int, float]]]:
    """TensorBoard's curves by folder and name, each step once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = sorted({path.parent for path in (result.folder / "out").glob(pattern)})
    found: dict[str, dict[str, dict[int, float]]] = {}
    for folder in folders:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        tags: Iterable[str] = sorted(events.Tags()["scalars"])
        curves = {
            tag: [(e.step, e.value) for e in events.Scalars(tag)]
            for tag in tags
            if "per_second" not in tag and "runtime" not in tag
        }
        for tag, points in curves.items():
            steps = [step for step, _ in points if not tag.endswith("epoch")]
            assert len(steps) == len(set(steps)), f"{folder}: {tag} has a step twice"
        found[folder.relative_to(result.folder / "out").as_posix()] = {
            t: dict(sorted(p)) for t, p in curves.items()
        }
    assert found, f"no {pattern}"
    return found
