"""The page of a drill: self-contained HTML, which needs no network and no other file."""

from html import escape
from importlib.resources import files
from string import Template

from fabric.audit.journal import lines_of
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
