"""``fabric run``: starts a training script without slowing replicas that train on this host."""

import functools
import gc
import importlib
import json
import math
import runpy
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import click

from fabric.errors import FabricError
from fabric.exit_codes import DEVICE_FAILED, FAILED
from fabric.runtime.config import refuse_unknown_variables, settings
from fabric.runtime.priority import IDLE, LowPriorityRunner, run_low_priority
from fabric.runtime.process_environment import (
    LAUNCH_MARK,
    add_to_environment,
    process_environment,
    take_standby_socket,
)

# The longest time that a start waits for a lighthouse's status of the job.
_LOOK_S = 2.0
ADOPT = "--adopt"
STANDBY_NAME = "fabric-standby"
_MAX_WORD = 1 << 16  # bytes of what a launcher tells a standby
_INTERRUPTED = 130  # as a shell shows a program that Ctrl-C has ended


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--adopt", is_flag=True, help="SCRIPT is plain PyTorch: adopt its loop.")
@click.argument("script", metavar="SCRIPT | -m MODULE", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: str, arguments: tuple[str, ...], adopt: bool) -> None:
    """Run a training SCRIPT (with -m: a module) as python would, with torch imported at low priority before.

    Where several replicas share a host, a replica that starts again takes no processor time from the steps of
    the others. Priority is that of the import alone: the script itself runs as ever.
    """
    run_program([*([ADOPT] if adopt else []), script, *arguments])


def names_a_program(words: list[str]) -> bool:
    """Whether ``words``, after ``--adopt``, begin with an existing script, or ``-m`` and a module's name."""
    words = words[words[:1] == [ADOPT] :]
    return Path(*words[:1]).is_file() or (words[:1] == ["-m"] and len(words) > 1)


def run_program(words: list[str]) -> None:
    """Run the script ``words[0]``, or the module after ``-m``, with the other words as its arguments. Its
    exceptions pass through. ``--adopt`` may come first."""
    adopts, words = words[:1] == [ADOPT], words[words[:1] == [ADOPT] :]
    if (standby := take_standby_socket()) is not None:
        _stand_by(standby)
    try:
        refuse_unknown_variables()
        failed = why_refused()
    except FabricError as error:
        failed = str(error)
    if failed:
        sys.stderr.write(f"fabric: {failed}\n")
        raise SystemExit(FAILED)
    try:
        if standby is None:
            _import()
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
    try:
        if adopts:
            adoption = importlib.import_module("fabric.integrations.adopt.adoption")
            adoption.run_adopted(functools.partial(_run, words))
        else:
            _run_launched(words)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            # An adapter that would leave the job in order at the interpreter's end must know of the code.
            excepthook = sys.modules.get("fabric.client.process.excepthook")
            for watch in list(excepthook.on_uncaught) if excepthook is not None else ():
                watch(leaving)
        raise
    except Exception as error:
        # After ``attach`` the session's own hook does the same as this code.
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(error, torch.AcceleratorError):
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(DEVICE_FAILED) from None


def _run_launched(words: list[str]) -> None:
    """Run the script. If `fabric launch` started this process, a training without a session is refused."""
    environment = process_environment()
    if LAUNCH_MARK not in environment or environment.get("FABRIC_DISABLE", "0") not in ("", "0"):
        _run(words)
        return
    torch = importlib.import_module("torch")
    attach = importlib.import_module("fabric.client.attach")
    by_hand = importlib.import_module("fabric.client.loop.hand_updates").HandUpdates()
    backward = torch.autograd.backward

    def has_session() -> bool:
        return attach.has_begun or any(name.startswith("fabric.integrations.") for name in sys.modules)

    def check(*_: object) -> None:
        if has_session():
            return
        sys.stderr.write(
            "fabric: the script updates its model and has not called fabric.client.attach, so each replica "
            "would train a model of its own: call it before the first update, or launch with --adopt auto\n"
        )
        raise SystemExit(FAILED)

    @functools.wraps(backward)
    def watched(tensors: Any, *arguments: Any, **named: Any) -> None:
        if not has_session():
            if by_hand.have_begun():
                check()
            by_hand.note(tensors)
        backward(tensors, *arguments, **named)

    importlib.import_module("torch.optim.optimizer").register_optimizer_step_pre_hook(check)
    torch.autograd.backward = watched
    _run(words)


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        _import_first_from(Path.cwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = words
    _import_first_from(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


def _import_first_from(folder: Path) -> None:
    """Let imports look into ``folder`` first, in the place of the folder of this command."""
    sys.path[: 0 if sys.flags.safe_path else 1] = [str(folder)]


def why_refused() -> str:
    """Return the sentence of a failed job, which refuses new processes, or an empty string.

    Launchers restart a trainer that ends with exit code 1, and each import of torch would take seconds. If no
    lighthouse answers in time, ``attach`` reports the failed job.
    """
    answers: list[str] = []
    looking = threading.Thread(target=lambda: answers.append(_ask()), name="fabric-look", daemon=True)
    looking.start()
    looking.join(_LOOK_S)
    return answers[0] if answers else ""


def _ask() -> str:
    try:
        chosen = settings()
        if chosen.disable:
            return ""
        # Import this module here, because a script without services does not need it.
        lighthouses = importlib.import_module("fabric.runtime.http.lighthouse_client")
        job = lighthouses.Lighthouses(chosen.lighthouse, chosen.job, chosen.token.decode(), chosen.tls)
        why = job.ask(job.path()).get("failed", "")
    except (FabricError, AttributeError):
        return ""  # impossible settings, or an unknown job: ``attach`` reports them
    if not why:
        return ""
    return (
        f"{chosen.replica}: job {chosen.job} has failed: {why}; when that is mended say "
        f"`fabric retry --job {chosen.job} --why ...` and start the replicas again"
    )


def _import(at_low_priority: LowPriorityRunner = run_low_priority) -> None:
    """Import the modules that take most of a trainer's first seconds."""
    # Numpy starts threads when it is imported, and numpy's threads keep the priority that they start with.
    importlib.import_module("numpy")
    gc.disable()  # nearly all objects of an import stay: the collector would take a fifth of the time
    for name in ("torch", "fabric.client"):
        at_low_priority(functools.partial(importlib.import_module, name))
    torch = importlib.import_module("torch")
    # A process's first optimizer imports torch's compiler, which takes as long as torch itself.
    at_low_priority(lambda: torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.1))
    # Some 300,000 objects: the garbage collector and the searches of all living objects need not see them.
    gc.freeze()
    gc.enable()


def _stand_by(descriptor: int) -> None:
    """Import what every script needs, in processor time that nobody wants; return when this is a rank.

    ``descriptor``: the socket to the launcher, which sends the rank's own variables. The launcher's end ends
    this process.
    """
    _import(LowPriorityRunner(IDLE, math.inf))
    shown = Path("/proc/self/comm")  # the name that tools such as ps and top show
    name = shown.read_text().strip()
    with socket.socket(fileno=descriptor) as launcher:
        shown.write_text(STANDBY_NAME)
        launcher.send(b"ready")
        word = launcher.recv(_MAX_WORD)
        if not word:
            raise SystemExit
        shown.write_text(name)
        add_to_environment(json.loads(word))
        launcher.send(b"begins")
