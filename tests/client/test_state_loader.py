"""Every combination of outcomes of the sources of a state, and the event that the member core gets.

The sources are this host's own memory, one to three other servers, and durable storage. The sources and the
server's memory are stand-ins; ``StateLoader``, ``FetchThread`` and ``fetch_failure`` are the shipping code.
"""

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from fabric.ckpt_server.fetch.fetcher import FetchResult, GradientMeta
from fabric.ckpt_server.format.manifest import file_digest
from fabric.ckpt_server.reshard import LayoutChanged, ServedRankFile
from fabric.client.state import fetch_thread as module
from fabric.client.state import state_loader
from fabric.client.state.durable_policy import StorageUnavailable
from fabric.client.state.fetch_thread import FetchThread
from fabric.client.state.state_loader import StateLoader, fetch_failure
from fabric.errors import Gone, IntegrityError, ServerLost, StateError
from fabric.model import DURABLE, SnapshotRef
from fabric.protocol.messages import member_events as io

STATE = b"the state" * 10
OTHER = b"something" * 10
DIGEST = file_digest(memoryview(STATE))
URLS = ("http://a", "http://b", "http://c")
OWN = ("none", "good", "flipped", "server lost")
SOURCE = ("good", "failing", "silent", "gone", "unusable")


def manifest() -> dict:
    return {"nbytes": len(STATE), "digest": DIGEST, "step": 7, "generation": 1}


@dataclass
class Host:
    """A host: its own memory with one slot, the sources, and a list of the requests to them."""

    own: str
    sources: dict[str, str]
    has_place: bool
    writes: list[str] = field(default_factory=list)
    given_back: list[int] = field(default_factory=list)
    memory: bytearray = field(default_factory=lambda: bytearray(len(STATE)))
    url = "http://own"
    job, replica = "job", "r0"

    # This class stands for ``Snapshots``, its slots and the checkpoint server.
    @property
    def slots(self) -> "Host":
        return self

    handle = slots

    def held(self, state: SnapshotRef) -> int:
        return -1 if self.own == "none" else 1

    def give_back(self, slot: int) -> None:
        self.given_back.append(slot)

    def look(self, slot: int, nbytes: int) -> memoryview:
        if self.own == "server lost":
            raise ServerLost("this host's own server has ended")
        return memoryview(bytearray(OTHER if self.own == "flipped" else STATE))

    def target(self, nbytes: int, beside: object = None) -> tuple[int, memoryview]:
        if not self.has_place:
            raise ServerLost("this host's own server has ended, and no other can be started")
        return 0, memoryview(self.memory)

    # This class has the methods of ``StateFetcher``.
    def fetch_manifest(self, url: str, step: int, generation: int) -> dict:
        assert url == self.url
        return manifest()

    def fetch_state(self, urls, state: SnapshotRef, allocate, blocks=None) -> FetchResult:
        kinds = [self.sources[url] for url in urls]
        if "good" in kinds:
            allocate(len(STATE))[:] = STATE
            self.writes.append(urls[kinds.index("good")])
            return FetchResult(len(STATE), 0.1, {self.writes[-1]: len(STATE)}, manifest())
        if "unusable" in kinds and all(x in ("unusable", "gone") for x in kinds):
            raise IntegrityError("unusable: " + ", ".join(urls))
        if all(x == "gone" for x in kinds):
            raise Gone("gone: " + ", ".join(urls))
        raise StateError("failed: " + ", ".join(urls))

    def cancel(self) -> None:
        pass


@dataclass
class Storage:
    """Stands for ``DurableCheckpoints`` without checkpoints; other tests read states from storage."""

    asked: int = 0

    def patiently(self, read):
        return read()

    def find_state(self, state: SnapshotRef) -> object:
        self.asked += 1
        raise StateError("storage holds no such checkpoint")


def fetch(host: Host, storage: Storage, monkeypatch, durable: bool) -> tuple[object, FetchThread]:
    """Return the event for the member core, made by the fetch thread's own code."""
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    monkeypatch.setattr(module, "Worker", lambda *_, **__: SimpleNamespace(submit=lambda job: job()))
    ladder = StateLoader(host, storage, SimpleNamespace(), 0, 1, lambda *_: host)
    points = SimpleNamespace(hit=lambda *_: None)
    transfer, told = FetchThread(ladder, 8, points, pytest.fail), []
    urls = (*host.sources, *((DURABLE,) if durable else ()))
    transfer.fetch_state(io.FetchState(SnapshotRef(1, 7, DIGEST), urls), told.append)
    assert len(told) == 1, "the member is told exactly once"
    return told[0], transfer


def worlds():
    """Every combination of own memory, up to three sources in any order, storage or none, and a free slot or
    none.
    """
    for count in (0, 1, 2, 3):
        for kinds in itertools.product(SOURCE, repeat=count):
            yield from itertools.product(OWN, [kinds], [False, True], [True, False])


def test_the_loaded_and_the_unusable_states_whatever_the_sources_do(monkeypatch):
    seen = set()
    for own, kinds, durable, has_place in worlds():
        if not kinds and not durable:
            continue  # the leader names at least one source
        host = Host(own, dict(zip(URLS, kinds, strict=False)), has_place)
        storage = Storage()
        told, transfer = fetch(host, storage, monkeypatch, durable)
        what = f"own {own}, sources {kinds}, storage {durable}, place {has_place}: {told}"
        seen.add(type(told).__name__)
        if own == "good":
            assert told == io.StateFetched(7, DIGEST), what
            assert host.writes == [] and storage.asked == 0, f"{what}: what is here is not fetched"
            state = transfer.take_state()
            assert state.slot == 1 and bytes(state.file) == STATE, what
        elif "good" in kinds and has_place:
            assert told == io.StateFetched(7, DIGEST), what
            assert len(host.writes) == 1 and storage.asked == 0, f"{what}: loaded twice"
            state = transfer.take_state()
            assert state.slot == 0 and bytes(state.file) == STATE, what
        else:
            assert isinstance(told, io.FetchFailed) and not told.misfit, what
            assert transfer.take_state() is None and host.writes == [], what
            if "good" in kinds:  # an error on this host proves nothing about the state
                assert not told.unusable and "own server" in told.why and storage.asked == 0, what
            else:
                damaged = "unusable" in kinds and set(kinds) <= {"unusable", "gone"}
                assert told.unusable == (durable or damaged), what
                assert storage.asked == durable, what
                # The error names every source with its reason.
                assert all(url in told.why for url in host.sources), what
                assert ("storage holds no such checkpoint" in told.why) == durable, what
    assert seen == {"StateFetched", "FetchFailed"}


def test_a_second_fetch_uses_no_result_of_the_first(monkeypatch):
    host = Host("none", {"http://a": "good"}, True)
    told, transfer = fetch(host, Storage(), monkeypatch, durable=False)
    assert told == io.StateFetched(7, DIGEST) and host.given_back == []
    host.sources["http://a"] = "silent"
    again: list[object] = []
    transfer.fetch_state(io.FetchState(SnapshotRef(1, 7, DIGEST), ("http://a",)), again.append)
    assert isinstance(again[0], io.FetchFailed) and transfer.take_state() is None
    assert host.given_back == [0]


@pytest.mark.parametrize("ends", ["fetched", "gone", "failed"])
def test_a_gradient_that_was_cancelled_before_its_turn_is_never_asked_for(monkeypatch, ends):
    asked, told = [], []
    jobs = []
    monkeypatch.setattr(module, "Worker", lambda *_, **__: SimpleNamespace(submit=jobs.append))
    errors = {"gone": Gone("not held"), "failed": StateError("away")}
    meta = GradientMeta(1, 4, 1, 1.0, "ab", "", 8, {}, "http://b")

    def fetch_gradient(urls, **_):
        asked.append(urls)
        if ends in errors:
            raise errors[ends]
        return meta

    fetcher = SimpleNamespace(fetch_gradient=fetch_gradient, cancel=lambda: None)
    ladder = SimpleNamespace(make_fetcher=lambda: fetcher)
    transfer = FetchThread(ladder, 8, SimpleNamespace(hit=lambda *_: None), pytest.fail)
    transfer.fetch_gradient(io.FetchGradient(1, 3, ("http://a",)), told.append)
    transfer.cancel()
    transfer.fetch_gradient(io.FetchGradient(1, 4, ("http://b",)), told.append)
    for job in jobs:
        job()
    assert asked == [("http://b",)] and len(told) == 1 and told[0].step == 4
    assert isinstance(told[0], io.GradientFetched if ends == "fetched" else io.GradientGone)
    assert ends == "fetched" or told[0].gone == (ends == "gone")
    assert isinstance(transfer.buffer, torch.Tensor)


@pytest.mark.parametrize("holds", ["nothing", "a gradient", "a part of one"])
def test_a_gradient_is_fetched_beside_what_the_loop_holds_of_the_last_one(monkeypatch, holds):
    at_once = SimpleNamespace(submit=lambda job: job())
    monkeypatch.setattr(module, "Worker", lambda *_, **__: at_once)

    errors = []

    def fetch_gradient(_urls, *, step, into, **_):
        into[:] = bytes([step]) * 8
        errors.append(into[:4])  # an error's frames may live for a while
        return GradientMeta(1, step, 1, 1.0, "ab", "", 8, {}, "http://b")

    fetcher = SimpleNamespace(fetch_gradient=fetch_gradient, cancel=lambda: None)
    ladder = SimpleNamespace(make_fetcher=lambda: fetcher)
    transfer = FetchThread(ladder, 8, SimpleNamespace(hit=lambda *_: None), pytest.fail)
    transfer.fetch_gradient(io.FetchGradient(1, 3, ("http://b",)), lambda _: None)
    first = transfer.buffer
    address = first.data_ptr()
    gradient = first[:4].view(torch.float32)
    held = {"nothing": None, "a gradient": gradient, "a part of one": gradient.detach()[:0]}[holds]
    del first, gradient
    transfer.fetch_gradient(io.FetchGradient(1, 4, ("http://b",)), lambda _: None)
    assert transfer.buffer.tolist() == [4] * 8
    assert (transfer.buffer.data_ptr() == address) == (held is None)
    assert held is None or held.untyped_storage().tolist()[:8] == [3] * 8


# --- unequal layouts of ranks ------------------------------------------------------------------------------


class Layouts:
    """Servers by URL: the digests of the ranks whose state they hold, and an error."""

    def __init__(self, **held) -> None:
        self.held = {f"http://{name}": ranks for name, ranks in held.items()}

    def fetch_manifest(self, url: str, step: int, generation: int) -> dict:
        ranks = self.held[url]
        if isinstance(ranks, Exception):
            raise ranks
        parts = {"rank": 0, "ranks": ranks} if len(ranks) > 1 else {}
        return {"digest": ranks[0], "content": ranks[0], **parts}

    def close(self) -> None:
        pass


def content(half: int) -> str:
    return "d" * 16 + f"{half:016x}"


@pytest.mark.parametrize(
    ("size", "chosen"),
    [(1, {0: ("http://single",)}), (2, {0: ("http://two0",), 1: ("http://two1", "http://again1")})],
)
def test_a_state_is_read_from_one_layout_preferably_its_own(size, chosen):
    servers = Layouts(
        single=[content(7)],
        two0=[content(3), content(4)],
        two1=[content(3), content(4)],
        again1=[content(3), content(4)],
        half=[content(1), content(6)],
        other=[content(8)],
        away=StateError("not there"),
    )
    loader = StateLoader(None, None, None, 0, size, lambda *_: servers, unequal=True)
    served = {
        0: ("http://away", "http://other", "http://half", "http://single", "http://two0"),
        1: ("http://two1", "http://again1"),
    }
    assert loader._of_one_layout(served, SnapshotRef(1, 7, content(7))) == chosen


def test_a_layout_of_which_a_rank_is_missing_is_not_read():
    state = SnapshotRef(1, 7, content(7))
    servers = Layouts(half=[content(1), content(6)], away=StateError("not there"))
    loader = StateLoader(None, None, None, 0, 2, lambda *_: servers, unequal=True)
    order = io.FetchState(state, ("http://half", "http://away#1"))
    # Another try may help while a server has not answered, and only then.
    for served, unusable in (
        ({0: ("http://half",)}, True),
        ({0: ("http://half",), 1: ("http://away",)}, False),
    ):
        with pytest.raises(StateError, match="no member serves step 7 in all of its ranks") as caught:
            loader._of_one_layout(served, state)
        assert fetch_failure(order, caught.value).unusable == unusable


@pytest.mark.parametrize("replaced", [LayoutChanged, Gone])
def test_a_state_that_a_replica_stores_in_its_new_layout_meanwhile_is_looked_up_again(replaced, monkeypatch):
    servers = Layouts(two0=[content(3), content(4)], two1=[content(3), content(4)])
    loader = StateLoader(None, None, None, 1, 2, lambda *_: servers, unequal=True)
    reads = []

    def read(order, served, fetcher):
        reads.append(served)
        if len(reads) == 1:
            servers.held["http://two0"] = [content(7)]
            raise replaced("the server has another file of this state by now")
        return "the state"

    monkeypatch.setattr(loader, "_from_others", read)
    order = io.FetchState(SnapshotRef(1, 7, content(7)), ("http://two0", "http://two1#1"))
    served = {0: ("http://two0",), 1: ("http://two1",)}
    assert loader._from_served(order, served, servers) == "the state"
    assert reads == [served, {0: ("http://two0",)}]


class Storing(Layouts):
    """The two ranks of a lone replica, which store the state in a new layout one after the other."""

    def __init__(self, looks: int) -> None:
        super().__init__(first=[content(3), content(4)], second=[content(5), content(2)])
        self.looks = looks  # lookups until the second rank has stored its part too

    def fetch_manifest(self, url: str, step: int, generation: int) -> dict:
        if url == "http://second":
            self.looks -= 1
            if self.looks < 0:
                self.held[url] = self.held["http://first"]
        return super().fetch_manifest(url, step, generation)


@pytest.mark.parametrize("looks", [0, 1, state_loader._MIXED_TRIES - 1])
def test_a_lone_replica_that_stores_a_new_layout_rank_by_rank_is_asked_again(looks, monkeypatch):
    monkeypatch.setattr(state_loader, "_MIXED_PAUSE_S", 0.0)
    servers = Storing(looks)
    loader = StateLoader(None, None, None, 0, 2, lambda *_: servers, unequal=True)
    monkeypatch.setattr(loader, "_from_others", lambda order, served, fetcher: served)
    served = {0: ("http://first",), 1: ("http://second",)}
    order = io.FetchState(SnapshotRef(1, 7, content(7)), ("http://first", "http://second#1"))
    assert loader._from_served(order, served, servers) == served


def test_a_state_whose_layouts_stay_mixed_is_given_up_in_the_end(monkeypatch):
    monkeypatch.setattr(state_loader, "_MIXED_PAUSE_S", 0.0)
    servers = Storing(looks=1000)
    loader = StateLoader(None, None, None, 0, 2, lambda *_: servers, unequal=True)
    served = {0: ("http://first",), 1: ("http://second",)}
    order = io.FetchState(SnapshotRef(1, 7, content(7)), ("http://first", "http://second#1"))
    with pytest.raises(StateError) as caught:
        loader._from_served(order, served, servers)
    failed = fetch_failure(order, caught.value)
    assert failed.unusable and not failed.misfit, "an older state is the only way on"
    assert failed.why.endswith("in all of its ranks: its servers hold parts of 2 layouts")
    assert servers.looks == 1000 - state_loader._MIXED_TRIES


class Blocks:
    """A server whose file is replaced after the first read; each file has two blocks of 16 bytes."""

    reads = 0

    def fetch_state(self, urls, state, allocate, blocks) -> FetchResult:
        self.reads += 1
        allocate(32)
        return FetchResult(16, 0.0, {}, {"digest": content(self.reads)})


def test_blocks_of_two_files_of_one_state_are_never_mixed():
    part = ServedRankFile(0, ("http://a",), SnapshotRef(1, 7, content(7)), Blocks())
    part.have({0})
    with pytest.raises(LayoutChanged, match="another layout"):
        part.have({1})


def test_storage_that_stays_away_is_no_damaged_state_and_asks_for_a_restart():
    order = io.FetchState(SnapshotRef(1, 7, DIGEST), (DURABLE,))
    told = fetch_failure(order, StorageUnavailable("/checkpoints does not answer, for 60 s"))
    assert told.restart and not told.unusable and not told.misfit
