"""Each outcome of a write or read of a record becomes the right event for the core."""

import asyncio
from types import SimpleNamespace

import pytest
from protocol.makers import record_of

from fabric.errors import ProtocolError, StoreIndefinite, StoreUnavailable
from fabric.lighthouse.jobs.job import RecordTasks
from fabric.protocol.messages import leader_events as io
from fabric.runtime.tasks import Tasks

ASKER = object()


class FakeShell:
    """A job's shell that records events; ``asker`` is its present driver."""

    name = "job"

    def __init__(self) -> None:
        self.asker: object = ASKER
        self.events: list[io.Event] = []
        self.notes: list[tuple[str, str, str]] = []

    def note(self, kind: str, about: str, why: str) -> None:
        self.notes.append((kind, about, why))

    def answer(self, asker: object, event: io.Event) -> None:
        if self.is_asked_by(asker):
            self.events.append(event)

    def is_asked_by(self, asker: object) -> bool:
        return asker is self.asker


class FakeStored:
    """A record whose reads and writes have these outcomes in order."""

    def __init__(self, *outcomes: object) -> None:
        self.outcomes = list(outcomes)

    async def write(self, _record: object) -> bool:
        return self._next()

    async def read(self) -> object:
        return self._next()

    def _next(self):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class FakeTerm:
    def __init__(self, holds: bool = True) -> None:
        self.is_over, self.reasons, self._holds = False, [], holds

    def holds(self) -> bool:
        return self._holds

    def resign(self, reason: str) -> None:
        self.is_over = True
        self.reasons.append(reason)


async def outcome(order: str, *outcomes: object, term: FakeTerm | None = None) -> FakeShell:
    """Return the shell's events after one write or read."""
    shell, died = FakeShell(), []
    tasks = Tasks(lambda name, error: died.append((name, error)))
    context = SimpleNamespace(tasks=tasks, term=term or FakeTerm())
    records = RecordTasks(shell, context, FakeStored(*outcomes))
    if order == "write":
        records.write(record_of("a"), ASKER)
    else:
        records.read(ASKER)
    for _ in range(200):
        if shell.events or context.term.is_over:
            break
        await asyncio.sleep(0.005)
    await tasks.close()
    assert not died
    return shell


@pytest.mark.parametrize(
    ("result", "event", "why"),
    [
        (True, io.RecordWritten(record_of("a").nonce), ""),
        (False, io.WriteFailed(record_of("a").nonce, definite=True), "the store's guards refused it"),
        (StoreUnavailable("away"), io.WriteFailed(record_of("a").nonce, definite=True), "away"),
        (StoreIndefinite("cut"), io.WriteFailed(record_of("a").nonce, definite=False), "cut"),
    ],
)
async def test_a_write_ends_in_the_event_of_its_outcome(result, event, why):
    shell = await outcome("write", result)
    assert shell.events == [event]
    assert shell.notes == ([("write failed", "", f"epoch {record_of('a').epoch}: {why}")] if why else [])


async def test_a_read_asks_until_the_store_answers():
    record = record_of("a")
    shell = await outcome("read", StoreUnavailable("away"), StoreUnavailable("away"), record)
    assert shell.events == [io.RecordRead(record)]


async def test_a_record_that_cannot_be_understood_ends_the_term():
    term = FakeTerm()
    await outcome("read", ProtocolError("no record"), term=term)
    assert term.reasons == ["job job: no record"]


async def test_nothing_is_written_after_the_lease():
    shell, term = FakeShell(), FakeTerm(holds=False)
    tasks = Tasks(lambda *_: None)
    stored = FakeStored(True)
    RecordTasks(shell, SimpleNamespace(tasks=tasks, term=term), stored).write(record_of("a"), ASKER)
    await asyncio.sleep(0.01)
    await tasks.close()
    assert not shell.events and stored.outcomes == [True]
