"""A rank that catches up cuts its parts out of the gradients that ranks of another layout publish."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from ftar.lane_layouts import COLUMNS, ROWS, SINGLE, gradient_of, member

from fabric.ckpt_server.fetch.fetcher import GradientMeta
from fabric.client.state.fetch_thread import PieceFetcher
from fabric.errors import Gone, StateError
from fabric.ftar.lanes import FlatPlaces, LaneDirectory
from fabric.protocol.messages import member_events as io
from fabric.protocol.rules.lanes import ReplicaLayout, TensorRegion
from fabric.protocol.rules.layout_text import layout_text

LATE = frozenset({"in.bias", "norm"})


def flat_of(layout: ReplicaLayout, rank: int, gradient) -> torch.Tensor:
    places = FlatPlaces(layout.ranks[rank], LATE)
    flat = torch.zeros(places.nbytes, dtype=torch.uint8)
    for held in layout.ranks[rank]:
        whole = TensorRegion.whole(held.shape)
        places.view(flat, held.name, held.region).copy_(gradient[held.name][held.region.within(whole)])
        places.presence(flat, held.name).fill_(len(held.name) % 2)
    return flat


class Servers:
    """Checkpoint servers by URL: the gradient of a rank, or an error."""

    is_cancelled = False

    def __init__(self, **layouts: ReplicaLayout) -> None:
        self.members = tuple(member(name, layout) for name, layout in layouts.items())
        self.published = {}
        self.digests = []
        self.asked = []
        for x, layout in zip(self.members, layouts.values(), strict=True):
            for rank, address in enumerate(x.addresses):
                flat = flat_of(layout, rank, gradient_of(5))
                self.published[address.ckpt.partition("#")[0]] = [flat, "round", None]

    def fetch_gradient(self, urls, *, generation, step, into, wait_s, digest):
        self.digests.append(digest)
        (url,) = urls
        self.asked.append(url)
        flat, digest, error = self.published[url]
        if error is not None:
            raise error
        into[: len(flat)] = flat.numpy().data
        meta = {"round_digest": digest} if digest else {}
        return GradientMeta(generation, step, 3, 8.0, "bytes", "layout", len(flat), meta, url)

    def order(self) -> io.FetchGradient:
        urls = tuple(x.ckpt for x in self.members)
        return io.FetchGradient(1, 9, urls, self.members)


def directory(rank: int, layout: ReplicaLayout) -> LaneDirectory:
    return LaneDirectory("me", rank, layout, layout_text(layout), LATE)


def fetch(servers: Servers, layout: ReplicaLayout, rank: int) -> tuple[torch.Tensor, GradientMeta]:
    pieces = PieceFetcher(directory(rank, layout))
    flat = torch.zeros(FlatPlaces(layout.ranks[rank], LATE).nbytes, dtype=torch.uint8)
    return flat, pieces.fetch(servers, servers.order(), flat, wait_s=0.0)


LAYOUTS = {"single": SINGLE, "rows": ROWS, "columns": COLUMNS}


@pytest.mark.parametrize(("theirs", "own"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_every_rank_gets_its_part_from_any_layout(theirs, own):
    servers = Servers(r0=LAYOUTS[theirs])
    for rank in range(len(LAYOUTS[own].ranks)):
        flat, meta = fetch(servers, LAYOUTS[own], rank)
        assert torch.equal(flat, flat_of(LAYOUTS[own], rank, gradient_of(5)))
        assert (meta.digest, meta.weight, meta.epoch) == ("round", 8.0, 3)


def test_ranks_that_hold_no_part_of_this_rank_are_not_asked():
    servers = Servers(r0=ROWS)
    alone = ReplicaLayout((tuple(held for held in SINGLE.ranks[0] if held.name == "half"),))
    pieces = PieceFetcher(directory(0, alone))
    pieces.fetch(servers, servers.order(), torch.zeros(64, dtype=torch.uint8), wait_s=0.0)
    assert servers.asked == ["http://r0:0"]


def test_the_next_member_is_asked_for_parts_that_the_first_does_not_have():
    servers = Servers(r0=ROWS, r1=SINGLE)
    servers.published["http://r0:1"][2] = StateError("not yet")
    flat, _ = fetch(servers, SINGLE, 0)
    assert torch.equal(flat, flat_of(SINGLE, 0, gradient_of(5)))


def test_a_gradient_is_gone_only_when_all_members_say_so():
    servers = Servers(r0=ROWS, r1=SINGLE)
    servers.published["http://r0:0"][2] = Gone("overwritten")
    servers.published["http://r1:0"][2] = StateError("not yet")
    with pytest.raises(StateError, match="r0: overwritten; r1: not yet") as caught:
        fetch(servers, SINGLE, 0)
    assert not isinstance(caught.value, Gone)
    servers.published["http://r1:0"][2] = Gone("overwritten too")
    with pytest.raises(Gone, match="overwritten too"):
        fetch(servers, SINGLE, 0)


def test_pieces_are_verified_by_the_digest_of_the_job():
    servers = Servers(r0=ROWS)
    pieces = PieceFetcher(directory(0, SINGLE))
    flat = flat_of(SINGLE, 0, gradient_of(1))

    def job_digest(data: memoryview) -> str:
        return "the digest of a device"

    pieces.fetch(servers, servers.order(), flat, 0.0, job_digest)
    assert servers.digests == [job_digest] * 2


def test_a_cancelled_fetch_ends_at_once():
    servers = Servers(r0=SINGLE, r1=SINGLE)
    servers.published["http://r0:0"][2] = StateError("the socket was shut down")
    servers.is_cancelled = True
    pieces = PieceFetcher(directory(0, SINGLE))
    with pytest.raises(StateError, match="the fetch was cancelled"):
        pieces.fetch(servers, servers.order(), torch.zeros(1024, dtype=torch.uint8), wait_s=1000.0)
    assert servers.asked == ["http://r0:0"]


def test_ranks_that_publish_two_rounds_are_not_mixed():
    servers = Servers(r0=ROWS)
    servers.published["http://r0:1"][1] = "another round"
    with pytest.raises(StateError, match="rank 1 of r0 publishes another round than its rank 0"):
        fetch(servers, SINGLE, 0)


def test_a_gradient_of_another_size_than_announced_is_refused():
    servers = Servers(r0=SINGLE)
    servers.published["http://r0:0"][0] = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(StateError, match="publishes another gradient than announced"):
        fetch(servers, SINGLE, 0)


def test_without_members_a_gradient_is_not_published_yet():
    pieces = PieceFetcher(directory(0, SINGLE))
    pieces.newest = lambda: SimpleNamespace(roster=(member("me", SINGLE), member("away", SINGLE)))
    order = io.FetchGradient(1, 9, ("http://me:0#0",))
    with pytest.raises(StateError, match="no member publishes it"):
        pieces.fetch(Servers(), order, torch.zeros(64, dtype=torch.uint8), wait_s=0.0)
