"""Sends a slot's bytes over HTTP straight from shared memory, and never bytes that are being overwritten.

Large pieces go to the transport as views of the memory, each after the transport has sent the piece before.
The transport's high-water mark is zero, so a slow reader costs no memory. A small piece would stay in the
transport's buffer while the handler goes on, so it is sent as a copy. A transfer that has returned or failed
holds no reference to the memory, so a withdrawal waits for the transfer's end.

Two threads of low priority compress bytes, or gather bytes from many places of a tensor, piece by piece. When
a transfer ends early, its thread may still read memory that the trainer writes again; its result is dropped.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import BoundedSemaphore
from typing import TypeVar

from aiohttp import web
from prometheus_client import Counter

from fabric.ckpt_server.format.safetensors_file import ELEMENT_BYTES, TensorSpan
from fabric.ckpt_server.format.tensor_slices import SliceBounds, contiguous_from, elements, gather, slice_text
from fabric.ckpt_server.server.metrics import CkptMetrics
from fabric.ckpt_server.server.slots import SharedSlot
from fabric.ckpt_server.wire.compression import IDENTITY, ZSTD, Compressor, choose
from fabric.ckpt_server.wire.compression import PIECE_BYTES as WORK_BYTES
from fabric.ckpt_server.wire.http_preconditions import check_if_match, etag, is_unchanged, wanted_range
from fabric.runtime.http.http_service import STALL_S
from fabric.runtime.priority import lower_priority

PIECE_BYTES = 4 * 1024 * 1024
# With a larger piece aiohttp waits for the transport. The first piece is joined to the response's head.
_COPY_BYTES = 64 * 1024
_STREAMS = BoundedSemaphore(8)
_WORKERS = ThreadPoolExecutor(2, "fabric-work", lower_priority)


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A part of a slot's bytes: ``nbytes`` from ``begin``, or the ``box`` of the tensor at ``span``."""

    begin: int
    nbytes: int
    tag: str = ""  # makes this answer's ETag differ from the ETag of the full content
    width: int = 4  # bytes of an element; 4 for several tensors, which suits 16-bit elements too
    headers: Mapping[str, str] = field(default_factory=dict)
    span: TensorSpan | None = None
    box: SliceBounds = ()

    @classmethod
    def of_tensor(cls, span: TensorSpan, box: SliceBounds | None = None) -> "Excerpt":
        """Return a whole tensor, or the part of it in ``box``."""
        width = ELEMENT_BYTES[span.dtype]
        shape = span.shape if box is None else tuple(end - begin for begin, end in box)
        headers = {"X-Fabric-Dtype": span.dtype, "X-Fabric-Shape": ",".join(map(str, shape))}
        tag = f"-{span.begin}"
        if box is None:
            return cls(span.begin, span.end - span.begin, tag, width, headers)
        tag += "-" + slice_text(box).replace(",", "_")
        nbytes, first = elements(box) * width, contiguous_from(box, span.shape)
        if first is not None:
            return cls(span.begin + first * width, nbytes, tag, width, headers)
        return cls(span.begin, nbytes, tag, width, headers, span, box)

    def pieces(self, view: memoryview, begin: int, end: int, most: int) -> Iterator[memoryview]:
        """Yield bytes ``begin`` to ``end`` of the excerpt, of the slot's ``view``."""
        if self.span is None:
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
    the connection ended early (the slot was withdrawn, the reader left or stalled). Raises
    PreconditionFailed, Unsatisfiable and ProtocolError for bad headers.
    """
    is_whole = request.method == "GET" and "Range" not in request.headers
    wanted = choose(request.headers.get("Accept-Encoding")) if is_whole else IDENTITY
    with _room_for(wanted) as coding:
        return await _send(request, slot, metrics, excerpt, coding)


@contextmanager
def _room_for(coding: str) -> Iterator[str]:
    """Give the coding to use: only few transfers at a time get ZSTD, which keeps some MiB for each."""
    streams = coding == ZSTD and _STREAMS.acquire(blocking=False)
    try:
        yield coding if streams or coding != ZSTD else IDENTITY
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
    with metrics.transfer(slot.kind) as sent, slot.reading(transport.abort) as view:
        # TLS keeps its own copy of the bytes: with a high-water mark of zero its transport would stay paused.
        transport.set_write_buffer_limits(high=1 if transport.get_extra_info("sslcontext") else 0)
        await response.prepare(request)
        line = _SlotTransfer(response, transport, slot, sent)
        if request.method != "HEAD":
            if coding != IDENTITY:
                await line.send_compressed(
                    excerpt.pieces(view, begin, end, WORK_BYTES), coding, excerpt.width
                )
            elif excerpt.span is not None:
                await line.send_gathered(excerpt.pieces(view, begin, end, WORK_BYTES))
            else:
                await line.send_views(excerpt.pieces(view, begin, end, PIECE_BYTES))
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

    async def send_views(self, pieces: Iterator[memoryview]) -> None:
        """Send views of the memory; the first is small, because it is joined to the head."""
        first = True
        for piece in pieces:
            if first:
                first = False
                await self._write(bytes(piece[:_COPY_BYTES]))
                piece = piece[_COPY_BYTES:]  # noqa: PLW2901  (what is left of it)
            if len(piece):
                await self._write(bytes(piece) if len(piece) <= _COPY_BYTES else piece)

    async def send_gathered(self, pieces: Iterator[memoryview]) -> None:
        """Send pieces that other threads gather."""
        while (piece := await work(lambda: next(pieces, None))) is not None:
            await self._write(piece)

    async def send_compressed(self, pieces: Iterator[memoryview], coding: str, width: int) -> None:
        """Send pieces in a content coding."""
        compressor = await work(lambda: Compressor(coding, width))

        def pack_next() -> bytes | None:
            piece = next(pieces, None)
            return None if piece is None else compressor.pack(piece)

        while (packed := await work(pack_next)) is not None:
            await self._write(packed)
        await self._write(compressor.end())

    async def _write(self, piece: bytes | memoryview) -> None:
        if self._slot.version != self._version:
            raise ConnectionResetError(
                f"{self._slot.kind} slot {self._slot.index} was withdrawn while it was being sent"
            )
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
            self._transport.abort()
            raise ConnectionResetError(f"the reader took nothing for {STALL_S:g} s") from None


_T = TypeVar("_T")


async def work(make: Callable[[], _T]) -> _T:
    """Run ``make()`` in one of the threads of low priority; return its result or raise its error."""
    return await asyncio.get_running_loop().run_in_executor(_WORKERS, make)
