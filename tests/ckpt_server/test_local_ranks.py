"""All ranks of a replica on one host have one checkpoint server: process, port, status connection."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from ckpt_server.test_status_sender import lighthouse, trainer
from listening_sockets import listening
from server_support import (
    TrainerProcess,
    alive,
    end,
    fetch,
    held_ranks,
    manifest_of,
    publish,
    publish_gradient,
    snapshot_file,
    trainer_process,
    wait_for,
)

from fabric.ckpt_server import attach as starting
from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.fetch.http_source import HttpAddress
from fabric.ckpt_server.fetch.multi_source import HostMemory
from fabric.ckpt_server.server.metrics import CkptMetrics
from fabric.ckpt_server.wire.channel_protocol import RequestChannel
from fabric.errors import Refused, ServerLost
from fabric.model import Fence, JobEnd, SnapshotRef
from fabric.protocol.messages.network import ServerStatus, TrainerStatus

RANKS = range(4)


@contextmanager
def started(run_dir: Path, **options: object) -> Iterator[list[TrainerProcess]]:
    """Real trainers of all ranks, which start at the same time."""
    with ThreadPoolExecutor(len(RANKS)) as pool:
        trainers = list(pool.map(lambda rank: TrainerProcess(run_dir, rank=rank, **options), RANKS))
    try:
        yield trainers
    finally:
        for process in trainers:
            process.end()


def servers_of(run_dir: Path) -> list[int]:
    """The processes that serve this folder."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdecimal() else []
            if b"fabric.ckpt_server" in words and f"--run-dir={run_dir}".encode() in words:
                found.append(int(folder.name))
    return found


def trainer_of(url: str) -> dict[str, object]:
    return fetch(url, "/debug/state").json["trainer"]


def file_of(rank: int) -> bytes:
    return snapshot_file(10_000, seed=rank)


@pytest.fixture
def handles(attach: Callable[..., ServerHandle]) -> list[ServerHandle]:
    """This process attached as each rank; every rank has published a snapshot."""
    made = [attach(rank=rank) for rank in RANKS]
    for rank, handle in enumerate(made):
        publish(handle, 0, file_of(rank), 7)
    return made


class TestOneServer:
    def test_ranks_that_start_together_have_one_process_one_port_and_two_sockets(self, run_dir):
        with started(run_dir) as trainers:
            pids = {x.hello["pid"] for x in trainers}
            assert [*pids] == servers_of(run_dir)
            assert listening(*pids) == {"tcp": 1, "unix": 2}
            urls = [x.hello["url"] for x in trainers]
            assert urls == [urls[0], *(f"{urls[0]}/ranks/{rank}" for rank in RANKS[1:])]
            assert [trainer_of(x.hello["url"])["pid"] for x in trainers] == [x.pid for x in trainers]

    def test_each_rank_has_slots_of_its_own_at_its_own_path(self, handles):
        publish_gradient(handles[2], 0, b"gradient", 3)
        for rank, handle in enumerate(handles):
            assert fetch(handle.url, "/v1/snapshots/7/data").body == file_of(rank)
            assert fetch(handle.url, "/v1/snapshots/7/manifest").json["url"].startswith(handle.url + "/v1")
            assert len(fetch(handle.url, "/v1/gradients").json) == (rank == 2)
            assert fetch(handle.url, "/debug/state").json["rank"] == rank
        assert fetch(handles[0].url, "/ranks/0/v1/snapshots/7/data").body == file_of(0)
        handles[1].begin("snapshot", 0)
        assert [fetch(x.url, "/v1/snapshots/7/data").status for x in handles] == [200, 409, 200, 200]

    @pytest.mark.parametrize("rank", ["9", "x", "-1", "9" * 50])
    def test_a_path_of_another_rank_names_those_that_are_here(self, handles, rank):
        answer = fetch(handles[0].url, f"/ranks/{rank}/v1/snapshots")
        assert (answer.status, answer.error) == (
            404,
            f"this server has no rank {rank[:40]}; its ranks: 0, 1, 2, 3",
        )

    def test_readers_on_this_host_map_the_memory_of_the_rank_that_has_the_file(self, handles):
        place = HttpAddress.parse(handles[3].url).place
        for rank in RANKS:
            file = file_of(rank)
            state = SnapshotRef(1, 7, manifest_of(file, 7)["digest"])
            memory = HostMemory.find(place, state, "", len(file))
            assert memory is not None
            memory.close()

    def test_two_readers_read_two_ranks_at_the_same_time(self, handles):
        with ThreadPoolExecutor(2) as pool:
            for _ in range(5):
                found = list(pool.map(lambda x: fetch(x.url, "/v1/snapshots/latest/data").body, handles[1:3]))
                assert found == [file_of(1), file_of(2)]

    def test_a_rank_has_one_trainer_at_a_time_and_is_no_number_below_0(self, run_dir, attach):
        with trainer_process(run_dir, rank=1) as first:
            with pytest.raises(
                Refused, match=f"rank 1 of replica r0 already has a trainer, process {first.pid}"
            ):
                attach(rank=1)
            with pytest.raises(Refused, match=r"attach\.rank is -1"):
                attach(rank=-1)
            assert attach(rank=2).pid == first.hello["pid"]

    def test_the_metrics_of_each_rank_have_its_number(self, tmp_path):
        ranks = held_ranks(tmp_path, 0, 3)
        text = CkptMetrics(ranks.held).render().decode()
        assert text.count("# TYPE fabric_ckpt_snapshots gauge") == 1
        for rank in (0, 3):
            assert f'fabric_ckpt_snapshots{{rank="{rank}"}} 0.0' in text
            assert f'fabric_ckpt_trainer{{rank="{rank}",state="absent"}} 1.0' in text

    def test_a_server_of_an_older_version_is_no_server_of_another_rank(self, attach, monkeypatch):
        """Such a server ignores the rank in the request, and takes this trainer for its own."""
        first, ask = attach(), RequestChannel.ask
        first.close()

        def without_rank(channel, body, timeout_s):
            answer, descriptors = ask(channel, {k: v for k, v in body.items() if k != "rank"}, timeout_s)
            return {k: v for k, v in answer.items() if k != "rank"}, descriptors

        monkeypatch.setattr(RequestChannel, "ask", without_rank)
        with pytest.raises(Refused, match=f"process {first.pid}\\) is of an older version"):
            attach(rank=1)
        assert attach().pid == first.pid


class TestDeaths:
    def test_a_killed_server_takes_the_memory_of_all_ranks_and_is_started_once(self, handles, monkeypatch):
        tries, start = [], starting._start
        monkeypatch.setattr(starting, "_start", lambda *given: tries.append(given) or start(*given))
        end(handles[0].pid)
        for handle in handles:
            with pytest.raises(ServerLost):
                handle.begin("snapshot", 1)
        with ThreadPoolExecutor(len(RANKS)) as pool:
            assert list(pool.map(ServerHandle.ensure, handles)) == [True] * len(RANKS)
        assert not starting.start(handles[1]._settings, 0.0), "another rank has started it meanwhile"
        assert len({x.pid for x in handles}) == len(tries) == 1 and alive(handles[0].pid)
        for rank, handle in enumerate(handles):
            assert fetch(handle.url, "/v1/snapshots").json == []
            publish(handle, 0, file_of(rank), 8)
            assert fetch(handle.url, "/v1/snapshots/8/data").body == file_of(rank)

    def test_a_killed_trainer_is_gone_alone_and_its_successor_finds_its_memory(self, run_dir):
        with started(run_dir) as trainers:
            for process in trainers:
                process.do("publish", slot=0, nbytes=1000, step=40)
            trainers[2].signal(signal.SIGKILL)
            urls = [x.hello["url"] for x in trainers]
            wait_for(lambda: trainer_of(urls[2])["state"] == "gone", "the death")
            assert [trainer_of(x)["state"] for x in urls] == ["running", "running", "gone", "running"]
            with trainer_process(run_dir, rank=2, incarnation=2) as second:
                assert second.hello == {**trainers[2].hello, "snapshots": [40]}
                assert [trainer_of(x)["incarnation"] for x in urls] == [1, 1, 2, 1]

    def test_the_next_attempt_finds_the_memory_of_all_ranks(self, run_dir):
        with started(run_dir) as trainers:
            for rank, process in enumerate(trainers):
                process.do("publish", slot=0, nbytes=1000, step=40 + rank)
            first = [x.hello for x in trainers]
        with started(run_dir, incarnation=2) as trainers:
            assert [x.hello for x in trainers] == [{**x, "snapshots": [40 + k]} for k, x in enumerate(first)]

    def test_the_server_lets_the_rank_go_that_nobody_comes_back_for(self, run_dir, attach):
        """A replica may come back with fewer ranks: the other ones' memory must not stay for ever."""
        stays = attach(rank=0, orphan_s=0.2)
        publish(stays, 0, file_of(0), 7)
        left = attach(rank=3, orphan_s=0.2)
        publish(left, 0, file_of(3), 7)
        left.close()
        wait_for(lambda: fetch(left.url, "/v1/snapshots").status == 404, "the end of rank 3")
        assert fetch(stays.url, "/v1/snapshots/7/data").body == file_of(0)
        again = attach(rank=3)
        assert (again.pid, again.snapshots) == (stays.pid, ())
        publish(again, 0, file_of(3), 8)
        assert fetch(again.url, "/v1/snapshots/8/data").body == file_of(3)

    def test_the_server_ends_with_the_last_rank_that_finishes(self, attach):
        first, last = attach(rank=0), attach(rank=1)
        publish(last, 0, file_of(1), 7)
        first.finish(0.0)
        wait_for(lambda: fetch(first.url, "/v1/snapshots").status == 404, "the end of rank 0")
        assert fetch(last.url, "/v1/snapshots/7/data").body == file_of(1)
        last.finish(0.0)
        wait_for(lambda: not alive(last.pid), "the server's end")


async def test_one_connection_tells_the_lighthouse_of_all_ranks(run_dir):
    async with lighthouse() as one:
        first = await asyncio.to_thread(lambda: TrainerProcess(run_dir, rank=0, lighthouse=[one.url]))
        try:
            async with trainer(run_dir, rank=3, orphan_s=0.2, lighthouse=[one.url]) as last:
                found = await one.until(lambda x: x.rank == 3 and x.trainer == "running")
                assert found.ckpt == f"{first.hello['url']}/ranks/3#3"
                last.signal(signal.SIGKILL)
                await one.until(lambda x: x.rank == 3 and x.trainer == "gone")
                assert (await one.until(lambda x: x.rank == 0)).trainer == "running"
            assert one.requests == ["/v1/jobs/job/trainer-status?replica=r0"]
            whole = [x for x in one.messages if isinstance(x, ServerStatus)]
            assert [s.rank for s in whole[-1].statuses] == [0, 3]
        finally:
            await asyncio.to_thread(first.end)


async def test_a_status_without_a_rank_tells_the_lighthouse_that_the_rank_has_gone(run_dir):
    async with (
        lighthouse() as one,
        trainer(run_dir, rank=0, orphan_s=0.2, lighthouse=[one.url]),
        trainer(run_dir, rank=1, lighthouse=[one.url]) as second,
    ):
        await one.until(lambda x: x.rank == 1 and x.trainer == "running")
        await asyncio.to_thread(second.do, "close")
        await one.until_message(lambda x: isinstance(x, TrainerStatus) and x.rank == 0)


END = JobEnd(Fence("s", 1, 1), 7, 1)


def test_the_ends_of_the_ranks_are_told_to_the_lighthouse_by_each(tmp_path):
    ranks = held_ranks(tmp_path, 0, 1)
    ranks.held[1].trainer.leave_word(END)
    message = ranks.compose(1)
    assert isinstance(message, ServerStatus)
    assert [(s.rank, s.ended) for s in message.statuses] == [(0, None), (1, END)]
