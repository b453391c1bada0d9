"""``fabric local``: a whole job on this host, in one command.

Exit codes: 0 every replica finished, 1 a replica ended otherwise, 130 interrupted.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import click

from fabric.cli.launch.command import check_script
from fabric.cli.launch.devices import visible_devices
from fabric.cli.lighthouse_options import out_option, replicas_option
from fabric.errors import ConfigError
from fabric.runtime.config import given_text
from fabric.runtime.local_job import MAX_REPLICAS, POLL_S, LocalJob, claimed, interrupt_at_sigterm
from fabric.runtime.process_environment import process_environment

# The job's own lighthouse and launchers need these, so a value of the user would be lost without a word.
_OWN = (
    *("lighthouse", "token_file", "replica", "replicas", "disable"),
    *("journal", "run_dir", "bind"),
)
_READ_BYTES = 1 << 16


@click.command("local", context_settings={"allow_interspersed_args": False})
@replicas_option(default=3, type=click.IntRange(1, MAX_REPLICAS))
@click.option("--ranks", default=1, show_default=True, type=click.IntRange(1), help="Ranks of each replica.")
@out_option(default="local-out")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name.")
@click.option("--no-python", is_flag=True, help="SCRIPT is a program, and not Python's.")
@click.option("--adopt", type=click.Choice(["auto"]), help="SCRIPT is plain PyTorch: adopt its loop.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def local(
    replicas: int,
    ranks: int,
    out: Path,
    module: bool,
    no_python: bool,
    adopt: str | None,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Train SCRIPT with several replicas on this host, with a lighthouse of their own.

    The output of each replica appears with the replica's name before each line. A process that is killed
    starts again and joins. Example: fabric local --replicas 3 --adopt auto train.py --epochs 2
    """
    if given := [name for name in _OWN if given_text(name)]:
        raise ConfigError(
            f"fabric local starts a job of its own and would not use FABRIC_{given[0].upper()}: unset it, or "
            "start the replicas with fabric launch"
        )
    check_script(script, module=module, no_python=no_python)
    words = ["--ranks", str(ranks), *(["-m"] if module else []), *(["--no-python"] if no_python else [])]
    words += [*(["--adopt", adopt] if adopt else []), script, *arguments]
    interrupt_at_sigterm()
    try:
        with claimed(out, "local") as folder:
            raise SystemExit(_train(folder, replicas, ranks, words))
    except KeyboardInterrupt:
        click.echo("Interrupted; every process of the job has been ended.", err=True)
        raise SystemExit(130) from None


def _train(folder: Path, replicas: int, ranks: int, words: Sequence[str]) -> int:
    names = [f"r{number}" for number in range(replicas)]
    environment = process_environment()
    name = environment.get("FABRIC_JOB", "local")
    threads = max(1, (os.cpu_count() or 1) // (replicas * ranks))
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    devices = visible_devices(environment)
    with LocalJob(folder, name, names, environment) as job:
        job.start_lighthouse()
        for sentence in job.ways_in():
            click.echo(sentence)
        for number, replica in enumerate(names):
            job.start_replica(replica, words, _devices_of(number, replicas, devices))
        return _follow(job)


def _devices_of(number: int, replicas: int, devices: Sequence[str]) -> dict[str, str]:
    """Return the setting that gives replica ``number`` its part of the GPUs; with too few all share them."""
    each = len(devices) // replicas
    part = devices[number * each : (number + 1) * each] or devices
    return {"CUDA_VISIBLE_DEVICES": ",".join(part)} if part else {}


def _follow(job: LocalJob) -> int:
    """Print what the replicas write until all of them have ended; return the exit code."""
    outputs = {name: _Output(name, job.log(name)) for name in job.replicas}
    codes: dict[str, int] = {}
    while len(codes) < len(job.replicas):
        job.check("lighthouse")
        ended = {name: job.processes.exit_code(name) for name in job.replicas if name not in codes}
        for output in outputs.values():
            output.show()
        for name, code in ended.items():
            if code is not None:
                codes[name] = code
                click.echo(f"{name} ended with exit code {code}")
        time.sleep(POLL_S)
    return 1 if any(codes.values()) else 0


class _Output:
    """The lines of one replica's log, as they are written."""

    def __init__(self, name: str, log: Path) -> None:
        self._name, self._file = name, log.open("rb")
        self._pending = b""

    def show(self) -> None:
        """Print the lines that are complete by now."""
        while data := self._file.read(_READ_BYTES):
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                # A progress bar writes its states over each other: print the last one.
                click.echo(f"{self._name} | ".encode() + line.rstrip(b"\r").rpartition(b"\r")[2])
