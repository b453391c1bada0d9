"""``fabric launch``: its options, and the checks of them before a rank starts."""

import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from fabric.cli.launch.launcher import LaunchPlan, launch
from fabric.errors import ConfigError
from fabric.protocol.nodes import MAX_NODES, MAX_RANKS_OF_HOST, SPARE
from fabric.runtime import logs
from fabric.runtime.config import Settings, given_text, settings
from fabric.runtime.process_environment import own_program, process_environment
from fabric.runtime.rank_layout import MAX_RANKS, RankLayout, is_count, parse_layout

# Options that set a variable of the trainer's environment.
_VARIABLES = ("job", "replica", "replicas", "lighthouse", "token_file")


@click.command(name="launch", context_settings={"allow_interspersed_args": False})
@click.option(
    "--ranks",
    "--nproc-per-node",
    default="",
    help="Number of ranks: 4, or 1:4 for as many as this host has devices; else as the layout says, or 1.",
)
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    help="Layout of the ranks, such as tp=2 or ranks=4,layers=5+7; several by preference; FABRIC_LAYOUT.",
)
@click.option("--nodes", type=click.IntRange(1, MAX_NODES), default=1, help="Hosts of this replica: 1.")
@click.option(
    "--node",
    default="",
    help="This host's number (SLURM_NODEID, a pod's index), or spare: it takes a lost node's place.",
)
@click.option("--job", default="", help="Which job; FABRIC_JOB.")
@click.option("--replica", default="", help="Name of this replica; FABRIC_REPLICA.")
@click.option("--replicas", default="", help="How many the job starts with; FABRIC_REPLICAS.")
@click.option("--lighthouse", default="", help="URLs, separated by commas; FABRIC_LIGHTHOUSE.")
@click.option("--token-file", default="", help="File with the token; FABRIC_TOKEN_FILE.")
@click.option("--restarts", type=click.IntRange(min=0), help="Most restarts; default: any number.")
@click.option("--log-dir", type=click.Path(path_type=Path), help="Folder for a file of each rank's output.")
@click.option("--leave-file", type=click.Path(path_type=Path), help="If it exists, exit with 75, not 0.")
@click.option("--stop-s", default=30.0, help="From SIGTERM or Ctrl-C to SIGKILL, in seconds.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name.")
@click.option("--no-python", is_flag=True, help="SCRIPT is a program, and not Python's.")
@click.option("--adopt", type=click.Choice(["auto"]), help="SCRIPT is plain PyTorch: adopt its loop.")
@click.option("--no-check", is_flag=True, help="The script has the settings: do not check FABRIC_*.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch_command(script: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Start one replica's ranks on this host, and start them again where that helps.

    SCRIPT runs with ARGUMENTS in every rank, with the variables that torchrun sets. Exit codes of a rank: 0
    finished, 75 restart, 76 its device failed, 78 it cannot build the layout, 1 do not restart.
    """
    command = _command(script, arguments, module=options["module"], no_python=options["no_python"])
    if options["adopt"]:
        if options["no_python"]:
            raise ConfigError("--adopt is for Python scripts: leave --no-python away")
        at = command.index("run") + 1
        command = (*command[:at], "--adopt", *command[at:])
    given = {f"FABRIC_{name.upper()}": options[name] for name in _VARIABLES if options[name]}
    environment = {**process_environment(), **given}
    nodes = options["nodes"]
    node = _node_number(environment, options) if nodes > 1 or options["node"] == "spare" else 0
    seen = environment if node != SPARE else {"FABRIC_REPLICA": "spare-node", **environment}
    try:
        chosen = _checked_settings(seen, check=not options["no_check"])
    except ConfigError as error:
        # Name options in the place of variables that the user has not set.
        sentence = str(error)
        for name in (x for x in _VARIABLES if options[x] or not given_text(x)):
            sentence = re.sub(rf"\bFABRIC_{name.upper()}\b", f"--{name.replace('_', '-')}", sentence)
        raise ConfigError(sentence) from None
    if nodes > 1 and chosen.disable:
        raise ConfigError("--nodes needs a lighthouse, where the hosts meet: unset FABRIC_DISABLE")
    logs.set_up("launcher", chosen.log)
    logs.describe(job=chosen.job, replica=chosen.replica)
    layouts, log_dir = options["layouts"] or environment.get("FABRIC_LAYOUT", "").split(), options["log_dir"]
    if log_dir is not None:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--log-dir {log_dir} cannot be made ({error.strerror}): name another folder"
            ) from error
    plan = LaunchPlan(
        command=command,
        candidates=candidates(tuple(map(parse_layout, layouts)), _all_ranks(options["ranks"], nodes)),
        nodes=nodes,
        node=node,
        environment=environment,
        replica=chosen.replica or "replica",
        restarts=options["restarts"],
        log_dir=log_dir,
        leave_file=options["leave_file"],
        stop_s=options["stop_s"],
        has_standbys=not options["no_python"],
        has_lighthouse=not chosen.disable,
    )
    sys.exit(launch(plan))


def _node_number(environment: dict[str, str], options: dict[str, Any]) -> int:
    """Return this host's number in its replica, SPARE for a spare host. Raises ConfigError."""
    nodes, given = options["nodes"], options["node"]
    if given == "spare" and nodes == 1:
        raise ConfigError("--node spare is for replicas of several hosts: give their --nodes too")
    if given == "spare":
        return SPARE
    texts = [given] if given else [environment.get(x, "") for x in ("SLURM_NODEID", "JOB_COMPLETION_INDEX")]
    number = next((int(x) for x in texts if x.isascii() and x.isdecimal() and len(x) < 7), None)
    if number is None:
        wrong = f'--node is "{given[:80]}"' if given else f"--nodes {nodes} needs this host's number"
        raise ConfigError(f"{wrong}: give --node 0 to {nodes - 1}, or --node spare")
    if number >= nodes:
        raise ConfigError(f"--node {number} is not below --nodes {nodes}: give 0 to {nodes - 1}")
    return number


def _all_ranks(ranks: str, nodes: int) -> str:
    """Return how many ranks a replica has, if each of its hosts starts ``ranks``. Raises ConfigError."""
    if nodes == 1 or not ranks:
        return ranks if nodes == 1 else str(nodes)
    least, most = parse_ranks(ranks)
    if least != most or most > MAX_RANKS_OF_HOST:
        raise ConfigError(
            f"--ranks {ranks} with --nodes {nodes}: give one count up to {MAX_RANKS_OF_HOST}, the ranks of "
            "each host"
        )
    return str(most * nodes)


def parse_ranks(text: str) -> tuple[int, int]:
    """Return (least, most) of "4" or "1:4". Raises ConfigError."""
    parts = text.split(":")
    counts = [int(part) for part in parts if is_count(part, MAX_RANKS)]
    if len(parts) not in (1, 2) or len(counts) != len(parts) or counts[0] > counts[-1]:
        raise ConfigError(
            f'the number of ranks is "{text[:80]}": give a count up to {MAX_RANKS} such as 4, or a range '
            "such as 1:4"
        )
    return counts[0], counts[-1]


def candidates(layouts: tuple[RankLayout, ...], ranks: str) -> tuple[RankLayout, ...]:
    """Return every layout that a replica of ``ranks`` ("4" or "1:4", empty: not said) may have, the preferred
    one first: ``layouts`` in their order, each with as many ranks as possible. Raises ConfigError."""
    stated = [layout.ranks for layout in layouts if layout.ranks]
    least, most = parse_ranks(ranks) if ranks else (min(stated, default=1), max(stated, default=1))
    wanted = layouts or (RankLayout(),)
    options = [
        layout.over(count) for layout in wanted for count in range(most, least - 1, -1) if layout.fits(count)
    ]
    if not options:
        unit = math.gcd(*(layout.tensor_parallel * layout.stages for layout in wanted))
        raise ConfigError(
            f'no layout of "{" ".join(map(str, wanted))}" fits {ranks or most} ranks: give --ranks a '
            f"multiple of {unit}, or another --layout"
        )
    return tuple(dict.fromkeys(options))


def _checked_settings(environment: dict[str, str], *, check: bool) -> Settings:
    """Return the settings of every rank. Raises ConfigError, which ``attach`` would do seconds later."""
    # The launcher's option may name several layouts; a rank gets one of them.
    seen = {name: value for name, value in environment.items() if name != "FABRIC_LAYOUT"}
    if not check:
        seen["FABRIC_DISABLE"] = "1"  # without services few settings are required
    chosen = settings(seen)
    if not chosen.disable:
        _ = chosen.token
    return chosen


def _command(script: str, arguments: tuple[str, ...], *, module: bool, no_python: bool) -> tuple[str, ...]:
    """Return the command line of every rank. Raises ConfigError where the script does not exist."""
    check_script(script, module=module, no_python=no_python)
    if no_python:
        return (script, *arguments)
    # `fabric run` imports torch at low priority, and does not start a trainer in a job that has failed.
    fabric_run = own_program("fabric.cli.main", "run")
    return (*fabric_run, *(["-m"] if module else []), script, *arguments)


def check_script(script: str, *, module: bool, no_python: bool) -> None:
    """Raise ConfigError where the script or program does not exist."""
    if no_python and module:
        raise ConfigError("--no-python and --module contradict each other: leave one of them away")
    if no_python and shutil.which(script) is None:
        raise ConfigError(f"there is no program {script}: correct the command after --no-python")
    if not (no_python or module or Path(script).is_file()):
        raise ConfigError(
            f"there is no script {script} in {Path.cwd()}: correct its path, or say -m for a module"
        )
