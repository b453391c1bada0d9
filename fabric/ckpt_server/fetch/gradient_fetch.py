"""Fetches reduced gradients: asks one source after the other, and waits only briefly for each.

A joining replica needs one gradient per step, and near the end of its catch-up the members wait for it. So,
while there are other sources, a slow source gets about a second, and is then asked last for a while.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fabric.ckpt_server.fetch.http_source import (
    LEAST_BYTES_PER_S,
    TRANSIENT,
    HttpAccess,
    HttpAddress,
    IdleConnections,
    SourceRefused,
    read_exactly,
    refusal,
)
from fabric.ckpt_server.fetch.multi_source import Source, all_failed, source_error
from fabric.ckpt_server.format.digest import SEAL, seal
from fabric.ckpt_server.format.manifest import DIGEST_DIGITS, is_hex
from fabric.ckpt_server.format.safetensors_file import is_count, parse_json
from fabric.errors import Gone, IntegrityError, StateError

_MAX_META_CHARACTERS = 60_000
_MAX_LAYOUT_CHARACTERS = 128
_TURN_S = 1.0  # how long one source may hold the request for a gradient while there are other sources
_LATE_S = 1.0  # the source's answer may take this much longer than the wait that the request names
_FAIR_BYTES_PER_S = 1e6  # the slowest transfer accepted while there are other sources
_WAIT_S = 50.0  # how long the last source may hold the request: servers answer within 60 s
_LAST_S = 30.0  # for this time the fetcher asks a source that answered too late only after all other sources


@dataclass(frozen=True, slots=True)
class GradientMeta:
    """The headers of a reduced gradient of ``nbytes`` verified bytes from ``source``."""

    generation: int
    step: int
    epoch: int
    weight: float
    digest: str
    layout: str
    nbytes: int
    meta: dict[str, Any]
    source: str


class GradientFetcher:
    """Asks sources for gradients; one fetch at a time."""

    def __init__(self, access: HttpAccess, idle: IdleConnections) -> None:
        self._access = access
        self._idle = idle
        self._late: dict[str, float] = {}  # URL -> the time until which this source is asked after all others

    def fetch(
        self,
        urls: Sequence[str],
        generation: int,
        step: int,
        into: memoryview,
        wait_s: float,
        digest: Callable[[memoryview], str],
    ) -> GradientMeta:
        """Implement ``StateFetcher.fetch_gradient``."""
        if into.readonly or not into.c_contiguous:
            raise StateError("A gradient needs writable, contiguous memory as its target.")
        sources = [Source(HttpAddress.parse(url)) for url in dict.fromkeys(urls)]
        if not sources:
            raise StateError(f"There is no source for the gradient of step {step}.")
        now = time.monotonic()
        late = [source for source in sources if self._late.get(source.url, now) > now]
        waiting = [source for source in sources if source not in late]
        deadline_s = now + wait_s
        while waiting or late:
            if not waiting:
                waiting, late = late, []
            source = waiting.pop(0)
            left_s = max(0.0, deadline_s - time.monotonic())
            if not left_s and source.failures:
                break
            try:
                meta = self._ask(source, generation, step, into.cast("B"), left_s=left_s, is_last=not waiting)
                _verify(digest(into.cast("B")[: meta.nbytes]), meta)
                self._late.pop(source.url, None)
                return meta
            except _NotYet:
                source.failures += 1
                waiting.append(source)
            except TimeoutError as error:
                if waiting:
                    self._late[source.url] = time.monotonic() + _LAST_S
                    late.append(source)
                else:
                    source.error = source_error(error)
            except (*TRANSIENT, StateError) as error:
                source.error = source_error(error)
            if self._access.sockets.closed:
                raise StateError("The fetch was cancelled; nothing was loaded.")
        if any(source.error is None for source in sources):
            raise StateError(f"The gradient of step {step} was not published within {wait_s:g} s.")
        raise all_failed(f"the gradient of step {step}", sources)

    def _ask(
        self, source: Source, generation: int, step: int, into: memoryview, *, left_s: float, is_last: bool
    ) -> GradientMeta:
        """Return the gradient from one source; wait for ``left_s``, or less if the source is not the last."""
        wait_s = min(left_s, _WAIT_S if is_last else _TURN_S)
        rest_s, rate = (
            (self._access.timeout_s, LEAST_BYTES_PER_S) if is_last else (_LATE_S, _FAIR_BYTES_PER_S)
        )
        connection = self._idle.take(source.address)
        complete = False
        try:
            path = f"/v1/gradients/{step}?generation={generation}&wait_s={wait_s:.3f}"
            with connection.within(wait_s + rest_s):
                response = connection.get(path, wait_s=wait_s)
                if response.status != 200:
                    error = refusal(response)
                    not_yet = response.status == 409 and not isinstance(error, Gone)
                    raise _NotYet(str(error)) if not_yet else error
            meta = _gradient_meta(response, generation, step, source.url)
            if not 0 < meta.nbytes <= len(into):
                raise SourceRefused(f"its gradient has {meta.nbytes} bytes where {len(into)} fit")
            with connection.within(rest_s + meta.nbytes / rate):
                read_exactly(response, into[: meta.nbytes])
            complete = True
        finally:
            self._idle.give(connection, reusable=complete)
        return meta


class _NotYet(StateError):
    """The source works, but does not have the gradient yet."""


def _verify(digest: str, meta: GradientMeta) -> None:
    if digest != meta.digest:
        raise IntegrityError("it sent wrong bytes")


def _number(text: str | None) -> int:
    value = int(text) if text is not None and len(text) <= 20 and text.isascii() and text.isdigit() else -1
    if not is_count(value, 1 << 62):
        raise SourceRefused("its gradient's headers are incomplete")
    return value


def _gradient_meta(response: Any, generation: int, step: int, url: str) -> GradientMeta:
    """Return the headers of a gradient, checked. Raises SourceRefused."""
    header = response.getheader
    if header(SEAL) != seal(header):
        raise IntegrityError("its gradient's headers are not what it sealed")
    if _number(header("X-Fabric-Generation")) != generation:
        raise SourceRefused("its gradient is of another generation")
    if _number(header("X-Fabric-Step")) != step:
        raise SourceRefused("its gradient is of another step")
    try:
        weight = float(header("X-Fabric-Weight") or "nan")
        text = header("X-Fabric-Meta") or "{}"
        meta = parse_json(text) if len(text) <= _MAX_META_CHARACTERS else None
    except (ValueError, StateError) as error:
        raise SourceRefused("its gradient's headers cannot be read") from error
    digest, layout = header("X-Fabric-Digest"), header("X-Fabric-Layout") or ""
    if not (
        math.isfinite(weight) and weight >= 0 and is_hex(digest, DIGEST_DIGITS) and isinstance(meta, dict)
    ):
        raise SourceRefused("its gradient's headers are incomplete")
    if len(layout) > _MAX_LAYOUT_CHARACTERS:
        raise SourceRefused("its gradient's layout is too long")
    epoch, nbytes = _number(header("X-Fabric-Epoch")), _number(header("Content-Length"))
    return GradientMeta(generation, step, epoch, weight, digest, layout, nbytes, meta, url)
