"""The common part of all benchmarks: interleaved rounds, medians of paired ratios, a table, a last line of
JSON.

A benchmark takes no arguments, prints what it ran on, a table for people, and last one JSON object of plain
numbers. Sides are measured in the same run, turn by turn, so that a machine that gets slower gets slower for
both; a figure is the median over rounds of the ratio within a round. A benchmark reports all its figures,
also those that miss their aims.
"""

import argparse
import ctypes
import importlib
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from fabric.runtime import guarded_processes

MB = 2**20
ROUNDS = 9
WARM_UP = 2
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Side = Callable[[], float | None]


def interleave(
    sides: Mapping[str, Side], rounds: int = ROUNDS, warm_up: int = WARM_UP
) -> dict[str, list[float]]:
    """Measure every side once per round, in an order that turns with the round.

    A side returns its own measure (seconds), or None if the call is to be timed. Returns the measures by
    side, one per round, without those of the warm-up.
    """
    names = list(sides)
    measured: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            began = time.perf_counter()
            own = sides[name]()
            seconds = time.perf_counter() - began if own is None else own
            if number >= 0:
                measured[name].append(seconds)
    return measured


def paired(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median of the ratios within each round, rounded to four digits after the point."""
    if not numerator or len(numerator) != len(denominator):
        raise ValueError("both sides need one measure per round")
    return round(statistics.median(a / b for a, b in zip(numerator, denominator, strict=True)), 4)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value at ``share`` (0..1) of the sorted values: always an observed value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1 if share > 0 else 0)]


def describe(values: Sequence[float], unit: str = "ms", scale: float = 1000.0) -> str:
    """``median (lowest-highest) unit`` for a table's cell."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle * scale:.3g} ({low * scale:.3g}-{high * scale:.3g}) {unit}"


def say(text: str) -> None:
    """Print one line for people at once."""
    print(text, flush=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under their columns, aligned."""
    cells = [[str(x) for x in row] for row in [columns, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    say(f"\n{title}")
    for number, row in enumerate(cells):
        say(
            "  ".join(
                x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))
            )
        )
        if number == 0:
            say("  ".join("-" * w for w in widths))


def verdict(
    what: str, value: float | None, *, at_most: float | None = None, at_least: float | None = None
) -> bool:
    """Print whether a figure meets its aim; return the answer. A figure of None was not measured and misses
    its aim.
    """
    bound = f"at most {at_most:g}" if at_most is not None else f"at least {at_least:g}"
    if value is None:
        say(f"MISSED  {what}: not measured, see above ({bound})")
        return False
    met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
    say(f"{'met   ' if met else 'MISSED'}  {what}: {value:g} ({bound})")
    return met


def no_options(description: str | None) -> None:
    """Answer ``--help``, and refuse every other argument: without this, a typing error starts a long run."""
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=description, formatter_class=raw).parse_args()


_guard: "subprocess.Popen[bytes] | None" = None


def begin() -> None:
    """Begin a benchmark: print the machine, and leave nothing behind at the end."""
    leave_nothing()
    # The processes of a user load compiled modules: without them each would compile fabric, for 0.25 s.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    say(machine())


def leave_nothing() -> None:
    """All that this process starts from now on ends with it, and so does what those start: checkpoint servers
    outlive their trainers on purpose. A forked child, which keeps this process's own environment, is not
    found so: see ``die_with_parent``."""
    global _guard
    # Exit at SIGTERM: by default the signal ends Python without leaving ``with`` blocks, and folders would
    # stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    mark = uuid.uuid4().hex
    # Start the guard before the mark is set, or the guard would kill itself.
    _guard = guarded_processes.guard(mark)
    os.environ[guarded_processes.MARK] = mark


def die_with_parent() -> None:
    """For a child that was forked from the main thread: SIGKILL when its parent ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before this process asked to die with it
        os._exit(1)


def machine() -> str:
    """Return the first line to print: the machine, its load and the time."""
    try:
        text = Path("/proc/cpuinfo").read_text()
        model = next(
            (x.split(":", 1)[1].strip() for x in text.splitlines() if x.startswith("model name")), ""
        )
    except OSError:
        model = ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    torch = sys.modules.get("torch")
    versions = f"Python {platform.python_version()}" + (f", torch {torch.__version__}" if torch else "")
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return (
        f"{when} UTC; {model or platform.machine()}, {cores} cores, {memory:.0f} GiB; "
        f"Linux {platform.release()}; {versions}; load before the start {load:.2f}"
    )


def need(module: str, for_what: str) -> ModuleType:
    """Import an optional dependency, or end with exit code 2 and one sentence."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        absent(f"{for_what} needs the Python package {module!r}, which cannot be imported here ({error})")


def absent(sentence: str) -> NoReturn:
    """End because something optional is not here: exit code 2, no figures."""
    sys.stderr.write(f"{Path(sys.argv[0]).name}: {sentence}\n")
    raise SystemExit(2)


def finish(result: Mapping[str, Any]) -> None:
    """Print the JSON object of finite numbers that ends a benchmark's output; None: a figure could not be
    measured.
    """
    _check(result, "")
    say("")
    say(json.dumps(result))


def _check(value: object, where: str) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check(inner, f"{where}/{key}")
    elif value is None:
        return
    elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where} of the result is {value!r}, not a finite number")


def update_past_hooks(optimizer: Any) -> None:
    """Make a step of a peer's optimizer in the process of a session, which refuses one it was not given."""
    type(optimizer).step.__wrapped__(optimizer)  # torch wraps the step of each class in its hooks
