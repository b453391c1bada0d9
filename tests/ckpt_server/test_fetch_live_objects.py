"""State and gradients go from one replica's live objects through real checkpoint servers to another's."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import xxhash

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.fetch.fetcher import StateFetcher
from fabric.ckpt_server.fetch.multi_source import RangeQueue
from fabric.ckpt_server.state.snapshot import CpuCopier, build_manifest
from fabric.ckpt_server.state.training_state import capture, restore, verify
from fabric.ckpt_server.wire.gradient_index import PublishedGradient
from fabric.ckpt_server.wire.server_settings import ServerSettings
from fabric.errors import Gone, StateError
from fabric.model import SnapshotRef

TOKEN = "a-token-for-tests"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Callable[[int], list[ServerHandle]]]:
    started: list[ServerHandle] = []
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)

    def start(count: int) -> list[ServerHandle]:
        for index in range(count):
            name = f"r{index}"
            spec = ServerSettings("j", name, tmp_path / name, advertise="127.0.0.1", token_file=token)
            started.append(ServerHandle(spec, 1))
        return started

    yield start
    for handle in started:
        try:
            handle.finish(0.0)
        except StateError:
            pass
        finally:
            handle.close()


def objects(seed: int, width: int) -> dict[str, object]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "optimizer": optimizer}


def train(state: dict[str, object], steps: int) -> None:
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.ones(3, state["model"][0].in_features)).square().sum().backward()
        state["optimizer"].step()


def publish(handle: ServerHandle, state: dict[str, object], step: int, slot: int = 0) -> SnapshotRef:
    view = capture(state, step)
    memory = handle.allocate("snapshot", slot, view.nbytes)
    assert handle.begin("snapshot", slot)
    copier = CpuCopier()
    copier.start(view, memory)
    digests = copier.join()
    copier.close()
    manifest = build_manifest(view, digests, job="j", replica="r", generation=1, created=1.0)
    handle.publish_snapshot(slot, manifest)
    return SnapshotRef(1, step, digests.digest)


@pytest.mark.parametrize("same_host", [False, True])
def test_a_joining_replica_takes_the_state_from_three_servers_one_of_which_dies(
    servers, same_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = servers(3)
    veteran, joiner = objects(1, 1200), objects(2, 1200)  # 17 MB: several blocks
    train(veteran, 2)
    refs = {publish(handle, veteran, 2) for handle in three}
    assert len(refs) == 1
    state = refs.pop()
    killed = threading.Event()

    def kill_one(queue: RangeQueue, block: int, finished=RangeQueue.finished) -> None:
        finished(queue, block)
        if not killed.is_set():
            killed.set()
            os.kill(three[0].pid, signal.SIGKILL)

    monkeypatch.setattr(RangeQueue, "finished", kill_one)
    buffers: list[bytearray] = []

    def allocate(nbytes: int) -> memoryview:
        buffers.append(bytearray(nbytes))
        return memoryview(buffers[0])

    fetch = StateFetcher(TOKEN, range_bytes=4 << 20, timeout_s=10.0)
    fetch.same_host = same_host
    done = fetch.fetch_state([handle.url for handle in three], state, allocate)
    assert killed.is_set()
    assert sum(done.sources.values()) == done.nbytes == len(buffers[0])
    assert restore(memoryview(buffers[0]), joiner) == 2
    verify(joiner, 2, state.digest)
    train(veteran, 1)
    train(joiner, 1)
    assert capture(veteran, 3).digest() == capture(joiner, 3).digest()


def test_the_state_goes_into_the_joining_replicas_own_slot_which_it_then_serves(servers) -> None:
    one, two = servers(2)
    veteran = objects(1, 64)
    train(veteran, 1)
    state = publish(one, veteran, 1)
    fetch = StateFetcher(TOKEN)
    done = fetch.fetch_state([one.url], state, lambda nbytes: two.allocate("snapshot", 1, nbytes))
    two.begin("snapshot", 1)
    two.publish_snapshot(1, done.manifest)
    again = StateFetcher(TOKEN).fetch_manifest(two.url, 1, 1)
    assert again["blocks"] == done.manifest["blocks"]


def test_a_missing_state_is_gone_and_a_wrong_token_is_reported(servers) -> None:
    (one,) = servers(1)
    state = publish(one, objects(1, 16), 3)
    with pytest.raises(Gone, match="409"):
        StateFetcher(TOKEN).fetch_state([one.url], SnapshotRef(1, 2, state.digest), lambda n: memoryview(b""))
    with pytest.raises(StateError, match="401"):
        StateFetcher("wrong").fetch_state([one.url], state, lambda n: memoryview(b""))


def test_gradients_are_fetched_from_the_servers_that_hold_them(servers) -> None:
    one, two = servers(2)
    body = torch.randn(70_000, generator=torch.Generator().manual_seed(0)).numpy().tobytes()

    def give(handle: ServerHandle, step: int) -> None:
        memory = handle.allocate("gradient", step % 2, len(body))
        handle.begin("gradient", step % 2)
        memory[: len(body)] = body
        digest = xxhash.xxh3_128_hexdigest(body)
        gradient = PublishedGradient(1, step, 3, len(body), digest, 1.5, "0123456789abcdef")
        handle.publish_gradient(step % 2, gradient, {"clip": 1.0})

    fetch = StateFetcher(TOKEN)
    into = memoryview(bytearray(len(body)))
    give(one, 4)
    meta = fetch.fetch_gradient([two.url, one.url], generation=1, step=4, into=into, wait_s=20.0)
    assert into == body
    assert (meta.source, meta.weight, meta.epoch, meta.meta) == (one.url, 1.5, 3, {"clip": 1.0})
    waiting = threading.Timer(0.0, give, (two, 5))
    waiting.start()
    assert fetch.fetch_gradient([two.url], generation=1, step=5, into=into, wait_s=20.0).step == 5
    waiting.join()
    give(one, 5)
    give(one, 6)
    with pytest.raises(Gone):
        fetch.fetch_gradient([one.url], generation=1, step=4, into=into)
    with pytest.raises(StateError, match="not published"):
        fetch.fetch_gradient([one.url], generation=1, step=9, into=into, wait_s=0.01)
    fetch.close()
