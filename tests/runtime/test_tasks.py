"""Background tasks: none dies unnoticed, and none outlives its owner."""

import asyncio

from fabric.runtime.tasks import Tasks


class ReportedDeaths(list):
    """Collects what is reported; ``any`` is set with the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.any = asyncio.Event()

    def __call__(self, name: str, error: BaseException) -> None:
        self.append((name, str(error)))
        self.any.set()


async def test_a_death_is_reported_with_its_name(caplog):
    deaths = ReportedDeaths()
    tasks = Tasks(deaths)

    async def work() -> None:
        raise RuntimeError("why")

    tasks.start("worker", work())
    await asyncio.wait_for(deaths.any.wait(), 10)
    assert deaths == [("worker", "why")]
    assert "the task worker died" in caplog.text and "RuntimeError" in caplog.text
    await tasks.close()


async def test_a_normal_end_and_a_cancellation_are_no_deaths():
    deaths = ReportedDeaths()
    tasks = Tasks(deaths)
    done = asyncio.Event()

    async def work() -> None:
        done.set()

    tasks.start("short", work())
    tasks.start("long", asyncio.Event().wait())
    await asyncio.wait_for(done.wait(), 10)
    await tasks.close()
    assert deaths == []


async def test_close_waits_for_the_clean_up_and_starts_nothing_more():
    deaths = ReportedDeaths()
    tasks = Tasks(deaths)
    begun = asyncio.Event()
    log = []

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            log.append("cleaned up")

    tasks.start("worker", work())
    await begun.wait()
    await tasks.close()
    assert log == ["cleaned up"]

    async def late() -> None:
        log.append("late")

    tasks.start("late", late())
    await asyncio.sleep(0)
    assert log == ["cleaned up"] and deaths == []


async def test_a_task_that_dies_while_being_closed_is_reported():
    deaths = ReportedDeaths()
    tasks = Tasks(deaths)
    begun = asyncio.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("on the way out")

    tasks.start("worker", work())
    await begun.wait()
    await tasks.close()
    assert deaths == [("worker", "on the way out")]


async def test_a_task_that_loses_a_cancellation_is_cancelled_again(monkeypatch):
    monkeypatch.setattr("fabric.runtime.tasks._CANCEL_AGAIN_S", 0.01)
    tasks = Tasks(ReportedDeaths())
    begun = asyncio.Event()
    lost = []

    async def work() -> None:
        while True:
            try:
                begun.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost.append(1)
                if len(lost) == 2:
                    raise

    tasks.start("stubborn", work())
    await begun.wait()
    async with asyncio.timeout(10):
        await tasks.close()
    assert len(lost) == 2


async def test_closing_without_tasks_returns():
    await Tasks(ReportedDeaths()).close()


async def test_finished_tasks_are_forgotten():
    tasks = Tasks(ReportedDeaths())
    for i in range(50):
        tasks.start(str(i), asyncio.sleep(0))
    assert len(tasks._running) == 50
    await asyncio.wait(set(tasks._running))
    await asyncio.sleep(0)  # done callbacks run one turn later
    assert not tasks._running
