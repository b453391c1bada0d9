"""``fabric plan``: compares failure policies for a cluster, and recommends one."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.progress import Progress
from rich.table import Table

from fabric.cli.lighthouse_options import lighthouse_only_options, lighthouses_of
from fabric.cli.terminal_text import plain_console
from fabric.plan.advice import PolicyResult, compare, options_for, recommendation
from fabric.plan.cluster import ARRIVALS, PRESETS, Cluster, RackFailures, preset
from fabric.plan.failures import FailureModel, phases_of, read_trace
from fabric.plan.report import report

# The options that describe the cluster, by the fields of Cluster. Each overrides the preset's value.
_DESCRIPTION: dict[str, tuple[str, type, str]] = {
    "gpus": ("--gpus", int, "How many GPUs there are."),
    "replica_gpus": ("--replica-gpus", int, "How many GPUs make one replica."),
    "mtbf_s": ("--mtbf", float, "Mean seconds between failures of the whole system."),
    "step_s": ("--step", float, "Seconds of an optimizer step without failures."),
    "exchange_s": ("--exchange", float, "Seconds of it that the all-reduce takes."),
    "restart_s": ("--restart", float, "Seconds of a restart."),
    "repair_median_s": ("--repair", float, "Median seconds that a machine is away."),
    "save_s": ("--save", float, "Seconds that everybody waits for a checkpoint."),
    "state_bytes": ("--state-bytes", float, "Size of one replica's state."),
    "link_bytes_s": ("--link", float, "Bytes per second between two replicas."),
    "micro_batches": ("--micro-batches", int, "Micro-batches per replica and step."),
    "steps": ("--steps", int, "Steps to simulate."),
    "arrivals": ("--arrivals", str, f"When failures come: {', '.join(ARRIVALS)}."),
    "shape": ("--shape", float, "Shape of Weibull arrivals."),
}
# The options of the cluster's racks, by the fields of RackFailures.
_RACKS: dict[str, tuple[str, type, str]] = {
    "replicas": ("--rack-replicas", int, "Replicas in one rack, for --arrivals racks."),
    "share": ("--rack-share", float, "Part of the failures that take a whole rack."),
}


def _refuse(sentence: object) -> NoReturn:
    click.echo(f"error: {sentence}", err=True)
    raise SystemExit(2)


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the cluster's options."""
    named = [*_DESCRIPTION.items(), *((f"rack_{name}", row) for name, row in _RACKS.items())]
    for name, (option, kind, text) in reversed(named):
        command = click.option(option, name, type=kind, help=text)(command)
    presets = f"A published cluster: {', '.join(PRESETS)}."
    return click.option("--preset", "preset_name", default="", help=presets)(command)


@click.group(invoke_without_command=True)
@_options
@click.option(
    "--trace", "trace_file", type=click.Path(path_type=Path), help="Recorded failures, CSV or JSON."
)
@click.option("--from-job", default="", help="Take rates and phases from this job's recovery records.")
@click.option("--seeds", default=5, help="Random worlds per policy.")
@click.option("--spares", type=int, help="Spare replicas; the default is the mean number that is away.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), help="Write a page with plots.")
@lighthouse_only_options
@click.pass_context
def plan(context: click.Context, /, **options: Any) -> None:
    """Compare failure policies for a cluster, and say what to run."""
    if context.invoked_subcommand is not None:
        return
    try:
        _plan(options)
    except (ValueError, OSError) as error:
        _refuse(error)


def _plan(options: dict[str, Any]) -> None:
    job = options["from_job"]
    measured, source = _from_job(job, options) if job else ({}, "given")
    described = {name: options[name] for name in _DESCRIPTION if options[name] is not None}
    racks = {name: value for name in _RACKS if (value := options[f"rack_{name}"]) is not None}
    described["racks"] = RackFailures(**racks)
    cluster, failures = _cluster(
        options["preset_name"], options["trace_file"], {**measured, **described}, source
    )
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
    _print(cluster, outcomes, as_json)
    if page is not None and not as_json:
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
        return replace(preset(name), **values), failures
    missing = [
        option
        for option, key in (("--gpus", "gpus"), ("--replica-gpus", "replica_gpus"), ("--mtbf", "mtbf_s"))
        if key not in values
    ]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing: describe the cluster, or choose a --preset")
    return Cluster(**values, source=source), failures


def _print(cluster: Cluster, outcomes: list[PolicyResult], as_json: bool) -> None:
    if not as_json:
        plain_console().print(_table(outcomes))
        click.echo(recommendation(cluster, outcomes))
        return
    body = {
        "cluster": asdict(cluster),
        "recommendation": recommendation(cluster, outcomes),
        "policies": [asdict(outcome) for outcome in outcomes],
    }
    click.echo(json.dumps(body, indent=2))


@contextmanager
def _progress(what: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error if it is a terminal; the bar disappears when done."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with Progress(console=plain_console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _table(outcomes: list[PolicyResult]) -> Table:
    table = Table("policy", "settings", "effective", "time / ideal", "outside restarts")
    for outcome in outcomes:
        time = f"{outcome.time_to_train.mean:.2f} ± {outcome.time_to_train.error:.2f}"
        table.add_row(
            outcome.name,
            outcome.settings,
            f"{outcome.effective.mean:.1%} ± {outcome.effective.error:.1%}",
            time if outcome.finished else "does not finish",
            f"{outcome.available.mean:.1%}",
        )
    return table


@plan.command("reproduce", hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("options", nargs=-1)
def moved_command(options: tuple[str, ...]) -> None:
    """Say where the published figures are reproduced now."""
    del options
    _refuse("fabric plan reproduce is gone: run python benchmarks/reproduce.py in the source tree")
