"""The comparison of policies as one self-contained page: tables and SVG plots, no script and no network."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from msgspec.structs import replace

from fabric.model import Value
from fabric.plan import closed_forms
from fabric.plan.advice import PARTS, PolicyResult, compare, options_for, recommendation, replication_cost
from fabric.plan.cluster import Cluster

_COLORS = ("#2f7ed8", "#d9822b", "#3f9b57", "#b0413e", "#7d5ba6", "#6b7280")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 680, 300, 56, 44, 16
_KEY = 180  # width of the names beside a plot, in pixels
_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_SWEEP_STEPS = 600


class Sweep(Value):
    """A plot over one quantity: ``lines[name]`` are (x, y) points; x has a logarithmic scale."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


def sweeps(cluster: Cluster, progress: Callable[[int, int], None] = lambda done, total: None) -> list[Sweep]:
    """Time to train over redundancy, over the MTBF and over the scale.

    The sweeps over MTBF and scale are simulated with one seed and few steps. They show only the shape.
    """
    runs = 2 * len(_FACTORS)
    over_mtbf: dict[str, list[tuple[float, float]]] = {}
    over_scale: dict[str, list[tuple[float, float]]] = {}
    for number, factor in enumerate(_FACTORS):
        _add(over_mtbf, cluster.mtbf_s * factor / 60, replace(cluster, mtbf_s=cluster.mtbf_s * factor))
        progress(2 * number + 1, runs)
        gpus = max(2, round(cluster.replicas * factor)) * cluster.replica_gpus
        scaled = replace(cluster, gpus=gpus, mtbf_s=cluster.mtbf_s * cluster.gpus / gpus)
        _add(over_scale, gpus, scaled)
        progress(2 * number + 2, runs)
    label = "time to train / ideal"
    plots = [
        Sweep("Over the mean time between failures", "minutes between failures", label, over_mtbf),
        Sweep("Over the scale, with equal GPUs", "GPUs", label, over_scale),
    ]
    redundancy = _over_redundancy(cluster)
    return [redundancy, *plots] if redundancy is not None else plots


def _add(lines: dict[str, list[tuple[float, float]]], x: float, cluster: Cluster) -> None:
    short = replace(cluster, steps=min(cluster.steps, _SWEEP_STEPS))
    for outcome in compare(short, seeds=1):
        if outcome.finished:
            lines.setdefault(outcome.name, []).append((x, outcome.time_to_train.mean))


def _over_redundancy(cluster: Cluster) -> Sweep | None:
    groups = cluster.replicas
    if groups < 4:
        return None
    lines: dict[str, list[tuple[float, float]]] = {"SPARe, J(r)": [], "replication, r / A*": []}
    for r in range(2, min(12, groups // 2) + 1):
        optimum = closed_forms.joint_objective(
            groups, r, save_s=cluster.save_s, restart_s=cluster.restart_s, mtbf_s=cluster.mtbf_s
        )
        lines["SPARe, J(r)"].append((r, optimum.objective))
        lines["replication, r / A*"].append((r, replication_cost(cluster, r)))
    return Sweep("Over the redundancy (closed forms)", "redundancy r", "time to train / ideal", lines)


def page(cluster: Cluster, outcomes: Sequence[PolicyResult], plots: Sequence[Sweep]) -> str:
    """Return the whole page as HTML."""
    rows = "".join(
        f"<tr><th>{escape(o.name)}</th><td>{escape(o.settings)}</td>"
        f"<td>{o.effective.mean:.1%} <small>± {o.effective.error:.1%}</small></td>"
        f"<td>{times}</td><td>{o.available.mean:.1%}</td></tr>"
        for o in outcomes
        for times in [
            f"{o.time_to_train.mean:.2f} <small>± {o.time_to_train.error:.2f}</small>"
            if o.finished
            else "does not finish"
        ]
    )
    facts = (
        f"{cluster.gpus:,} GPUs in {cluster.replicas} replicas of {cluster.replica_gpus}; a failure every"
        f" {cluster.mtbf_s:,.0f} s ({cluster.arrivals}); steps of {cluster.step_s:g} s; restarts of"
        f" {cluster.restart_s:g} s; saves of {cluster.save_s:g} s. Source: {cluster.source}."
    )
    drawn = "".join(f"<h2>{escape(plot.title)}</h2>{_lines(plot)}" for plot in plots)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>fabric plan</title><style>{_STYLE}</style></head><body>
<h1>What to run</h1><p class="advice">{escape(recommendation(cluster, outcomes))}</p><p>{escape(facts)}</p>
<div class="wide"><table><thead><tr><th>policy</th><th>settings</th><th>effective training time</th>
<th>time to train / ideal</th><th>outside restarts</th></tr></thead><tbody>{rows}</tbody></table></div>
<h2>Where the time goes</h2>{_bars(outcomes)}{drawn}
<p><small>± is the 95 % confidence interval over the seeds. What each policy means, and its limits:
docs/plan.md.</small></p></body></html>
"""


def _bars(outcomes: Sequence[PolicyResult]) -> str:
    """One stacked bar per policy, by the shares of its ledger."""
    row, label = 30, 150
    height = row * len(outcomes) + 34
    parts = []
    for number, outcome in enumerate(outcomes):
        y, x = number * row + 4, float(label)
        parts.append(f'<text x="{label - 8}" y="{y + 16}" text-anchor="end">{escape(outcome.name)}</text>')
        for part, color in zip(PARTS, _COLORS, strict=True):
            width = outcome.shares[part] * (_WIDTH - label - 8)
            title = f"<title>{part}: {outcome.shares[part]:.1%}</title>"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="22" fill="{color}">{title}</rect>'
            )
            x += width
    for number, (part, color) in enumerate(zip(PARTS, _COLORS, strict=True)):
        x = label + number * 88
        parts.append(f'<rect x="{x}" y="{height - 16}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{x + 14}" y="{height - 7}">{part}</text>')
    return _svg(height, "Where the time goes under each policy", parts)


def _lines(plot: Sweep) -> str:
    points = [point for line in plot.lines.values() for point in line]
    if not points:
        return "<p>Nothing finished.</p>"
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    high_y = min(max(y for _, y in points), 8.0) * 1.05
    span = math.log(high_x / low_x) if high_x > low_x else 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        right = _LEFT + math.log(x / low_x) / span * (_WIDTH - _LEFT - _KEY)
        return right, _TOP + (1 - min(y, high_y) / high_y) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_axis(plot, high_y, sorted({x for x, _ in points}), place)]
    for number, (name, line) in enumerate(plot.lines.items()):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(x, y) for x, y in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"><title>{name}: {y:.2f}</title></circle>'
            for (a, b), (_, y) in ((place(x, y), (x, y)) for x, y in line)
        ]
        key_y = _TOP + 14 + number * 18
        parts.append(f'<rect x="{_WIDTH - _KEY + 8}" y="{key_y - 9}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{_WIDTH - _KEY + 23}" y="{key_y}">{escape(name)}</text>')
    return _svg(_HEIGHT, plot.title, parts)


def _axis(
    plot: Sweep, high_y: float, xs: Sequence[float], place: Callable[[float, float], tuple[float, float]]
) -> str:
    parts = []
    step = next(s for s in (0.1, 0.25, 0.5, 1.0, 2.0) if high_y / s <= 8)
    for count in range(int(high_y / step) + 1):
        _, y = place(xs[0], count * step)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _KEY}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{count * step:g}</text>')
    for x in xs:
        a, _ = place(x, 0)
        parts.append(f'<text x="{a:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{x:,.3g}</text>')
    middle = (_LEFT + _WIDTH - _KEY) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(plot.x_label)}</text>')
    upright = f"rotate(-90 14 {_HEIGHT / 2})"
    place_y = f'x="14" y="{_HEIGHT / 2}" text-anchor="middle" transform="{upright}"'
    parts.append(f"<text {place_y}>{escape(plot.y_label)}</text>")
    return "".join(parts)


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    box = f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}"'
    return f'<div class="wide"><svg {box}>{"".join(parts)}</svg></div>'


_STYLE = """
:root{color-scheme:light dark;--ink:#1b2430;--paper:#ffffff;--rule:#d5dae1}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ee;--paper:#12161c;--rule:#343c47}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
body{max-width:860px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.35em .7em;border-bottom:1px solid var(--rule)}
.advice{font-size:1.15em;font-weight:600}.wide{overflow-x:auto}svg{width:100%;min-width:520px;max-width:820px}
svg text{fill:var(--ink);font-size:12px}.grid{stroke:var(--rule)}small{opacity:.75}
"""


def report(
    cluster: Cluster,
    outcomes: Sequence[PolicyResult],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Return the page with its plots; run the simulations for the plots."""
    options_for(cluster)  # raises for a cluster that cannot be compared, before any simulation
    return page(cluster, outcomes, sweeps(cluster, progress))
