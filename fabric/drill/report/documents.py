"""The verdict as a JSON document, as JUnit XML and as a page, which needs no network and no other file."""

import math
from html import escape
from importlib.resources import files
from string import Template
from typing import Any
from xml.etree import ElementTree

from fabric.audit.journal import lines_of
from fabric.drill.judge.drill_record import InjectedFault
from fabric.drill.judge.drill_verdict import DrillVerdict
from fabric.drill.report.charts import ChartPoint, ChartSpan, strokes
from fabric.drill.report.tables import (
    expectation_table,
    fault_table,
    html_facts,
    html_list,
    html_table,
    kind_table,
)
from fabric.model import printable


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
    # XML allows no control characters.
    suite = ElementTree.Element("testsuite", name="fabric drill", tests=str(len(cases)), failures=str(failed))
    for name, holds, is_skipped, why in cases:
        case = ElementTree.SubElement(suite, "testcase", classname="fabric.drill", name=printable(name, " "))
        if not holds:
            ElementTree.SubElement(case, "failure", message=printable(why, " "))
        elif is_skipped:
            ElementTree.SubElement(case, "skipped", message=printable(why, " "))
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


_MOST_STEPS = 4000


def page_of(verdict: DrillVerdict, command: str) -> str:
    """Return the page as text; ``command`` is the line that repeats the drill."""
    template = Template((files("fabric.drill.report") / "drill_page.html").read_text(encoding="utf-8"))
    return template.substitute(
        verdict="The job held." if verdict.holds else "The job did not hold.",
        verdict_class="good" if verdict.holds else "bad",
        command=escape(command),
        facts=_facts(verdict),
        picture=_picture(verdict),
        expectations=html_table(expectation_table(verdict)),
        sentences=html_list(
            [*verdict.mistakes, *verdict.broken[:50], *verdict.disagreements[:50], *verdict.unseen]
        ),
        faults=html_table(fault_table(verdict)),
        kinds=html_table(kind_table(verdict)),
        timelines="".join(
            f"<details><summary>{escape(fault.title)}</summary>{html_list(fault.timeline)}</details>"
            for fault in verdict.faults
        ),
    )


def _facts(verdict: DrillVerdict) -> str:
    summary = verdict.summary
    stall = max((fault.stall_s or 0.0 for fault in verdict.faults), default=0.0)
    return html_facts(
        (str(len(verdict.faults)), "faults"),
        (str(summary.steps), "committed steps"),
        (str(summary.steps_lost), "steps lost"),
        (f"{summary.samples_skipped}, {summary.samples_repeated}", "samples skipped, repeated"),
        (f"{verdict.median_step_s:.3f} s", "median step"),
        (f"{stall:.3f} s", "longest stall at a fault"),
    )


def _picture(verdict: DrillVerdict) -> str:
    """Draw the commits of every replica over time, with the faults as bands."""
    journals = verdict.evidence.run.journals
    commits = {name: lines_of(journal.lines, "commit") for name, journal in sorted(journals.items())}
    times = [line.t for lines in commits.values() for line in lines]
    if not times:
        return "<p>No replica committed a step.</p>"
    zero, seconds = min(times), max(times) - min(times)

    def after(t: float) -> float:
        return min(max(t - zero, 0.0), seconds)

    points = {
        name: [
            ChartPoint(after(x.t), 0.0, "", x.flag("replay")) for x in lines[:: 1 + len(lines) // _MOST_STEPS]
        ]
        for name, lines in commits.items()
    }
    bands = [ChartSpan(after(x.began), after(x.ended), f"{x.title}: {x.observed}") for x in verdict.faults]
    return strokes(points, bands, seconds)
