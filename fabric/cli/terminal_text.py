"""Prints text of other processes on a terminal without its control characters.

Names of tensors, reasons and addresses come from other processes, some of them not trusted. A control
character in them could hide a line, or forge one.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fabric.model import printable


def all_printable(value: Any) -> Any:
    """Return the same JSON value, with every text in it made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [all_printable(each) for each in value]
    if isinstance(value, dict):
        return {printable(str(key)): all_printable(each) for key, each in value.items()}
    return value


def print_table(console: Console, title: str, head: Iterable[str], rows: Sequence[Iterable[str]]) -> None:
    """Print a table of text; one without rows is left out."""
    if not rows:
        return
    table = Table(*head, title=title or None, title_justify="left")
    for row in rows:
        table.add_row(*map(printable, row))
    console.print(table)


def plain_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a terminal that prints brackets as they are: text of others must not become markup."""
    return Console(stderr=stderr, width=width, markup=False, emoji=False)
