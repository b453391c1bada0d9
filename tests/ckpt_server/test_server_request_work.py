"""No request holds the loop of a checkpoint server for long: the largest valid request of every route.

The server holds states of many tensors, and its trainer's recordings are as long as torch keeps them.
"""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import asdict
from server_support import description, held_ranks, manifest_of
from turn_work import MOST_BYTECODES, counted, json_counted

from fabric.ckpt_server.format.safetensors_file import build_preamble
from fabric.ckpt_server.server.debug_probe import DebugProbe
from fabric.ckpt_server.server.metrics import CkptMetrics
from fabric.ckpt_server.server.routes import OPEN_PATHS, make_app
from fabric.ckpt_server.server.slots import GRADIENT, SNAPSHOT, SlotTable, gradient_content, snapshot_content
from fabric.runtime.http.http_service import serve

NAMES = [f"model.layers.{i:06}.weight" for i in range(50_000)]
LONGEST = 7_000  # characters of a path that the HTTP parser still accepts
STATE = "/v1/snapshots/{step}"
RECORDING = {"entries": [{"state": "completed", "sizes": [[4096] * 8] * 4}] * 2_000}
# The largest valid requests of each route: the path with its query, and headers.
REQUESTS: dict[str, list[tuple[str, dict[str, str]]]] = {
    **{path: [(path, {})] for path in ("/healthz", "/metrics", "/v1/snapshots")},
    **{path: [(path, {})] for path in ("/debug/state", "/debug/stacks", "/debug/exchange", "/v1/gradients")},
    "/debug/flight": [("/debug/flight", {}), ("/debug/flight?last=4611686018427387904", {})],
    f"{STATE}/manifest": [
        ("/v1/snapshots/latest/manifest", {}),
        ("/v1/snapshots/7/manifest", {"If-None-Match": ", ".join(f'"{i:032}"' for i in range(200))}),
    ],
    f"{STATE}/data": [
        ("/v1/snapshots/7/data", {}),
        ("/v1/snapshots/7/data", {"Accept-Encoding": "zstd"}),
        ("/v1/snapshots/7/data", {"Range": "bytes=0-4611686018427387904"}),
    ],
    f"{STATE}/blocks/{{blocks}}": [
        ("/v1/snapshots/7/blocks/0-0", {"Accept-Encoding": "zstd"}),
        ("/v1/snapshots/7/blocks/0-999999999999", {}),
    ],
    f"{STATE}/tensors/{{tensor}}": [
        ("/v1/snapshots/7/tensors/large?slice=1:4000000", {}),
        (f"/v1/snapshots/7/tensors/large?slice={','.join(['0:1'] * 1_500)}", {}),
        (f"/v1/snapshots/7/tensors/{NAMES[-1]}{'x' * LONGEST}", {}),
    ],
    f"{STATE}/statistics/{{tensor}}": [
        ("/v1/snapshots/7/statistics/large", {}),
        (f"/v1/snapshots/7/statistics/{NAMES[-1]}x", {}),
    ],
    "/v1/gradients/{step}": [("/v1/gradients/7", {}), ("/v1/gradients/999999999999999999?wait_s=0", {})],
}


class Probe(DebugProbe):
    """The answers of a trainer with long recordings."""

    def require_process(self) -> None:
        """Accept the process of the test."""

    async def ask(self, what: str) -> dict[str, Any]:
        if what == "flight":
            return {"ok": True, "recording": json.dumps(RECORDING)}
        threads = [{"name": "t", "current": False, "stack": ["file.py:1 function"] * 100}] * 100
        return {"ok": True, "threads": threads, "rounds": RECORDING["entries"]}


def app_of(folder: Path, memory: SlotTable) -> web.Application:
    ranks = held_ranks(folder)
    rank = ranks.held[0]
    rank.slots, rank.probe = memory, Probe(folder, rank.trainer)
    return make_app(ranks, CkptMetrics(ranks.held), None)


@pytest.fixture
async def port(tmp_path) -> AsyncIterator[int]:
    memory = SlotTable()
    sizes = [("large", "U8", (8 << 20,), 8 << 20), *((name, "U8", (1,), 1) for name in NAMES)]
    file = build_preamble(sizes, "{}") + os.urandom((8 << 20) + len(NAMES))
    for index, step in enumerate((6, 7)):
        slot = memory.slot(SNAPSHOT, index)
        region = await memory.allocate(slot, len(file))
        os.pwrite(region.fd, file, 0)
        memory.publish(slot, snapshot_content(manifest_of(file, step), region.view, "job", "http://x"))
    slot = memory.slot(GRADIENT, 0)
    region = await memory.allocate(slot, 1 << 20)
    published = {**asdict(description(7, 1 << 20)), "meta": {"loss": "1" * 50_000}}
    memory.publish(slot, gradient_content(published, len(region.view)))
    runner, number = await serve(app_of(tmp_path, memory), "127.0.0.1", 0)
    yield number
    await runner.cleanup()
    memory.close()


def test_the_table_has_every_route(tmp_path):
    app = app_of(tmp_path, SlotTable())
    found = {(x.method, x.resource.canonical) for x in app.router.routes() if x.method != "HEAD"}
    answered = [path for path in REQUESTS if path not in OPEN_PATHS]
    assert found == {("GET", path) for path in (*REQUESTS, *(f"/ranks/{{rank}}{x}" for x in answered))}


async def test_the_largest_request_of_every_route_is_a_short_turn_of_the_loop(port, monkeypatch):
    found: dict[str, int] = {}
    async with aiohttp.ClientSession(auto_decompress=False, max_field_size=1 << 17) as client:
        for path, headers in (request for requests in REQUESTS.values() for request in requests):
            url = f"http://127.0.0.1:{port}{path}"
            with counted() as count, json_counted(monkeypatch, count):
                async with client.get(url, headers=headers) as answer:
                    await answer.read()
            assert answer.status < 500, (path, answer.status)
            found[path[:80]] = count.most
    assert not {path: work for path, work in found.items() if work >= MOST_BYTECODES}
