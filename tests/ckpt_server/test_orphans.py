"""A trainer, a server, or both, killed at any point, leave no shared memory behind."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_support import alive, connect, end, trainer_process, wait_for

NBYTES = 2_000_000


def fabric_memory() -> Iterator[tuple[int, int]]:
    """Return (process, inode) of every memfd of fabric that any process has open or mapped."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text().splitlines():
                if "memfd:fabric-" in line:
                    yield int(process.name), int(line.split()[4])
        with contextlib.suppress(OSError):
            for entry in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if entry.readlink().name.startswith("memfd:fabric-"):
                        yield int(process.name), entry.stat().st_ino


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "fabric" in path.name}


def reach(trainer, point: str) -> None:
    """Bring the trainer's snapshot to a point."""
    if point == "nothing is published":
        trainer.do("begin", slot=0)
        return
    trainer.do("publish", slot=0, nbytes=NBYTES, step=1)
    trainer.do("gradient", slot=0, nbytes=1000, step=1)
    if point == "a slot is being written":
        trainer.do("publish", slot=1, nbytes=NBYTES, step=2)
        trainer.do("begin", slot=0)


@pytest.mark.parametrize("victims", ["trainer", "server", "server, trainer", "trainer, server"])
@pytest.mark.parametrize(
    "point", ["nothing is published", "a snapshot is served", "a slot is being written", "somebody reads"]
)
def test_a_dead_trainers_server_ends_and_leaves_no_memory(run_dir, victims, point):
    before = shared_files()
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(trainer_process(run_dir, orphan_s=0.2))
        server = trainer.hello["pid"]
        stack.callback(end, server)
        reach(trainer, point)
        memory = {inode for pid, inode in fabric_memory() if pid == server}
        assert memory or point == "nothing is published"
        if point == "somebody reads":
            reader = stack.enter_context(contextlib.closing(connect(trainer.hello["url"])))
            reader.request("GET", "/v1/snapshots/1/data")
            reader.getresponse().read(1000)
        for victim in victims.split(", "):
            if victim == "trainer":
                trainer.signal(signal.SIGKILL)
            else:
                end(server)
        if "trainer" in victims:
            # The launcher has reaped the dead trainer; the server must notice the death and end.
            wait_for(lambda: not alive(trainer.pid), "the trainer's end")
            wait_for(lambda: not alive(server), "the server's end")
        else:
            trainer.end()
        wait_for(lambda: not memory & {inode for _, inode in fabric_memory()}, "the memory to be free")
        assert shared_files() - before == set(), "nothing of ours has a name"


def test_a_server_that_may_live_a_moment_without_a_trainer_waits_for_its_first_one(run_dir):
    """Its time begins when it starts, and a trainer on a loaded host needs longer to attach."""
    with trainer_process(run_dir, orphan_s=0.001) as trainer:
        reach(trainer, "a snapshot is served")
        trainer.signal(signal.SIGKILL)
        wait_for(lambda: not alive(trainer.hello["pid"]), "the server's end")
