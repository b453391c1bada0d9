"""The page of a drill: self-contained HTML, which needs no network and no other file."""

from html import escape
from importlib.resources import files
from string import Template

from fabric.audit.journal import JournalLine, lines_of
from fabric.drill.judge.drill_verdict import DrillVerdict
from fabric.drill.report.tables import (
    expectation_table,
    fault_table,
    html_facts,
    html_list,
    html_table,
    kind_table,
)

_WIDTH, _LEFT, _ROW, _TOP = 1000, 60, 30, 18
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
    zero, seconds = min(times), max(max(times) - min(times), 1e-6)
    height = _TOP + _ROW * len(commits) + 24

    def x(t: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - 10) * min(max(t - zero, 0.0), seconds) / seconds, 1)

    parts = []
    for fault in verdict.faults:
        start, end = x(fault.began), x(fault.ended)
        tip = f"{fault.title}: {fault.observed}"
        parts.append(
            f'<rect class="fault" x="{start}" y="{_TOP - 6}" width="{max(2.0, end - start):.1f}" '
            f'height="{_ROW * len(commits) + 8}"><title>{escape(tip)}</title></rect>'
        )
    for row, (name, lines) in enumerate(commits.items()):
        y = _TOP + _ROW * row
        parts.append(f'<text class="name" x="4" y="{y + 16}">{escape(name[:8])}</text>')
        parts += [_tick(x(line.t), y, line) for line in lines[:: max(1, len(lines) // _MOST_STEPS)]]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        place = x(zero + seconds * share)
        parts.append(f'<text x="{place}" y="{height - 6}" text-anchor="end">{seconds * share:.0f} s</text>')
    label = "commits of every replica over time, and the faults"
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _tick(x: float, y: int, line: JournalLine) -> str:
    kind = "replayed" if line.flag("replay") else "live"
    return f'<line class="{kind}" x1="{x}" x2="{x}" y1="{y + 3}" y2="{y + _ROW - 9}"/>'
