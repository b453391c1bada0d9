"""``fabric demo verify``: recompute a run's summary from its journals and judge it.

The demo's own claims do not count: ``summary.json`` is only compared with the summary of the journals, and
the promises of the protocol are checked on the journals (``audit``).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric.audit.audit import Evidence, audit, gather
from fabric.audit.journal import RecordedRun, read_run
from fabric.audit.summary import RunSummary, summarise
from fabric.errors import ConfigError

SUMMARY_FILE = "summary.json"
MAX_SUMMARY_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result: the numbers, and a sentence for every broken promise."""

    evidence: Evidence
    summary: RunSummary
    broken: tuple[str, ...]


def judge(run: RecordedRun, *, is_over: bool = True) -> Verdict:
    """Judge the run that ``read_run`` has read; ``is_over``: every replica must have finished."""
    evidence = gather(run)
    return Verdict(evidence, summarise(evidence), tuple(audit(evidence, is_over=is_over)))


def verify(directory: Path) -> Verdict:
    """Judge the run in ``directory`` and compare it with its ``summary.json``, where there is one.

    Raises ConfigError where ``directory`` holds no run.
    """
    verdict = judge(read_run(directory))
    path = directory / SUMMARY_FILE
    if not path.exists():
        return Verdict(verdict.evidence, verdict.summary, (*verdict.broken, f"{path} is missing."))
    differences = _differences(_read_summary(path), verdict.summary.as_json())
    return Verdict(verdict.evidence, verdict.summary, (*verdict.broken, *differences))


def write_summary(directory: Path, summary: RunSummary) -> None:
    document = json.dumps(summary.as_json(), indent=2) + "\n"
    (directory / SUMMARY_FILE).write_text(document, encoding="utf-8")


def _read_summary(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_SUMMARY_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_SUMMARY_BYTES} bytes, which no demo writes.")
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is not a JSON object.")
    return document


def _differences(written: dict[str, Any], computed: dict[str, Any]) -> list[str]:
    return [
        f"summary.json says {name} = {_shown(written.get(name))}, the journals say "
        f"{_shown(computed.get(name))}."
        for name in sorted(set(written) | set(computed))
        if not _same(written.get(name), computed.get(name))
    ]


def _shown(value: object) -> str:
    return json.dumps(value)[:120]


def _same(left: object, right: object) -> bool:
    """Whether two values are equal in JSON: floats may lose their last digit, true is not 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, int | float) and isinstance(right, int | float):
        return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return left == right
