"""A state is resharded to another layout of ranks, with real gloo groups and real checkpoint servers."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from server_support import end

from fabric.ckpt_server.format.safetensors_file import TensorSpan
from fabric.ckpt_server.reshard import RegionRead
from fabric.ckpt_server.wire.channel_protocol import LOCK_NAME
from fabric.protocol.messages.rank_messages import replica_digest
from fabric.protocol.rules.lanes import TensorRegion

SCRIPT = Path(__file__).parent / "reshard_rank.py"
BLOCK = 4 << 20
WIDTH = 90_000


class Zygote:
    """Starts the ranks of one layout at a time."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(SCRIPT.parents[2]), str(SCRIPT.parent)])
        environment = {**os.environ, "PYTHONPATH": path}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, str(SCRIPT)], env=environment, **pipes)
        self._hear()

    def run(self, folder: Path, layout: str, world: int, width: int, **told: Any) -> list[dict[str, Any]]:
        """Return the output of the ranks of a layout; with ``sources`` they take a state, without they give
        theirs."""
        folder.mkdir()
        common = {"world": world, "layout": layout, "width": width, "store": f"{folder}/store", **told}
        ranks = [{"rank": rank, **common} for rank in range(world)]
        if "sources" not in told:
            ranks = [{**one, "run_dir": str(folder / f"rank{one['rank']}")} for one in ranks]
        self._process.stdin.write(json.dumps(ranks) + "\n")
        self._process.stdin.flush()
        return json.loads(self._hear())

    def _hear(self) -> str:
        line = self._process.stdout.readline()
        assert line, self._process.wait()
        return line

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@dataclass(frozen=True)
class Held:
    """A state of dead trainers: the URLs of its parts, its digest, the ranks' results, and the storage that
    holds it too.
    """

    sources: list[list[str]]
    digest: str
    said: list[dict[str, Any]]
    durable: str

    @property
    def told(self) -> dict[str, Any]:
        return {"sources": self.sources, "digest": self.digest, "seed": 2}


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with contextlib.closing(Zygote()) as found:
        yield found


@contextlib.contextmanager
def held(zygote: Zygote, folder: Path, layout: str, world: int, width: int) -> Iterator[Held]:
    said = zygote.run(folder, layout, world, width, seed=1, durable=str(folder / "durable"))
    try:
        assert all("url" in one for one in said), said
        digests = said[0]["digests"]
        digest = replica_digest(digests) if world > 1 else digests[0]
        yield Held([[x["url"]] for x in said], digest, said, str(folder / "durable"))
    finally:
        for lock in folder.glob(f"*/{LOCK_NAME}"):
            pid = lock.read_text().strip()
            if pid and Path(f"/proc/{pid}").exists():
                end(int(pid))


@pytest.fixture(scope="module")
def fsdp2(zygote, tmp_path_factory) -> Iterator[Held]:
    """A state of 50 MB over two ranks of FSDP2."""
    with held(zygote, tmp_path_factory.mktemp("fsdp2") / "old", "fsdp", 2, WIDTH) as found:
        yield found


@pytest.mark.parametrize("rung", ["memory", "storage"])
def test_each_rank_reads_the_slices_that_it_needs(zygote, fsdp2, tmp_path, rung):
    """Each of four new ranks reads at most its part, plus one block at each end of a slice."""
    total = sum(one["nbytes"] for one in fsdp2.said)
    told = fsdp2.told | ({"durable": fsdp2.durable} if rung == "storage" else {})
    for one in zygote.run(tmp_path / "new", "fsdp", 4, WIDTH, **told):
        assert one.get("sums") == fsdp2.said[0]["sums"], one
        # a rank may read one block too many at the two headers and at both ends of six large tensors
        seams = 2 * 2 + 2 * 6
        assert one["nbytes"] < total / 3.5
        assert one["fetched"] <= one["nbytes"] + seams * BLOCK
        assert one["fetched"] < 0.8 * total


@pytest.mark.parametrize(
    ("old", "new"),
    [(("fsdp*tp", 4), ("fsdp", 2)), (("tp", 2), ("whole", 1)), (("whole", 1), ("fsdp*tp", 4))],
    ids=lambda layout: f"{layout[0]}{layout[1]}",
)
def test_a_state_comes_into_another_layout(zygote, tmp_path, old, new):
    with held(zygote, tmp_path / "old", *old, width=90) as state:
        for one in zygote.run(tmp_path / "new", *new, width=90, **state.told):
            assert one.get("sums") == state.said[0]["sums"], one


@pytest.mark.parametrize(
    ("width", "change", "sentence"),
    [
        (WIDTH, lambda urls: urls[:1], "name the servers of every old rank"),
        (WIDTH, lambda urls: urls[::-1], "it holds the digest"),
        (WIDTH, lambda urls: [urls[0], ["http://127.0.0.1:1"]], "No source could deliver"),
        (91, lambda urls: urls, "model.0.bias has shape (90000,) in the snapshot and (91,) here"),
    ],
    ids=["a part too few", "parts exchanged", "a dead holder", "another model"],
)
def test_missing_memory_is_reported_and_nothing_is_touched(zygote, fsdp2, tmp_path, width, change, sentence):
    told = fsdp2.told | {"sources": change(fsdp2.sources)}
    (one,) = zygote.run(tmp_path / "new", "whole", 1, width, **told)
    assert sentence in one["error"] and one["untouched"], one


# --- boxes, against torch's own indexing -----------------------------------------------------------


@st.composite
def pieces(draw: Any) -> RegionRead:
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    begin = [draw(st.integers(0, n - 1)) for n in shape]
    sizes = [draw(st.integers(1, n - at)) for n, at in zip(shape, begin, strict=True)]
    numel = 1
    for n in shape:
        numel *= n
    span = TensorSpan("t", "I64", tuple(shape), 128, 128 + 8 * numel)
    return RegionRead(
        "t", 0, span, TensorRegion.whole(tuple(shape)), TensorRegion(tuple(begin), tuple(sizes))
    )


@given(pieces(), st.sampled_from([0, 16, 64, 10**6]))
def test_byte_runs_hold_every_element_of_the_piece_and_no_other_where_gaps_are_not_allowed(piece, gap):
    shape = piece.span.shape
    count = (piece.span.end - piece.span.begin) // 8
    wanted = set(torch.arange(count).reshape(shape)[piece.box.within(piece.held)].reshape(-1).tolist())
    runs = list(piece.runs(gap))
    covered = set(itertools.chain(*(range((a - 128) // 8, (b - 128) // 8) for a, b in runs)))
    assert wanted <= covered <= set(range(count))
    assert covered == wanted or gap
    assert sum(b - a for a, b in runs) == 8 * len(covered)
    assert piece.blocks(64) >= {(128 + 8 * i) // 64 for i in wanted}


@given(pieces(), pieces())
def test_two_regions_have_a_common_region(one, other):
    if len(one.span.shape) != len(other.span.shape):
        return
    common = one.box.common(other.box)
    cells = [
        set(itertools.product(*(range(a, a + n) for a, n in zip(box.begin, box.sizes, strict=True))))
        for box in (one.box, other.box, common)
    ]
    assert cells[2] == cells[0] & cells[1] and common.elements == len(cells[2])
