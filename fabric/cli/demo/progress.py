"""Show the demo while it runs: a live table in a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fabric.drill.run.journal_watch import WatchedReplica

_STYLES = {"training": "green", "catching up": "yellow", "killed": "bold red", "finished": "dim"}


class DemoProgress:
    """A context manager around the run; ``say`` adds a line, ``update`` redraws."""

    def __init__(self, console: Console, steps: int, views: Mapping[str, WatchedReplica]) -> None:
        self._console, self._steps, self._views = console, steps, views
        self._began = time.monotonic()
        self._told = 0
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "DemoProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, *lines: str) -> None:
        """Print one line per sentence; the first line shows the seconds since the start."""
        for index, line in enumerate(lines):
            stamp = f"{time.monotonic() - self._began:6.1f} s  " if index == 0 else " " * 10
            self._console.print(Text(stamp + line), soft_wrap=True)

    def update(self) -> None:
        """Show every replica's phase and step."""
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
            return
        done = max((view.step for view in self._views.values()), default=0)
        # Where the output is a log, it gets one line for every tenth of the run.
        if done * 10 // self._steps > self._told:
            self._told = done * 10 // self._steps
            self.say(f"step {done} of {self._steps}: {_plain(list(self._views.values()))}")

    def _picture(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for name in ("replica", "phase", "step", "epoch", "loss", "step time"):
            table.add_column(name, min_width=9)
        for view in self._views.values():
            table.add_row(
                view.replica,
                Text(view.phase, style=_STYLES.get(view.phase, "")),
                str(view.step),
                str(view.epoch),
                "" if view.loss is None else f"{view.loss:.4f}",
                "" if view.step_s is None else f"{view.step_s:.3f} s",
            )
        done = max((view.step for view in self._views.values()), default=0)
        return Group(table, ProgressBar(total=self._steps, completed=done, width=60))


def _plain(views: Sequence[WatchedReplica]) -> str:
    # A replica that was killed or is behind shows the loss of an older step.
    newest = max((view for view in views if view.step), key=lambda view: view.step, default=None)
    loss = f"loss {newest.loss:.4f}, " if newest is not None and newest.loss is not None else ""
    return loss + ", ".join(f"{view.replica} {view.phase} ({view.step})" for view in views)
