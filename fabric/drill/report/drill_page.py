"""The page of a drill: self-contained HTML, which needs no network and no other file."""

from collections.abc import Iterable
from html import escape
from importlib.resources import files
from string import Template

from fabric.audit.journal import JournalLine, lines_of
from fabric.drill.judge.drill_verdict import DrillVerdict
from fabric.drill.report.drill_tables import DrillTable, expectation_table, fault_table, kind_table

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
        expectations=_table(expectation_table(verdict)),
        sentences=_list(
            [*verdict.mistakes, *verdict.broken[:50], *verdict.disagreements[:50], *verdict.unseen]
        ),
        faults=_table(fault_table(verdict)),
        kinds=_table(kind_table(verdict)),
        timelines="".join(
            f"<details><summary>{escape(cost.fault.title)}</summary>{_list(cost.timeline)}</details>"
            for cost in verdict.costs
        ),
    )


def _facts(verdict: DrillVerdict) -> str:
    summary = verdict.summary
    stall = max((cost.stall_s or 0.0 for cost in verdict.costs), default=0.0)
    facts = (
        (str(len(verdict.costs)), "faults"),
        (str(summary.steps), "committed steps"),
        (str(summary.steps_lost), "steps lost"),
        (f"{summary.samples_skipped}, {summary.samples_repeated}", "samples skipped, repeated"),
        (f"{verdict.median_step_s:.3f} s", "median step"),
        (f"{stall:.3f} s", "longest stall at a fault"),
    )
    return "".join(f'<div class="fact"><b>{value}</b><span>{name}</span></div>' for value, name in facts)


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
    for cost in verdict.costs:
        start, end = x(cost.fault.began), x(cost.fault.ended)
        tip = f"{cost.fault.title}: {cost.fault.observed}"
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


def _table(table: DrillTable) -> str:
    if not table.rows:
        return "<p>None.</p>"

    def row(tag: str, cells: Iterable[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    return f"<table>{row('th', table.head)}{''.join(row('td', cells) for cells in table.rows)}</table>"


def _list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""
