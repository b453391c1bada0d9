"""Prints text of other processes on a terminal without its control characters.

Names of tensors, reasons and addresses come from other processes, some of them not trusted. A control
character in them could hide a line, or forge one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fabric.errors import FabricError, ProtocolError


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


@contextmanager
def understood(whom: str) -> Iterator[None]:
    """A context for reading an answer of ``whom``. Raises ProtocolError where its JSON has another shape."""
    try:
        yield
    except FabricError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ProtocolError(
            f"what {whom} answered cannot be understood ({type(error).__name__}: {error}): check the address,"
            " and that a lighthouse of this version runs there"
        ) from error
