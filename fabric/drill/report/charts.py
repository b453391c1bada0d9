"""The pictures of a drill's page as SVG text: values and events over wall time.

This module draws from plain numbers; the page adds only tooltips and a legend. Colours are CSS variables of
the page, so the pictures follow its light or dark scheme.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from fabric.model import Value

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1000, 58, 16, 18, 30
COLOURS = 6


class ChartPoint(Value):
    """One value of one replica at ``t`` seconds; ``hollow`` draws it as a circle of its own."""

    t: float
    value: float
    tip: str
    hollow: bool = False


class ChartMark(Value):
    """A vertical line at ``t`` seconds: ``kind`` is the CSS class, ``kill`` or ``join``."""

    t: float
    kind: str
    label: str


class ChartSpan(Value):
    """A time from ``start`` to ``end`` seconds; ``epoch``: of a replica, None while it catches up."""

    start: float
    end: float
    tip: str
    epoch: int | None = None


class ChartTime(Value):
    """The wall time of a run, from 0 to ``seconds``, with the events that every picture shows."""

    seconds: float
    marks: Sequence[ChartMark] = ()
    faults: Sequence[ChartSpan] = ()


class ChartFrame(Value):
    """The plotting area: the time of ``run``, and values from ``low`` to ``high``."""

    run: ChartTime
    low: float
    high: float
    height: int

    def x(self, t: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * t / max(self.run.seconds, 1e-9), 1)

    def y(self, value: float) -> float:
        part = (value - self.low) / max(self.high - self.low, 1e-12)
        return round(self.height - BOTTOM - (self.height - TOP - BOTTOM) * part, 1)


def colour(index: int) -> str:
    return f"var(--c{index % COLOURS})"


def nice_ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """About ``wanted`` round numbers between ``low`` and ``high``."""
    raw = max(high - low, 1e-9) / wanted
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(f * magnitude for f in (1, 2, 5, 10) if f * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def curves(series: Mapping[str, Sequence[Sequence[ChartPoint]]], run: ChartTime) -> str:
    """One line per process. ``series`` by replica, then by process, each ordered by time."""
    values = [point.value for lives in series.values() for points in lives for point in points]
    frame = ChartFrame(run, min(values, default=0.0), max(values, default=1.0), 300)
    parts = [_axes(frame)]
    for index, (replica, lives) in enumerate(series.items()):
        drawn = []
        for points in lives:
            path = " ".join(f"{frame.x(p.t)},{frame.y(p.value)}" for p in points if not p.hollow)
            drawn.append(f'<polyline class="curve" stroke="{colour(index)}" points="{path}"/>')
            drawn.extend(_dot(frame, point, colour(index)) for point in points)
        parts.append(_of(replica, drawn))
    return _svg(frame, parts, "loss over wall time")


def bars(series: Mapping[str, Sequence[ChartPoint]], run: ChartTime, median: float) -> str:
    """Step times as thin columns side by side, with the median as a dashed line."""
    values = [point.value for points in series.values() for point in points]
    frame = ChartFrame(run, 0.0, max(values, default=1.0) * 1.05 or 1.0, 260)
    parts = [_axes(frame)]
    for index, (replica, points) in enumerate(series.items()):
        drawn = []
        for point in points:
            x, y = frame.x(point.t) + 3 * (index - len(series) / 2), frame.y(point.value)
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="2.6" height="{frame.y(0) - y:.1f}" '
                f'fill="{colour(index)}" data-tip="{escape(point.tip)}"/>'
            )
        parts.append(_of(replica, drawn))
    y = frame.y(median)
    parts.append(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="var(--ink)" '
        'stroke-dasharray="2 4"/>'
    )
    return _svg(frame, parts, "step times over wall time")


def rosters(series: Mapping[str, Sequence[ChartSpan]], run: ChartTime) -> str:
    """One row per replica, one bar per epoch it was a member of."""
    row = 34
    frame = ChartFrame(run, 0.0, 1.0, TOP + BOTTOM + row * len(series))
    parts = [_HATCH, _axes(frame, values=False)]
    for index, (replica, spans) in enumerate(series.items()):
        top = TOP + row * index + 5
        parts.append(f'<text class="name" x="4" y="{top + 17}">{escape(replica[:8])}</text>')
        parts.append(_of(replica, [_span(frame, span, top, row - 10, index) for span in spans]))
    return _svg(frame, parts, "epochs of every replica over wall time")


_HATCH = (
    '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="3" height="7" fill="var(--warn)"/></pattern></defs>'
)


def _span(frame: ChartFrame, span: ChartSpan, top: int, height: int, index: int) -> str:
    x, width = frame.x(span.start), max(1.0, frame.x(span.end) - frame.x(span.start))
    fill = "url(#hatch)" if span.epoch is None else colour(index)
    bar = (
        f'<rect x="{x}" y="{top}" width="{width:.1f}" height="{height}" rx="3" fill="{fill}" '
        f'stroke="var(--card)" data-tip="{escape(span.tip)}"/>'
    )
    if span.epoch is None or width < 26:
        return bar
    middle = x + width / 2
    label = f'<text class="on" x="{middle:.1f}" y="{top + 17}" text-anchor="middle">{span.epoch}</text>'
    return bar + label


def _dot(frame: ChartFrame, point: ChartPoint, stroke: str) -> str:
    fill = "var(--card)" if point.hollow else stroke
    radius = 3.4 if point.hollow else 2
    return (
        f'<circle cx="{frame.x(point.t)}" cy="{frame.y(point.value)}" r="{radius}" fill="{fill}" '
        f'stroke="{stroke}" data-tip="{escape(point.tip)}"/>'
    )


def _of(replica: str, parts: Iterable[str]) -> str:
    return f'<g data-replica="{escape(replica)}">{"".join(parts)}</g>'


def _axes(frame: ChartFrame, *, values: bool = True) -> str:
    bottom = frame.height - BOTTOM
    parts = []
    for fault in frame.run.faults:
        x, width = frame.x(fault.start), max(2.0, frame.x(fault.end) - frame.x(fault.start))
        parts.append(
            f'<rect class="fault" x="{x}" y="{TOP}" width="{width:.1f}" height="{bottom - TOP}" '
            f'data-tip="{escape(fault.tip)}"/>'
        )
    for t in nice_ticks(0, frame.run.seconds, 10):
        x = frame.x(t)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{t:g} s</text>')
    for value in nice_ticks(frame.low, frame.high) if values else ():
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    for mark in frame.run.marks:
        x = frame.x(mark.t)
        shift, anchor = (-5, "end") if x > WIDTH - 120 else (5, "start")
        parts.append(f'<line class="{mark.kind}" x1="{x}" x2="{x}" y1="6" y2="{bottom}"/>')
        parts.append(f'<text x="{x + shift}" y="14" text-anchor="{anchor}">{escape(mark.label)}</text>')
    return "".join(parts)


def _svg(frame: ChartFrame, parts: Iterable[str], label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {frame.height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
