"""The HTTP side: snapshots and gradients for joining replicas, JSON for people with `curl`.

Each rank of this host has the paths below ``/ranks/RANK``; without that they are those of rank 0.
A path names a step by its number or as ``latest``. The answer for a missing step is 409 with the held steps,
so that a reader can choose another source or step. Answers with bytes support ranges; the server never copies
all bytes. Malformed requests get a 4xx with a sentence.
"""

import asyncio
import difflib
import os
import re
import select
import socket
import threading
import time
from bisect import bisect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from threading import BoundedSemaphore
from typing import Any, TypeVar

from aiohttp import web
from msgspec import field
from msgspec.structs import replace
from prometheus_client import Counter

from fabric.ckpt_server.format.manifest import bytes_digest, etag
from fabric.ckpt_server.format.safetensors_file import ELEMENT_BYTES, TensorSpan
from fabric.ckpt_server.format.tensor_slices import (
    contiguous_from,
    gather,
    parse_slice,
    slice_text,
)
from fabric.ckpt_server.server.debug_probe import TrainerSilent, parse_flight
from fabric.ckpt_server.server.local_ranks import LocalRank, LocalRanks
from fabric.ckpt_server.server.metrics import CkptMetrics
from fabric.ckpt_server.server.slots import GRADIENT, SNAPSHOT, SharedSlot, SlotContent
from fabric.ckpt_server.wire.compression import IDENTITY, ZSTD, Compressor, choose
from fabric.ckpt_server.wire.compression import PIECE_BYTES as WORK_BYTES
from fabric.errors import Gone, ProtocolError, Refused
from fabric.model import Value
from fabric.protocol.rules.lanes import TensorRegion
from fabric.runtime.http.http_service import (
    STALL_S,
    bearer_required,
    errors_as_json,
    json_error,
    pages_kept_out,
    query_integer,
    query_seconds,
)
from fabric.runtime.http.token_file import TokenFile
from fabric.runtime.priority import lower_priority

# Range, If-Range, If-Match and If-None-Match by RFC 9110, for one strong ETag.
#
# A request may ask for one range; several ranges are refused with a sentence. The functions are pure.


_RANGE = re.compile(r"bytes=\s*(\d{0,19})-(\d{0,19})", re.ASCII | re.IGNORECASE)


def check_if_match(header: str | None, tag: str) -> None:
    """Answers 412 unless ``header`` is absent, ``*``, or lists ``tag``."""
    if header is None or header.strip() == "*":
        return
    if tag not in (entry.strip() for entry in header.split(",")):
        raise web.HTTPPreconditionFailed(
            text=f"what is held has the tag {tag}, not the one in If-Match: ask anew"
        )


def is_unchanged(header: str | None, tag: str) -> bool:
    """Whether If-None-Match (``header``) says that the reader has this content: then the answer is 304."""
    if header is None:
        return False
    listed = (entry.strip().removeprefix("W/") for entry in header.split(","))
    return header.strip() == "*" or tag in listed


def wanted_range(header: str | None, if_range: str | None, tag: str, nbytes: int) -> tuple[int, int] | None:
    """Return (begin, end) of the bytes that a GET wants, or None for all of them.

    Ignores a unit other than bytes, and a range whose If-Range does not match, as the RFC says. Raises
    ProtocolError for several or malformed ranges, and answers 416 for a range without a byte.
    """
    if header is None or (if_range is not None and if_range.strip() != tag):
        return None
    unit, equals, _ = header.partition("=")
    if equals and unit.strip().lower() != "bytes":
        return None
    match = _RANGE.fullmatch(header.strip())
    if match is None or match.groups() == ("", ""):
        raise ProtocolError("the header Range must be one range such as bytes=0-99, bytes=100- or bytes=-99")
    first, last = match.groups()
    if not first:
        begin, end = max(nbytes - int(last), 0), nbytes
    elif last and int(last) < int(first):
        raise ProtocolError("the header Range ends before it begins: give it as bytes=FIRST-LAST")
    else:
        begin, end = int(first), min(int(last) + 1, nbytes) if last else nbytes
    if begin >= end:
        raise web.HTTPRequestRangeNotSatisfiable(
            text=f"the range has none of the {nbytes} bytes there are: begin below {nbytes}",
            headers={"Content-Range": f"bytes */{nbytes}"},
        )
    return begin, end


# Sends a slot's bytes over HTTP straight from shared memory, and never bytes that are being overwritten.
#
# Large pieces go as views of the memory, each after the piece before has gone. A few threads send them: one
# thread cannot feed all readers of a host. A thread leaves a reader that takes nothing to the event loop,
# which waits until it does. The threads use a descriptor of their own, because the transport may close its
# descriptor at any time. An end of the transfer shuts the connection down first, and no byte that is read
# later is sent. Over TLS the transport sends. Its high-water mark is zero, so a slow reader costs no memory.
# A small piece would stay in the transport's buffer while the handler goes on, so it is sent as a copy.
#
# Two threads of low priority compress bytes, or gather bytes from many places of a tensor, piece by piece.
# When a transfer ends early, its thread may still read memory that the trainer writes again; its result is
# dropped.


PIECE_BYTES = 4 * 1024 * 1024
_TURN_BYTES = 4 * PIECE_BYTES  # a thread sends so many bytes, and then may serve another reader
_SENDERS = ThreadPoolExecutor(max(2, min(8, len(os.sched_getaffinity(0)) // 4)), "fabric-send")
_PATIENCE_MS = 2  # how long such a thread waits for a reader
# With a larger piece aiohttp waits for the transport. The first piece is joined to the response's head.
_COPY_BYTES = 64 * 1024
_STREAMS = BoundedSemaphore(8)
_WORKERS = ThreadPoolExecutor(2, "fabric-work", lower_priority)


class Excerpt(Value):
    """A part of a slot's bytes: ``nbytes`` from ``begin``, or the ``box`` of the tensor at ``span``."""

    begin: int
    nbytes: int
    tag: str = ""  # makes this answer's ETag differ from the ETag of the full content
    width: int = 4  # bytes of an element; 4 for several tensors, which suits 16-bit elements too
    headers: Mapping[str, str] = field(default_factory=dict)
    span: TensorSpan | None = None
    box: TensorRegion | None = None

    @classmethod
    def of_tensor(cls, span: TensorSpan, box: TensorRegion | None = None) -> "Excerpt":
        """Return a whole tensor, or the part of it in ``box``."""
        width = ELEMENT_BYTES[span.dtype]
        shape = span.shape if box is None else box.sizes
        headers = {"X-Fabric-Dtype": span.dtype, "X-Fabric-Shape": ",".join(map(str, shape))}
        tag = f"-{span.begin}"
        if box is None:
            return cls(span.begin, span.end - span.begin, tag, width, headers)
        tag += "-" + slice_text(box).replace(",", "_")
        nbytes, first = box.elements * width, contiguous_from(box, span.shape)
        if first is not None:
            return cls(span.begin + first * width, nbytes, tag, width, headers)
        return cls(span.begin, nbytes, tag, width, headers, span, box)

    def pieces(self, view: memoryview, begin: int, end: int, most: int) -> Iterator[memoryview]:
        """Yield bytes ``begin`` to ``end`` of the excerpt, of the slot's ``view``."""
        if self.span is None or self.box is None:
            for at in range(self.begin + begin, self.begin + end, most):
                yield view[at : min(at + most, self.begin + end)]
            return
        tensor, per_piece = view[self.span.begin : self.span.end], WORK_BYTES // self.width // 4
        for first in range(begin // self.width, -(-end // self.width), per_piece):
            last = min(first + per_piece, -(-end // self.width))
            piece = gather(tensor, self.width, self.span.shape, self.box, (first, last))
            skip = max(begin - first * self.width, 0)
            yield piece[skip : end - first * self.width]


async def send(
    request: web.Request, slot: SharedSlot, metrics: CkptMetrics, excerpt: Excerpt | None = None
) -> web.StreamResponse:
    """Answer ``request`` with the content of ``slot`` or an excerpt, or with the wanted range of it.

    The content is compressed if the request accepts that and wants no range. Raises ConnectionResetError when
    the connection ended early (the slot was withdrawn, the reader left or stalled). Refuses bad headers with
    ProtocolError, 412 or 416.
    """
    is_whole = request.method == "GET" and "Range" not in request.headers
    coding = choose(request.headers.get("Accept-Encoding")) if is_whole else IDENTITY
    # Only few transfers at a time get ZSTD, which keeps some MiB for each.
    streams = coding == ZSTD and _STREAMS.acquire(blocking=False)
    try:
        return await _send(request, slot, metrics, excerpt, coding if streams or coding != ZSTD else IDENTITY)
    finally:
        if streams:
            _STREAMS.release()


async def _send(
    request: web.Request, slot: SharedSlot, metrics: CkptMetrics, excerpt: Excerpt | None, coding: str
) -> web.StreamResponse:
    content, asked = slot.content, request.headers
    assert content is not None
    excerpt = excerpt or Excerpt(0, content.nbytes)
    tag = etag(content.digest + excerpt.tag + ("" if coding == IDENTITY else f"-{coding}"))
    check_if_match(asked.get("If-Match"), tag)
    if is_unchanged(asked.get("If-None-Match"), tag):
        return web.Response(status=304, headers={"ETag": tag})
    span = None
    if request.method == "GET":
        span = wanted_range(asked.get("Range"), asked.get("If-Range"), tag, excerpt.nbytes)
    begin, end = span or (0, excerpt.nbytes)
    response = web.StreamResponse(status=200 if span is None else 206, headers=content.headers)
    response.headers.update(excerpt.headers)
    response.headers.update({"Accept-Ranges": "bytes", "ETag": tag, "Cache-Control": "no-store"})
    response.headers["Vary"] = "Accept-Encoding"
    if span is not None:
        response.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{excerpt.nbytes}"
    response.content_type = "application/octet-stream"
    if coding == IDENTITY:
        response.content_length = end - begin
    else:
        response.headers["Content-Encoding"] = coding
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the reader has gone before it was answered")
    with (
        metrics.transfer(slot.kind) as sent,
        slot.reading((line := _SlotTransfer(response, transport, slot, sent)).abort) as view,
        closing(line),  # before the slot counts as free
    ):
        # TLS keeps its own copy of the bytes: with a high-water mark of zero its transport would stay paused.
        transport.set_write_buffer_limits(high=1 if transport.get_extra_info("sslcontext") else 0)
        await response.prepare(request)
        if request.method != "HEAD":
            if coding != IDENTITY:
                pieces = excerpt.pieces(view, begin, end, WORK_BYTES)
                await line.send_made(_packed(pieces, coding, excerpt.width))
            elif excerpt.span is not None:
                await line.send_made(excerpt.pieces(view, begin, end, WORK_BYTES))
            else:
                await line.send_views(excerpt.pieces(view, begin, end, _TURN_BYTES))
        await line.end()
    return response


class _SlotTransfer:
    """One response under way from a slot; all methods raise ConnectionResetError when it ends early."""

    def __init__(
        self, response: web.StreamResponse, transport: asyncio.Transport, slot: SharedSlot, sent: Counter
    ) -> None:
        self._response = response
        self._transport = transport
        self._slot = slot
        self._version = slot.version
        self._sent = sent
        self._own: socket.socket | None = None  # the threads' descriptor of the connection
        self._sending: Future[int] | None = None

    def abort(self) -> None:
        self._transport.abort()
        if self._own is not None:
            with suppress(OSError):  # the reader has closed the connection
                self._own.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the threads' descriptor. A thread that still sends is ended."""
        if (own := self._own) is None:
            return
        if self._sending is None or self._sending.done():
            own.close()
        else:
            self.abort()
            self._sending.add_done_callback(lambda _: own.close())

    async def send_views(self, pieces: Iterator[memoryview]) -> None:
        """Send views of the memory; the first is small, because it is joined to the head."""
        most = _COPY_BYTES
        for left in pieces:
            while len(left):
                if most > _COPY_BYTES < len(left) and (own := self._threads_descriptor()) is not None:
                    await self._send_apart(own, left)
                    break
                part, left = left[:most], left[most:]  # noqa: PLW2901  (what is left of it)
                await self._write(bytes(part) if len(part) <= _COPY_BYTES else part)
                most = PIECE_BYTES

    def _threads_descriptor(self) -> socket.socket | None:
        """Return a thread's descriptor; None where the transport must send, or has something to send."""
        about = self._transport.get_extra_info
        if self._own is None and not about("sslcontext") and not self._transport.get_write_buffer_size():
            with suppress(OSError):  # no descriptor is left
                self._own = socket.socket(fileno=os.dup(about("socket").fileno()))
        return self._own

    async def _send_apart(self, own: socket.socket, left: memoryview) -> None:
        while len(left):
            self._require_content()
            self._sending = _SENDERS.submit(_push, own, left, self._sent)
            try:
                count = await asyncio.wrap_future(self._sending)
            except OSError as error:
                raise ConnectionResetError("the reader has closed the connection") from error
            left = left[count:]
            if len(left):
                await self._give(_room(own))

    async def send_made(self, pieces: Iterator[bytes | memoryview]) -> None:
        """Send pieces that other threads make."""
        while (piece := await work(lambda: next(pieces, None))) is not None:
            await self._write(piece)

    def _require_content(self) -> None:
        if self._slot.version != self._version:
            raise ConnectionResetError(
                f"{self._slot.kind} slot {self._slot.index} was withdrawn while it was being sent"
            )

    async def _write(self, piece: bytes | memoryview) -> None:
        self._require_content()
        if not len(piece):
            return
        await self._give(self._response.write(piece))
        self._sent.inc(len(piece))

    async def end(self) -> None:
        """Return when the transport has sent all bytes: until then it reads the slot."""
        await self._give(self._response.write_eof())

    async def _give(self, written: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(STALL_S):
                await written
        except TimeoutError:
            self.abort()
            raise ConnectionResetError(f"the reader took nothing for {STALL_S:g} s") from None


def _packed(pieces: Iterator[memoryview], coding: str, width: int) -> Iterator[bytes]:
    compressor = Compressor(coding, width)
    for piece in pieces:
        yield compressor.pack(piece)
    yield compressor.end()


def _push(own: socket.socket, view: memoryview, sent: Counter) -> int:
    """Send ``view`` while the reader takes it; return the bytes that went. Raises OSError.

    It counts them in ``sent``, because a reader that has all may be gone before the event loop could.
    """
    room, at = select.poll(), 0
    room.register(own, select.POLLOUT)
    try:
        while at < len(view):
            try:
                at += own.send(view[at:])
            except BlockingIOError:
                if not room.poll(_PATIENCE_MS):
                    break
    finally:
        sent.inc(at)
    return at


async def _room(own: socket.socket) -> None:
    loop, room = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(own, room.set)
    try:
        await room.wait()
    finally:
        loop.remove_writer(own)


_T = TypeVar("_T")


async def work(make: Callable[[], _T]) -> _T:
    """Run ``make()`` in one of the threads of low priority; return its result or raise its error."""
    return await asyncio.get_running_loop().run_in_executor(_WORKERS, make)


OPEN_PATHS = frozenset({"/healthz", "/metrics"})
MAX_WAIT_S = 60.0
_MAX_NUMBER = 2**62
_NEIGHBOURS = 20
_BLOCKS = re.compile(r"(\d{1,12})-(\d{1,12})", re.ASCII)
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_app(
    ranks: LocalRanks, metrics: CkptMetrics, token: TokenFile | str | None, names: Iterable[str] = ()
) -> web.Application:
    """Return the application. All paths but OPEN_PATHS need ``token`` (None: none). ``names``: the host names
    besides loopback."""
    tokens = TokenFile.of(token)
    app = web.Application(
        middlewares=[
            errors_as_json,
            *([pages_kept_out(names)] if tokens.is_open else []),
            bearer_required(tokens, OPEN_PATHS),
        ],
        client_max_size=64 * 1024,
    )
    routes = CkptRoutes(ranks, metrics)
    app.router.add_get("/healthz", routes.health)
    app.router.add_get("/metrics", routes.metrics)
    for of_rank in ("", "/ranks/{rank}"):
        app.router.add_get(f"{of_rank}/debug/state", routes.state)
        app.router.add_get(f"{of_rank}/debug/stacks", routes.stacks)
        app.router.add_get(f"{of_rank}/debug/flight", routes.flight)
        app.router.add_get(f"{of_rank}/debug/exchange", routes.exchange)
        app.router.add_get(f"{of_rank}/v1/snapshots", routes.snapshots)
        snapshot = f"{of_rank}/v1/snapshots/{{step}}"
        app.router.add_get(f"{snapshot}/manifest", routes.manifest)
        app.router.add_get(f"{snapshot}/data", routes.data)
        app.router.add_get(f"{snapshot}/blocks/{{blocks}}", routes.blocks)
        app.router.add_get(f"{snapshot}/tensors/{{tensor:.+}}", routes.tensor)
        app.router.add_get(f"{snapshot}/statistics/{{tensor:.+}}", routes.statistics)
        app.router.add_get(f"{of_rank}/v1/gradients", routes.gradients)
        app.router.add_get(f"{of_rank}/v1/gradients/{{step}}", routes.gradient)
    return app


class CkptRoutes:
    """One handler per path."""

    def __init__(self, ranks: LocalRanks, metrics: CkptMetrics) -> None:
        self._ranks = ranks
        self._metrics = metrics
        self._one_summary = asyncio.Lock()

    async def health(self, request: web.Request) -> web.Response:
        """Answer at all, which shows that the process runs."""
        return web.json_response({"ok": True})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": _METRICS_TYPE})

    async def snapshots(self, request: web.Request) -> web.Response:
        """Answer with all held snapshots, oldest first."""
        return web.json_response(_listing(self._rank(request), SNAPSHOT))

    async def gradients(self, request: web.Request) -> web.Response:
        return web.json_response(_listing(self._rank(request), GRADIENT))

    async def manifest(self, request: web.Request) -> web.Response:
        """Answer with the snapshot's manifest, with the URL of its data and, unless ``tensors=0``, its
        tensors."""
        _, content = self._find(request)
        with_tensors = query_integer(request, "tensors", low=0, high=1) != 0
        body = content.manifest if with_tensors else content.manifest_without_tensors
        tag = etag(bytes_digest(memoryview(body)))
        check_if_match(request.headers.get("If-Match"), tag)
        if is_unchanged(request.headers.get("If-None-Match"), tag):
            return web.Response(status=304, headers={"ETag": tag})
        headers = {**content.headers, "ETag": tag, "Cache-Control": "no-store"}
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def data(self, request: web.Request) -> web.StreamResponse:
        """Answer with the snapshot's bytes: a whole safetensors file, or a range of it."""
        slot, _ = self._find(request)
        return await send(request, slot, self._metrics)

    async def tensor(self, request: web.Request) -> web.StreamResponse:
        """Answer with the little-endian bytes of a tensor, a slice, or a range; headers give dtype and
        shape."""
        slot, content = self._find(request)
        span = _tensor(request, content)
        text, of = request.query.get("slice"), request.query.get("of", "part")
        if of not in ("part", "whole"):
            raise ProtocolError("the query parameter of must be part (what this rank holds) or whole")
        if text is None:
            return await send(request, slot, self._metrics, Excerpt.of_tensor(span))
        shard = content.shards.get(span.name)
        if of == "part" or shard is None or len(shard.shape) != len(span.shape):
            excerpt = Excerpt.of_tensor(span, parse_slice(text, span.shape))
            return await send(request, slot, self._metrics, excerpt)
        held = TensorRegion(shard.offset, span.shape)
        box = parse_slice(text, shard.shape).common(held)
        if not box.elements:
            raise web.HTTPNotFound(
                text=f"this rank holds {slice_text(held)} of {span.name[:200]}, nothing of that slice"
            )
        begin = tuple(at - first for at, first in zip(box.begin, held.begin, strict=True))
        excerpt = Excerpt.of_tensor(span, TensorRegion(begin, box.sizes))
        headers = {**excerpt.headers, "X-Fabric-Slice": slice_text(box)}
        return await send(request, slot, self._metrics, replace(excerpt, headers=headers))

    async def blocks(self, request: web.Request) -> web.StreamResponse:
        """Answer with blocks of a snapshot, which a fetcher may take compressed."""
        slot, content = self._find(request)
        text = request.match_info["blocks"]
        match = _BLOCKS.fullmatch(text)
        if match is None or int(match[1]) > int(match[2]):
            raise ProtocolError(f'"{text[:40]}" names no blocks: give the first and the last, such as 0-3')
        first, last = int(match[1]), int(match[2])
        size, nbytes = content.block_bytes, content.nbytes
        if last * size >= nbytes:
            there = -(-nbytes // size)
            raise web.HTTPNotFound(
                text=f"there is no block {last}: the manifest lists blocks 0 to {there - 1}"
            )
        begin, end = first * size, min((last + 1) * size, nbytes)
        excerpt = Excerpt(begin, end - begin, f"-blocks-{first}-{last}")
        return await send(request, slot, self._metrics, excerpt)

    async def statistics(self, request: web.Request) -> web.StreamResponse:
        """Answer with minimum, maximum, mean, norm and the number of non-finite elements of a tensor."""
        # Here, because numpy is large and few servers need it: a server starts fast and stays small.
        from fabric.ckpt_server.server.statistics import summarise

        async with self._one_summary:  # a withdrawal must not wait behind the work on another slot
            slot, content = self._find(request)
            span, over = _tensor(request, content), threading.Event()
            with slot.reading(over.set) as view:
                data = view[span.begin : span.end]
                try:
                    summary = await work(lambda: summarise(data, span.dtype, span.shape, over.is_set))
                finally:
                    over.set()  # stops the work if the reader has closed the connection
                    data.release()
        if summary is None:
            return json_error(409, "the snapshot was withdrawn meanwhile: ask for a newer one")
        return web.json_response({"tensor": span.name, **summary})

    async def gradient(self, request: web.Request) -> web.StreamResponse:
        """Answer with a reduced gradient's bytes; wait up to ``wait_s`` until the trainer publishes it."""
        step = _step(request)
        if step is None:
            raise ProtocolError("gradients are named by their step: ask for /v1/gradients/<number>")
        generation = query_integer(request, "generation", low=0, high=_MAX_NUMBER)
        wait_s = query_seconds(request, "wait_s", most=MAX_WAIT_S)
        rank = self._rank(request)
        slot = await rank.slots.wait_gradient(step, generation, wait_s)
        if slot is not None:
            return await send(request, slot, self._metrics)
        gone = rank.slots.gradient_is_gone(step, generation)
        why = "is not held any more" if gone else "is not held yet"
        raise _NotHeld(rank, GRADIENT, f"the gradient of step {step} {why}", gone)

    async def state(self, request: web.Request) -> web.Response:
        """Answer with the trainer's own report, the kernel's view of it, the status, and every slot's
        readers."""
        rank, ranks = self._rank(request), self._ranks
        trainer, says, why = rank.trainer, None, ""
        try:
            rank.probe.require_process()
            says = await rank.probe.ask("state")
        except (TrainerSilent, Refused) as error:
            why = str(error)
        return web.json_response(
            {
                "job": ranks.settings.job,
                "replica": ranks.settings.replica,
                "instance": rank.instance,
                "rank": rank.number,
                "epoch": ranks.epoch_log.epoch,
                "incident_id": ranks.epoch_log.incident_id,
                "trainer": {
                    "state": trainer.state,
                    "pid": trainer.pid,
                    "incarnation": trainer.incarnation,
                    "attached": trainer.is_attached,
                    "says": says,
                    "silent": why,
                },
                "status_sender": None if ranks.status_sender is None else ranks.status_sender.describe(),
                "slots": [
                    {
                        "kind": slot.kind,
                        "slot": slot.index,
                        "capacity": slot.capacity,
                        "version": slot.version,
                        "readers": len(slot.readers),
                        "content": None if slot.content is None else dict(slot.content.entry),
                    }
                    for slot in rank.slots.slots()
                ],
            }
        )

    async def stacks(self, request: web.Request) -> web.Response:
        """Answer with the stacks of every thread of the trainer, even if the trainer hangs."""
        return web.json_response(await self._rank(request).probe.stacks())

    async def flight(self, request: web.Request) -> web.Response:
        """Answer with torch's recording of the trainer's collectives; ``last``: only this many calls."""
        last = query_integer(request, "last", low=1, high=_MAX_NUMBER)
        answer = await _ask_trainer(self._rank(request), "flight")
        flight = await asyncio.to_thread(parse_flight, answer.get("recording"))
        if last is not None and isinstance(flight, dict) and isinstance(flight.get("entries"), list):
            flight = {**flight, "entries": flight["entries"][-last:]}
        return web.json_response(flight)

    async def exchange(self, request: web.Request) -> web.Response:
        """Answer with the trainer's recording of its newest exchanges with the other replicas."""
        return web.json_response(await _ask_trainer(self._rank(request), "exchange"))

    def _rank(self, request: web.Request) -> LocalRank:
        """Return the rank that the path names. Answers 404 where no trainer of it has attached here."""
        text, held = request.match_info.get("rank", "0"), self._ranks.held
        rank = held.get(int(text)) if text.isascii() and text.isdecimal() and len(text) < 10 else None
        if rank is None:
            numbers = ", ".join(map(str, sorted(held))) or "none"
            raise web.HTTPNotFound(text=f"this server has no rank {text[:40]}; its ranks: {numbers}")
        return rank

    def _find(self, request: web.Request) -> tuple[SharedSlot, SlotContent]:
        """Return the slot of the snapshot that the path names, and its content. Raises _NotHeld."""
        step = _step(request)
        generation = query_integer(request, "generation", low=0, high=_MAX_NUMBER)
        rank = self._rank(request)
        slot = rank.slots.find(SNAPSHOT, step, generation)
        if slot is not None and slot.content is not None:
            return slot, slot.content
        asked = "no snapshot is held yet" if step is None else f"the snapshot of step {step} is not held"
        if generation is not None:
            asked += f" in generation {generation}"
        raise _NotHeld(rank, SNAPSHOT, asked, gone=step is not None)


async def _ask_trainer(rank: LocalRank, what: str) -> dict[str, Any]:
    """Return the trainer's own answer. Answers 504 or 404 where there is none."""
    rank.probe.require_process()
    try:
        return await rank.probe.ask(what)
    except TrainerSilent as error:
        raise web.HTTPGatewayTimeout(text=str(error)) from error
    except Refused as error:
        raise web.HTTPNotFound(text=str(error)) from error


class _NotHeld(Gone):
    """No slot of ``rank`` holds what was asked for: the answer has these details."""

    def __init__(self, rank: LocalRank, kind: str, sentence: str, gone: bool) -> None:
        available = [c.step for c in rank.slots.contents(kind)]
        hint = f"held are steps {', '.join(map(str, available))}" if available else "none is held now"
        super().__init__(f"{sentence}: {hint}")
        self.details = {"available": available, "gone": gone}


def _listing(rank: LocalRank, kind: str) -> list[dict[str, object]]:
    now = time.monotonic()
    return [{**c.entry, "age_s": round(now - c.taken, 3)} for c in rank.slots.contents(kind)]


def _step(request: web.Request) -> int | None:
    """Return the step in the path, None for ``latest``. Raises ProtocolError."""
    text = request.match_info["step"]
    if text == "latest":
        return None
    if text.isascii() and text.isdecimal() and len(text) <= 18:
        return int(text)
    raise ProtocolError(f'"{text[:40]}" is no step: give a number or latest')


def _tensor(request: web.Request, content: SlotContent) -> TensorSpan:
    """Return the tensor that the path names, or answer 404; the name is only looked up."""
    name = request.match_info["tensor"]
    span = content.tensors.get(name)
    if span is not None:
        return span
    near = _near(name[:200], content.tensors)
    hint = f"did you mean {', '.join(near)}?" if near else "the manifest lists them"
    raise web.HTTPNotFound(text=f"step {content.step} has no tensor {name[:200]}: {hint}")


def _near(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three names similar to ``name``, from its neighbours in alphabetical order.

    A comparison with all of a hundred thousand names would block the server for seconds.
    """
    ordered = sorted(names)
    at = bisect(ordered, name)
    return difflib.get_close_matches(name, ordered[max(at - _NEIGHBOURS, 0) : at + _NEIGHBOURS], n=3)
