"""``fabric drill``: options, exit codes and output of a drill.

Exit codes: 0 the job met every expectation, 1 it did not or the drill failed, 130 interrupted.
"""

import importlib
import json
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from msgspec import structs
from msgspec.structs import replace
from rich.console import Console

from fabric.cli.lighthouse_options import (
    lighthouse_options,
    lighthouses_of,
    operator_name,
    out_option,
    replicas_option,
    why_option,
)
from fabric.cli.terminal_text import plain_console, print_table
from fabric.drill.judge.drill_record import DrillRecord
from fabric.drill.judge.drill_verdict import DrillVerdict, judge_drill
from fabric.drill.judge.expectations import DEFAULTS, MEASURES, parse_expectation
from fabric.drill.report.documents import expectation_table, fault_table, kind_table, write_reports
from fabric.drill.run.drill_loop import DrillRun
from fabric.drill.run.running_job import RunningJob
from fabric.drill.run.started_job import REPORTS, JobOptions
from fabric.drill.schedule.drill_schedule import (
    DrillSchedule,
    check_schedule,
    parse_fault,
    parse_plan,
    random_schedule,
)
from fabric.drill.schedule.fault_table import FAULTS, FaultNeed, obstacle
from fabric.errors import ConfigError, Refused
from fabric.model import printable
from fabric.runtime.drill_orders import order_key
from fabric.runtime.http.token_file import read_token
from fabric.runtime.local_job import MAX_REPLICAS, SUPERVISOR_FILE, claimed, interrupt_at_sigterm
from fabric.runtime.process_environment import other_environment, process_environment

_MAX_BYTES = 1 << 20


def read_plan(path: Path) -> DrillSchedule:
    """Read and check the plan at ``path``. Raises ConfigError with one sentence."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"the plan {path} is over {_MAX_BYTES} bytes: shorten it")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the plan {path} cannot be read ({error}): name a YAML file") from error
    return parse_plan(_decode(text, path), str(path))


def _decode(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            f"the plan {path} is no JSON, and PyYAML is missing: write JSON, or pip install pyyaml"
        ) from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        place = " ".join(str(error).split())[:200]
        raise ConfigError(f"the plan {path} is no YAML ({place}): correct it") from error


_LOG_WIDTH = 200
_FILES = ("durable", SUPERVISOR_FILE, *REPORTS, *(f"etcd{number}" for number in range(9)))


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option(
    "--list", "lists", is_flag=True, help="Show all faults and expectations; why a fault is not possible."
)
@replicas_option(default=3)
@click.option("--lighthouses", default=1, show_default=True, help="How many lighthouses the drill starts.")
@click.option("--store-members", default=0, show_default=True, help="Etcd members to start; 0: SQLite.")
@click.option("--plan", type=click.Path(path_type=Path), help="File with the schedule, YAML or JSON.")
@click.option("--fault", "faults", multiple=True, help='A fault, such as "kill r1"; several in this order.')
@click.option("--random", "drawn", help='Draw the faults from a seed: 7, or "7 every 30s for 2m".')
@click.option(
    "--expect", multiple=True, help="An expectation, such as stall<=1s; several; default: see --list."
)
@out_option(default="drill-out")
@click.option("--yes-lose-it", is_flag=True, help="Drill also a job that cannot survive it.")
@lighthouse_options
@click.option("--journals", type=click.Path(path_type=Path), help="Of a running job: folder of the journals.")
@why_option(default="a drill")
@click.option(
    "--print-key", is_flag=True, help="With --job and --token-file: print the key for its trainers' key file."
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def drill(context: click.Context, /, command: tuple[str, ...], **options: Any) -> None:
    """Break a job on purpose, and judge from independent records whether the job held.

    COMMAND is the training command, after --: fabric drill --replicas 3 -- python train.py. The drill starts
    the job with a lighthouse of its own, plays the schedule, and writes report.html, report.json and
    junit.xml. With --lighthouse or --job the drill breaks a running job instead, and --token-file is the
    token for drills. Exit code 1: an expectation failed.
    """
    if options["print_key"]:
        if not (options["job"] and options["token_file"]):
            raise ConfigError("--print-key needs a job and the token for drills: give --job and --token-file")
        click.echo(order_key(read_token(options["token_file"]), options["job"]))
        return
    console = plain_console()
    if not console.is_terminal and "COLUMNS" not in process_environment():
        console = plain_console(width=_LOG_WIDTH)  # a log has no width: break no table at 80 columns
    # The environment of a trainer must not make a drill of its job.
    given = {context.get_parameter_source(name) for name in ("lighthouse", "job")}
    drill_job = _drill_running if ParameterSource.COMMANDLINE in given else _drill_started
    raise SystemExit(drill_job(command, options, console))


def _drill_started(command: tuple[str, ...], options: dict[str, Any], console: Console) -> int:
    """Drill a job that is started for it; return the exit code. Raises FabricError."""
    job = JobOptions(
        out=options["out"],
        command=command,
        replicas=options["replicas"],
        lighthouses=options["lighthouses"],
        store_members=options["store_members"],
        may_lose=options["yes_lose_it"],
        environment=other_environment(),
    )
    if options["lists"]:
        _show_list(job, console)
        return 0
    _check_job(job, may_lose=options["yes_lose_it"])
    schedule = _schedule(options, job.names, job.needs_met())

    def run(folder: Path) -> DrillRecord:
        own = replace(job, out=folder, faults=frozenset(fault.fault for fault in schedule.faults))
        return DrillRun(own, schedule, partial(_say, console)).run()

    words = [f"--replicas {job.replicas}", f"--lighthouses {job.lighthouses}"]
    words += [f"--store-members {job.store_members}"] if job.store_members else []
    why = "every process of the drill has been ended."
    return _judged(run, schedule, options, console, words, ["--", *command], why)


def _drill_running(command: tuple[str, ...], options: dict[str, Any], console: Console) -> int:
    """Drill a running job; return the exit code. Raises FabricError."""
    named = lighthouses_of(options["lighthouse"], options["job"], options["token_file"], needs_job=True)
    client = structs.replace(named, signs=True)
    if command:
        raise ConfigError("--lighthouse and --job drill a running job: leave the training command away")
    running = RunningJob(client, partial(_say, console))
    names, met = tuple(sorted(running.replicas())), running.needs_met()
    if options["lists"]:
        _show_faults(f"Faults, for the running job {client.job}", met, console)
        return 0
    if not names:
        raise Refused(
            f"no trainer of job {client.job} allows a drill: start its trainers with FABRIC_DRILL=KEY-FILE, "
            "or with FABRIC_DRILL=1 and TLS"
        )
    schedule = _schedule(options, names, met)

    def run(folder: Path) -> DrillRecord:
        return running.drill(
            schedule,
            operator_name(),
            options["why"],
            may_lose=options["yes_lose_it"],
            journals=options["journals"],
        )

    words = [f"--lighthouse {options['lighthouse']}", f"--job {client.job}"]
    why = "the lighthouse undoes the faults within ten seconds."
    return _judged(run, schedule, options, console, words, [], why)


def _judged(
    run: Callable[[Path], DrillRecord],
    schedule: DrillSchedule,
    options: dict[str, Any],
    console: Console,
    words: Sequence[str],
    command: Sequence[str],
    interrupted: str,
) -> int:
    """Run a drill in its folder, judge it, and write the reports; return the exit code.

    ``words`` and ``command`` begin and end the command line that plays the same faults again, as far as real
    processes allow. ``interrupted``: the sentence for Ctrl-C.
    """
    expect = options["expect"] or schedule.expect
    for text in expect:
        parse_expectation(text)
    interrupt_at_sigterm()
    line = ["fabric drill", *words, schedule.origin, *(f"--expect '{text}'" for text in expect), *command]
    try:
        with claimed(options["out"], "drill", _FILES) as folder:
            verdict = judge_drill(run(folder), expect)
            _report(verdict, folder, " ".join(line), console)
    except KeyboardInterrupt:
        click.echo(f"Interrupted; {interrupted}", err=True)
        return 130
    return 0 if verdict.holds else 1


def _report(verdict: DrillVerdict, folder: Path, line: str, console: Console) -> None:
    """Write the reports into ``folder``, and print the tables. ``line`` repeats the drill."""
    write_reports(verdict, folder, line, f"{'The job held' if verdict.holds else 'The job did not hold'}.")
    for table in (fault_table(verdict), kind_table(verdict), expectation_table(verdict)):
        print_table(console, table.title, table.head, table.rows)
    for sentence in (*verdict.mistakes, *verdict.broken, *verdict.disagreements):
        console.print(printable(sentence), style="red", markup=False)
    for sentence in verdict.unseen:
        _say(console, f"Not seen: {sentence}")
    _say(console, f"Report: {folder / 'report.html'}")
    if not verdict.holds:
        _say(console, f"Repeat it: {line}")


def _schedule(options: dict[str, Any], names: Sequence[str], met: Collection[FaultNeed]) -> DrillSchedule:
    """Return the schedule that the options ask for, checked against the job. Raises ConfigError."""
    plan, faults, drawn = options["plan"], options["faults"], options["drawn"]
    if sum((plan is not None, bool(faults), drawn is not None)) > 1:
        raise ConfigError("--plan, --fault and --random contradict each other: give one of them")
    if plan is not None:
        schedule = read_plan(plan)
    elif faults:
        origin = " ".join(f"--fault '{text}'" for text in faults)
        schedule = DrillSchedule(tuple(parse_fault(text, names) for text in faults), origin=origin)
    else:
        schedule = random_schedule(drawn or "1", names, met)
    check_schedule(schedule, names, met)
    return schedule


def _check_job(job: JobOptions, *, may_lose: bool) -> None:
    """Raise ConfigError for a job that cannot be started, or that a drill would end."""
    for name, value, most in (
        ("--replicas", job.replicas, MAX_REPLICAS),
        ("--lighthouses", job.lighthouses, 9),
        ("--store-members", job.store_members + 1, 10),
    ):
        if not 1 <= value <= most:
            raise ConfigError(f"{name} is out of range: give at most {most - (name == '--store-members')}")
    if job.replicas == 1 and not may_lose:
        raise ConfigError(
            "a job of one replica does not survive a drill: give --replicas 2 or more, or --yes-lose-it"
        )
    job.check()


def _show_list(job: JobOptions, console: Console) -> None:
    title = f"Faults, for a job of {job.replicas} replicas that the drill starts"
    _show_faults(title, job.needs_met(), console)
    defaults = {parse_expectation(text).measure: text for text in DEFAULTS}
    measures = tuple(
        (name.replace("_", "-"), unit.value, meaning, defaults.get(name, "-"))
        for name, (unit, meaning) in MEASURES.items()
    )
    print_table(console, "Expectations", ("measure", "unit", "meaning", "default"), measures)


def _show_faults(title: str, met: Collection[FaultNeed], console: Console) -> None:
    rows = tuple(
        (kind.name, kind.does, kind.seen, kind.undone, obstacle(kind, met) or "yes")
        for kind in FAULTS.values()
    )
    print_table(console, title, ("fault", "does", "seen by", "undone by", "possible here"), rows)


def _say(console: Console, sentence: str) -> None:
    console.print(printable(sentence), markup=False, soft_wrap=True, highlight=False)
