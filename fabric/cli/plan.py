"""``fabric plan``: compares failure policies for a cluster, and recommends one."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints

import click
from msgspec import structs, to_builtins
from rich.progress import Progress

from fabric.cli.lighthouse_options import json_option, lighthouse_only_options, lighthouses_of
from fabric.cli.terminal_text import plain_console, print_table
from fabric.plan.advice import PolicyResult, compare, options_for, recommendation
from fabric.plan.cluster import ARRIVALS, PRESETS, Cluster, preset
from fabric.plan.failures import FailureModel, phases_of, read_trace
from fabric.plan.report import report

# The words of a user about the cluster: the fields of Cluster, but for the source.
_FIELDS = {name: kind for name, kind in get_type_hints(Cluster).items() if name != "source"}
_NEEDED = ("gpus", "replica_gpus", "mtbf_s")
_HELP = f"""Compare failure policies for a cluster, and say what to run.

PRESET is a published cluster: {", ".join(PRESETS)}. NAME=VALUE describes the cluster, or changes the
preset, as in gpus=4096 replica_gpus=64 mtbf_s=7200 (the mean time between failures of the whole system). The
names are {", ".join(_FIELDS)}; times in seconds, sizes in bytes. arrivals is {", ".join(ARRIVALS)}.
"""


@click.command(help=_HELP)
@click.argument("cluster", nargs=-1, metavar="[PRESET] [NAME=VALUE]...")
@click.option(
    "--trace", "trace_file", type=click.Path(path_type=Path), help="Recorded failures, CSV or JSON."
)
@click.option("--from-job", default="", help="Take rates and phases from this job's recovery records.")
@click.option("--seeds", default=5, help="Random worlds per policy.")
@click.option("--spares", type=int, help="Spare replicas; the default is the mean number that is away.")
@json_option
@click.option("--html", "html_file", type=click.Path(path_type=Path), help="Write a page with plots.")
@lighthouse_only_options
def plan(cluster: tuple[str, ...], **options: Any) -> None:
    try:
        _plan(cluster, options)
    except (ValueError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None


def _described(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the name of the preset, and the values by the names of Cluster's fields. Raises ValueError."""
    if words[:1] == ("reproduce",):
        raise ValueError(
            "fabric plan reproduce is gone: run python benchmarks/reproduce.py in the source tree"
        )
    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise ValueError(f"{names[0]} and {names[1]} are two presets: give one, and NAME=VALUE")
    values: dict[str, Any] = {}
    for name, _, text in (word.partition("=") for word in words if "=" in word):
        if name not in _FIELDS:
            raise ValueError(f"a cluster has no {name}: give one of {', '.join(_FIELDS)}")
        try:
            values[name] = _FIELDS[name](text)
        except ValueError:
            raise ValueError(f'{name} is "{text[:80]}": give a number') from None
    return "".join(names), values


def _plan(words: Sequence[str], options: dict[str, Any]) -> None:
    job = options["from_job"]
    name, described = _described(words)
    measured, source = _from_job(job, options) if job else ({}, "given")
    cluster, failures = _cluster(name, options["trace_file"], {**measured, **described}, source)
    spares, as_json, workers = options["spares"], options["as_json"], os.cpu_count() or 1
    if spares is not None and spares < 0:
        raise ValueError(f"--spares must be zero or more, not {spares}")
    with _progress("simulating", as_json) as advance:
        outcomes = compare(
            cluster,
            seeds=options["seeds"],
            options=options_for(cluster, spares),
            failures=failures,
            workers=workers,
            progress=advance,
        )
    page: Path | None = options["html_file"]
    if page is not None:
        with _progress("plotting", as_json) as advance:
            page.write_text(report(cluster, outcomes, advance), encoding="utf-8")
    if as_json:
        body = {
            "cluster": to_builtins(cluster),
            "recommendation": recommendation(cluster, outcomes),
            "policies": [to_builtins(outcome) for outcome in outcomes],
        }
        click.echo(json.dumps(body, indent=2))
        return
    print_table(
        plain_console(),
        "",
        ("policy", "settings", "effective", "time / ideal", "outside restarts"),
        list(map(_row, outcomes)),
    )
    click.echo(recommendation(cluster, outcomes))
    if page is not None:
        click.echo(f"written: {page}")


def _from_job(job: str, options: dict[str, Any]) -> tuple[dict[str, float], str]:
    """Return MTBF, stall and restart time from a running job's records, and a text that names the source."""
    lighthouses = lighthouses_of(options["lighthouse"], job, options["token_file"], needs_job=True)
    phases = phases_of(lighthouses.ask_lines(lighthouses.path("recoveries")))
    measured = {"mtbf_s": phases.mtbf_s}
    if phases.stall_s:
        measured["stall_s"] = phases.stall_s
    if phases.away_s:
        measured["restart_s"] = phases.away_s
    return measured, f"recovery records of job {job}, {phases.failures} failures"


def _cluster(
    name: str, trace_file: Path | None, values: dict[str, Any], source: str
) -> tuple[Cluster, FailureModel | None]:
    failures: FailureModel | None = None
    if trace_file is not None:
        trace = read_trace(trace_file)
        failures, source = trace, f"the trace {trace_file.name}, {len(trace.failures)} failures"
        values.setdefault("mtbf_s", trace.mtbf_s)
        values.setdefault("repair_median_s", trace.median_repair_s)
    if name:
        return structs.replace(preset(name), **values), failures
    if missing := [name for name in _NEEDED if name not in values]:
        raise ValueError(f"{', '.join(missing)} is missing: describe the cluster, or name a preset")
    return Cluster(**values, source=source), failures


@contextmanager
def _progress(what: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error if it is a terminal; the bar disappears when done."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with Progress(console=plain_console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _row(outcome: PolicyResult) -> tuple[str, ...]:
    time = f"{outcome.time_to_train.mean:.2f} ± {outcome.time_to_train.error:.2f}"
    return (
        outcome.name,
        outcome.settings,
        f"{outcome.effective.mean:.1%} ± {outcome.effective.error:.1%}",
        time if outcome.finished else "does not finish",
        f"{outcome.available.mean:.1%}",
    )
