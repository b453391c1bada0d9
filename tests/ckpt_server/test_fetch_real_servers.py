"""A newcomer's fetcher fetches from real checkpoint servers."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_support import TOKEN, end, manifest_of, publish, snapshot_file, start_server, trainer_process

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.fetch.fetcher import StateFetcher
from fabric.ckpt_server.format.manifest import bytes_digest
from fabric.ckpt_server.wire.gradient_index import PublishedGradient
from fabric.errors import Gone, StateError
from fabric.model import SnapshotRef

NBYTES = 30_000_000


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


@pytest.fixture
def pair(tmp_path: Path, token_file: Path) -> Iterator[list[ServerHandle]]:
    """The checkpoint servers of two replicas."""
    handles = [start_server(tmp_path / name, replica=name, token_file=token_file) for name in ("r0", "r1")]
    yield handles
    for handle in handles:
        handle.close()
        end(handle.pid)


def publish_result(handle: ServerHandle, slot: int, data: bytes, step: int) -> None:
    handle.begin("gradient", slot)
    handle.allocate("gradient", slot, len(data))[:] = data
    gradient = PublishedGradient(1, step, 3, len(data), bytes_digest(memoryview(data)), 4.5, "ab")
    handle.publish_gradient(slot, gradient, {"contributions": {"r0": [1, 2]}, "metrics": {"loss": 0.5}})


def test_state_comes_from_both_servers(pair):
    file = snapshot_file(NBYTES)
    for handle in pair:
        publish(handle, 0, file, 40)
    ref = SnapshotRef(1, 40, manifest_of(file, 40)["digest"])
    fetched: list[memoryview] = []

    def allocate(nbytes: int) -> memoryview:
        fetched.append(memoryview(bytearray(nbytes)))
        return fetched[-1]

    fetcher = StateFetcher(token=TOKEN, range_bytes=4 << 20)
    found = fetcher.fetch_state([handle.url for handle in pair], ref, allocate)
    fetcher.close()
    assert bytes(fetched[0]) == file
    assert set(found.sources) == {handle.url for handle in pair}
    # The joining replica publishes the fetched state unchanged, and becomes a source.
    pair[1].begin("snapshot", 0)
    pair[1].publish_snapshot(0, found.manifest)


def test_gradients_are_waited_for_and_gone_is_gone(pair):
    fetcher = StateFetcher(token=TOKEN)
    into = memoryview(bytearray(1000))
    urls = [handle.url for handle in pair]
    thread = threading.Thread(target=publish_result, args=(pair[0], 0, b"g" * 1000, 7))
    thread.start()
    meta = fetcher.fetch_gradient(urls[:1], generation=1, step=7, into=into, wait_s=20)
    thread.join()
    assert bytes(into) == b"g" * 1000
    assert (meta.epoch, meta.weight, meta.layout) == (3, 4.5, "ab")
    assert meta.meta == {"contributions": {"r0": [1, 2]}, "metrics": {"loss": 0.5}}
    publish_result(pair[1], 0, b"h" * 1000, 9)
    with pytest.raises(Gone):
        fetcher.fetch_gradient(urls, generation=1, step=6, into=into, wait_s=20)
    with pytest.raises(StateError):
        fetcher.fetch_gradient(urls[:1], generation=1, step=8, into=into, wait_s=0.1)
    fetcher.close()


def test_a_dead_trainers_state_is_fetched_whole(run_dir):
    with trainer_process(run_dir) as trainer:
        trainer.do("publish", slot=0, nbytes=NBYTES, step=40)
    file = snapshot_file(NBYTES, 40)
    target = memoryview(bytearray(len(file)))
    fetcher = StateFetcher(token="")
    ref = SnapshotRef(1, 40, manifest_of(file, 40)["digest"])
    fetcher.fetch_state([trainer.hello["url"]], ref, lambda nbytes: target)
    fetcher.close()
    assert bytes(target) == file
