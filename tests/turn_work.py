"""Counts the work of each turn of an event loop, because a loaded machine is slow.

A quiet machine does a million bytecodes in some 15 milliseconds, and encodes as many characters of JSON.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest

MOST_BYTECODES = 3_000_000


@dataclass
class Count:
    """The bytecodes of the turn that runs, and the most in a turn."""

    now: int = 0
    most: int = 0


@contextmanager
def counted() -> Iterator[Count]:
    """Count the bytecodes in each turn of the loop."""
    count, before, run = Count(), sys.gettrace(), asyncio.Handle._run

    def each(frame: FrameType, kind: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count.now += kind == "opcode"
        return each

    def turn(handle: asyncio.Handle) -> None:
        count.now = 0
        run(handle)
        count.most = max(count.most, count.now)

    asyncio.Handle._run = turn
    sys.settrace(each)
    try:
        yield count
    finally:
        sys.settrace(before)
        asyncio.Handle._run = run


@contextmanager
def json_counted(monkeypatch: pytest.MonkeyPatch, count: Count) -> Iterator[None]:
    """Count each character that a turn encodes as a bytecode, which takes about as long."""
    dumps = json.dumps

    def counting(*args: Any, **options: Any) -> str:
        text = dumps(*args, **options)
        count.now += len(text)
        return text

    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", counting)
        yield
