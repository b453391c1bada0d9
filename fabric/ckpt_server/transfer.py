"""Sends a slot's bytes over HTTP straight from shared memory, and never bytes that are being overwritten.

Large pieces go to the transport as views of the memory, and the next one only when the transport holds
nothing of the last: its high-water mark is zero, so a slow reader costs no memory. A small piece would
be left in the transport's buffer while the handler goes on, so it is sent as a copy. When the transfer
returns or fails, nothing of ours refers to the memory any more; that is what lets a withdrawal wait for it.
"""

import asyncio

from aiohttp import web
from prometheus_client import Counter

from fabric.ckpt_server.conditions import check_if_match, etag, is_unchanged, wanted_range
from fabric.ckpt_server.layout import TensorSpan
from fabric.ckpt_server.memory import Slot
from fabric.ckpt_server.metrics import Metrics

PIECE_BYTES = 4 * 1024 * 1024
# The web framework waits for the transport after more than this, and joins the first piece to the
# response's head.
_COPY_BYTES = 64 * 1024
# A reader that takes no whole piece in this time is cut off: it would keep the slot from being re-used.
STALL_S = 60.0


async def send(
    request: web.Request, slot: Slot, metrics: Metrics, part: TensorSpan | None = None
) -> web.StreamResponse:
    """Answer ``request`` with the content of ``slot`` (or one tensor, ``part`` of it), or the range of that
    which was asked for.

    Raises ConnectionResetError when the connection ended early (the slot was withdrawn, the reader left
    or stalled), PreconditionFailed, Unsatisfiable and ProtocolError for what the headers ask.
    """
    content = slot.content
    assert content is not None
    first, nbytes = (0, content.nbytes) if part is None else (part.begin, part.end - part.begin)
    tag = etag(content.digest if part is None else f"{content.digest}-{part.begin}")
    check_if_match(request.headers.get("If-Match"), tag)
    if is_unchanged(request.headers.get("If-None-Match"), tag):
        return web.Response(status=304, headers={"ETag": tag})
    span = None
    if request.method == "GET":
        headers = request.headers
        span = wanted_range(headers.get("Range"), headers.get("If-Range"), tag, nbytes)
    begin, end = span or (0, nbytes)
    response = web.StreamResponse(status=200 if span is None else 206, headers=content.headers)
    response.headers.update({"Accept-Ranges": "bytes", "ETag": tag, "Cache-Control": "no-store"})
    if part is not None:
        response.headers["X-Fabric-Dtype"] = part.dtype
        response.headers["X-Fabric-Shape"] = ",".join(map(str, part.shape))
    if span is not None:
        response.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{nbytes}"
    response.content_type = "application/octet-stream"
    response.content_length = end - begin
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the reader has gone before it was answered")
    with metrics.transfer(slot.kind) as sent, slot.reading(transport.abort) as view:
        transport.set_write_buffer_limits(high=0)
        await response.prepare(request)
        if request.method != "HEAD":
            await _send_bytes(response, transport, view[first + begin : first + end], slot, sent)
        await response.write_eof()
    return response


async def _send_bytes(
    response: web.StreamResponse,
    transport: asyncio.Transport,
    view: memoryview,
    slot: Slot,
    sent: Counter,
) -> None:
    version, at = slot.version, 0
    while at < len(view):
        if slot.version != version:
            raise ConnectionResetError(f"{slot.kind} slot {slot.index} was withdrawn while it was being sent")
        piece: bytes | memoryview = view[at : at + (PIECE_BYTES if at else _COPY_BYTES)]
        at += len(piece)
        if len(piece) <= _COPY_BYTES:
            piece = bytes(piece)
        try:
            async with asyncio.timeout(STALL_S):
                await response.write(piece)
        except TimeoutError:
            transport.abort()
            raise ConnectionResetError(f"the reader took nothing for {STALL_S:g} s") from None
        sent.inc(len(piece))
