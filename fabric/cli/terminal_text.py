"""Prints text of other processes on a terminal without its control characters.

Names of tensors, reasons and addresses come from other processes, some of them not trusted. A control
character in them could hide a line, or forge one.
"""

from typing import Any

from rich.console import Console


def printable(text: str) -> str:
    """``text`` in one line, with a question mark for each character that is not printable."""
    return "".join(c if c.isprintable() else "?" for c in text)


def all_printable(value: Any) -> Any:
    """Return the same JSON value, with every text in it made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [all_printable(each) for each in value]
    if isinstance(value, dict):
        return {printable(str(key)): all_printable(each) for key, each in value.items()}
    return value


def plain_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a terminal that prints brackets as they are: text of others must not become markup."""
    return Console(stderr=stderr, width=width, markup=False, emoji=False)
