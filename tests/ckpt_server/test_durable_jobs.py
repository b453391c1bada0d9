"""The checkpoint server starts one writer of durable checkpoints at a time, and never delays the trainer."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from ckpt_server.test_durable_format import manifest_for, objects
from ckpt_server.test_training_state import to_bytes
from server_support import TOKEN, alive

from fabric.ckpt_server.durable.reader import list_checkpoints
from fabric.ckpt_server.durable.storage import Storage
from fabric.ckpt_server.server.durable_jobs import DurableJobs
from fabric.ckpt_server.server.slots import SNAPSHOT, SlotTable, snapshot_content
from fabric.ckpt_server.state.training_state import capture
from fabric.ckpt_server.wire.channel_protocol import LOG_NAME, DurableJob
from fabric.errors import Refused

DEADLINE_S = 180.0


def hold(handle, slot: int, step: int) -> bytes:
    file = bytes(to_bytes(capture(objects(step), step)))
    handle.begin("snapshot", slot)
    handle.allocate("snapshot", slot, len(file))[:] = file
    handle.publish_snapshot(slot, manifest_for(file, step))
    return file


def persist(handle, url: str, step: int, incarnation: int = 1, **more: bool) -> None:
    handle.persist(DurableJob(url, "", "", incarnation, keep=3, generation=1, step=step, **more))


def steps(url: str) -> list[int]:
    return [c.state.step for c in list_checkpoints(Storage(url).at("job"), "job").complete]


def get(handle, path: str) -> str:
    connection = HTTPConnection(urlsplit(handle.url).netloc)
    connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def readers(handle, slot: int) -> int:
    slots = json.loads(get(handle, "/debug/state"))["slots"]
    return next(s["readers"] for s in slots if (s["kind"], s["slot"]) == (SNAPSHOT, slot))


def wait_for(condition: Callable[[], object], what: str) -> object:
    """Wait long, because a writer imports torch, which is slow on a loaded machine."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.02)
    return value


def writers(handle) -> list[int]:
    """Processes that the server has started."""
    found = Path(f"/proc/{handle.pid}/task/{handle.pid}/children").read_text().split()
    return [int(pid) for pid in found]


def niceness(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def has_begun(url: str, step: int) -> bool:
    """Whether a writer has made its folder, which it does after it has set its priority."""
    return any(name.startswith(f"step-{step:010}-") for name in Storage(url).at("job").names())


@pytest.fixture
def waiting(tmp_path, monkeypatch):
    """A file before whose appearance no writer creates its marker."""
    monkeypatch.setenv("FABRIC_TEST_POINTS", f"durable-marker=wait:{tmp_path}/go")
    return tmp_path / "go"


def test_checkpoints_are_written_one_at_a_time_and_the_newest_request_is_next(attach, waiting, tmp_path):
    url, handle = str(tmp_path / "durable"), attach()
    hold(handle, 0, 5)
    persist(handle, url, 5)
    for step in (6, 7):
        hold(handle, step, step)
        persist(handle, url, step)
    with pytest.raises(Refused, match="step 9 is not held"):
        persist(handle, url, 9)
    waiting.touch()
    wait_for(
        lambda: 'fabric_ckpt_durable_step{rank="0"} 7.0' in get(handle, "/metrics"), "step 7 in the metrics"
    )
    assert steps(url) == [5, 7], "what came between them is out of date by then"


def test_a_trainer_that_needs_the_memory_gets_it_and_the_checkpoint_is_given_up(attach, waiting, tmp_path):
    url, handle = str(tmp_path / "durable"), attach()
    hold(handle, 0, 5)
    persist(handle, url, 5)
    wait_for(lambda: readers(handle, 0), "the writer to read the slot")
    assert not handle.begin("snapshot", 0, unless_read=True), "while another slot will do, this one is spared"
    handle.begin("snapshot", 0)
    wait_for(
        lambda: 'fabric_ckpt_durable_failures_total{rank="0"} 1.0' in get(handle, "/metrics"),
        "the failure in the metrics",
    )
    assert steps(url) == [] and not writers(handle)
    hold(handle, 0, 6)


def test_a_required_checkpoint_whose_folder_is_missing_is_counted_as_a_failure(attach, tmp_path):
    url, handle = str(tmp_path / "durable"), attach()
    hold(handle, 0, 5)
    persist(handle, url, 5, required=True)
    wait_for(
        lambda: 'fabric_ckpt_durable_failures_total{rank="0"} 1.0' in get(handle, "/metrics"),
        "the failure in the metrics",
    )
    assert not (tmp_path / "durable").exists()


def test_the_last_checkpoint_is_written_when_storage_is_back_also_after_sigterm(attach, tmp_path):
    folder, handle = tmp_path / "durable", attach()
    folder.symlink_to(folder)  # each access fails, and no error says that it will go on failing
    hold(handle, 0, 5)
    persist(handle, str(folder), 5)
    wait_for(lambda: handle.durable_outcome()["error"], "a failed try")
    assert not handle.durable_outcome()["idle"]
    handle.finish(linger_s=0.0)
    os.kill(handle.pid, signal.SIGTERM)
    assert alive(handle.pid)
    folder.unlink()
    wait_for(lambda: steps(str(folder)) == [5], "the checkpoint")
    wait_for(lambda: not alive(handle.pid), "the server's end")


def test_an_urgent_checkpoint_takes_the_place_of_the_one_under_way(attach, waiting, tmp_path):
    url, handle = str(tmp_path / "durable"), attach()
    hold(handle, 0, 5)
    persist(handle, url, 5)
    (earlier,) = wait_for(lambda: has_begun(url, 5) and writers(handle), "the writer")
    assert niceness(earlier) > niceness(handle.pid), "it takes no time from a training step"
    hold(handle, 1, 6)
    persist(handle, url, 6, urgent=True)
    wait_for(lambda: not alive(earlier), "the end of the earlier writer")
    (urgent,) = wait_for(lambda: has_begun(url, 6) and writers(handle), "the urgent writer")
    assert niceness(urgent) == niceness(handle.pid), "only so it is done in time on a host that is busy"
    waiting.touch()
    wait_for(lambda: handle.durable_outcome()["step"] == 6, "the urgent checkpoint")
    assert steps(url) == [6]


def test_a_server_that_ends_lets_its_writer_finish_and_a_killed_server_ends_its_writer(
    attach, waiting, tmp_path
):
    url, handle = str(tmp_path / "durable"), attach()
    hold(handle, 0, 5)
    persist(handle, url, 5)
    handle.finish(linger_s=0.0)
    (writer,) = wait_for(lambda: writers(handle), "the writer")
    waiting.touch()
    wait_for(lambda: steps(url) == [5], "the checkpoint")
    wait_for(lambda: not alive(handle.pid), "the server's end")
    waiting.unlink()
    other = attach()
    hold(other, 0, 6)
    persist(other, url, 6)
    (writer,) = wait_for(lambda: writers(other), "the writer")
    os.kill(other.pid, signal.SIGKILL)
    wait_for(lambda: not alive(writer), "the writer's end")
    assert steps(url) == [5]


def test_sigint_ends_a_server_that_waits_for_its_writer_after_sigterm(attach, run_dir, waiting, tmp_path):
    """The storage of a writer may never answer."""
    url, handle = str(tmp_path / "durable"), attach()
    hold(handle, 0, 5)
    persist(handle, url, 5)
    (writer,) = wait_for(lambda: writers(handle), "the writer")
    os.kill(handle.pid, signal.SIGTERM)
    wait_for(lambda: "ends: signal SIGTERM" in (run_dir / LOG_NAME).read_text(), "SIGTERM")
    os.kill(handle.pid, signal.SIGINT)
    wait_for(lambda: not alive(handle.pid) and not alive(writer), "the ends of the server and its writer")
    assert not steps(url)


async def published(memory: SlotTable, step: int) -> None:
    """Slot 0 holds the snapshot of this step."""
    slot, file = memory.slot(SNAPSHOT, 0), bytes(to_bytes(capture(objects(step), step)))
    await slot.withdraw()
    region = await memory.allocate(slot, len(file))
    os.pwrite(region.fd, file, 0)
    memory.publish(slot, snapshot_content(manifest_for(file, step), region.view, "job", "http://here"))


@pytest.mark.parametrize("again", [False, True])
def test_a_writer_that_comes_after_its_snapshot_was_withdrawn_gets_no_other_state(
    tmp_path, monkeypatch, again
):
    start = asyncio.create_subprocess_exec
    started = []

    async def main() -> DurableJobs:
        memory = SlotTable()
        await published(memory, 3)
        dispatch = DurableJobs(memory)

        async def withdraw_first(*arguments, **options):
            await memory.slot(SNAPSHOT, 0).withdraw()
            if again:
                await published(memory, 4)
            started.append(await start("sleep", "600", **options))
            return started[-1]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", withdraw_first)
        dispatch.start(DurableJob(str(tmp_path), "job", "r0", 1, generation=1, step=3, keep=3))
        await dispatch.finish()
        memory.close()
        return dispatch

    dispatch = asyncio.run(main())
    assert dispatch.failures == 1 and "its memory was needed for another snapshot" in dispatch.error
    [process] = started
    assert process.returncode == -signal.SIGKILL and not list(tmp_path.iterdir())


FULL = {"ok": False, "error": "[Errno 28] No space left on device"}
WRITTEN = {"ok": True, "complete": True, "digest": "d", "folder": "f"}


def outcomes_told(monkeypatch, *outcomes) -> list[tuple[int, str]]:
    """The failures and the error after each attempt; the outcome None: its snapshot's memory was needed."""

    async def main() -> list[tuple[int, str]]:
        memory, told, waiting = SlotTable(), [], list(outcomes)
        dispatch = DurableJobs(memory)
        write = dispatch._write

        async def scripted(request):
            outcome = waiting.pop(0)
            if outcome is None:
                await memory.slot(SNAPSHOT, 0).withdraw()
                return await write(request)
            return outcome

        monkeypatch.setattr(dispatch, "_write", scripted)
        for step in range(1, len(outcomes) + 1):
            await published(memory, step)
            dispatch.start(DurableJob("unused", "job", "r0", 1, generation=1, step=step, keep=3))
            await dispatch.finish()
            told.append((dispatch.failures, dispatch.error))
        memory.close()
        return told

    return asyncio.run(main())


def test_a_skipped_checkpoint_after_a_written_one_is_no_failure(monkeypatch):
    told = outcomes_told(monkeypatch, WRITTEN, None, WRITTEN, None)
    assert told == [(0, "")] * 4


def test_skipped_checkpoints_in_a_row_are_a_failure(monkeypatch):
    told = outcomes_told(monkeypatch, WRITTEN, None, None, WRITTEN)
    assert told[1] == (0, "") and told[2][0] == 1 and told[3] == (1, "")
    assert "its memory was needed for another snapshot" in told[2][1]


def test_a_skipped_checkpoint_does_not_hide_a_full_disk(monkeypatch):
    told = outcomes_told(monkeypatch, None, FULL, None, None, WRITTEN)
    assert "its memory was needed" in told[0][1]
    assert [error for _, error in told[1:4]] == ["step 2: [Errno 28] No space left on device"] * 3
    assert told[4][1] == ""


@pytest.mark.parametrize("is_needed", [True, False])
def test_only_a_writer_that_the_server_killed_for_its_memory_is_overtaken(monkeypatch, is_needed):
    start = asyncio.create_subprocess_exec

    async def main() -> str:
        memory = SlotTable()
        await published(memory, 3)
        slot = memory.slot(SNAPSHOT, 0)

        async def sleeper(*arguments, **options):
            process = await start("sleep", "600", **options)
            drain = process.stdin.drain

            async def end_it() -> None:
                await drain()
                if is_needed:
                    for reader in tuple(slot.readers):
                        reader()
                else:
                    process.kill()

            monkeypatch.setattr(process.stdin, "drain", end_it)
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", sleeper)
        dispatch = DurableJobs(memory)
        dispatch.start(DurableJob("unused", "job", "r0", 1, generation=1, step=3, keep=3))
        await dispatch.finish()
        memory.close()
        return dispatch.error

    assert ("its memory was needed for another snapshot" in asyncio.run(main())) is is_needed
