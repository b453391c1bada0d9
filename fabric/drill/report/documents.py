"""The verdict as a JSON document and as JUnit XML."""

import math
from typing import Any
from xml.etree import ElementTree

from fabric.drill.judge.drill_record import InjectedFault
from fabric.drill.judge.drill_verdict import DrillVerdict


def as_json(verdict: DrillVerdict) -> dict[str, Any]:
    """Return the JSON object; a replica that never returned has null seconds."""
    return {
        "holds": verdict.holds,
        "expectations": [
            {
                "expectation": outcome.expectation,
                "holds": outcome.holds,
                "value": _finite(outcome.value),
                "shown": outcome.shown,
                "why": outcome.why,
            }
            for outcome in verdict.outcomes
        ],
        "mistakes": list(verdict.mistakes),
        "broken": list(verdict.broken),
        "disagreements": list(verdict.disagreements),
        "unseen": list(verdict.unseen),
        "faults": [_fault(fault) for fault in verdict.faults],
        "median_step_s": verdict.median_step_s,
        "summary": verdict.summary.as_json(),
    }


def as_junit(verdict: DrillVerdict) -> bytes:
    """Return JUnit XML: a test case for each expectation, and one for the drill's own faults."""
    cases = [(o.expectation, o.holds, o.value is None, o.why) for o in verdict.outcomes]
    cases.append(("faults-happened-and-ended", not verdict.mistakes, False, "; ".join(verdict.mistakes)))
    failed = sum(not holds for _, holds, _, _ in cases)
    suite = ElementTree.Element("testsuite", name="fabric drill", tests=str(len(cases)), failures=str(failed))
    for name, holds, is_skipped, why in cases:
        case = ElementTree.SubElement(suite, "testcase", classname="fabric.drill", name=_plain(name))
        if not holds:
            ElementTree.SubElement(case, "failure", message=_plain(why))
        elif is_skipped:
            ElementTree.SubElement(case, "skipped", message=_plain(why))
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def _fault(fault: InjectedFault) -> dict[str, Any]:
    return {
        "fault": fault.name,
        "targets": list(fault.targets),
        "about": fault.about,
        "began": fault.began,
        "ended": fault.ended,
        "observed": fault.observed,
        "undone": fault.undone,
        "stall_s": fault.stall_s,
        "rejoined_s": {name: _finite(seconds) for name, seconds in fault.rejoined_s.items()},
        "timeline": list(fault.timeline),
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


def _plain(text: str) -> str:
    """Return the text without the control characters that XML does not allow."""
    return "".join(c if c.isprintable() else " " for c in text)
