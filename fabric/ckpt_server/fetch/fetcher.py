"""Fetches state and gradients from checkpoint servers, from several at the same time.

A joining replica asks every source for the manifest at once. It takes the state from all sources whose
manifest has the wanted digest; the manifest verifies each block as it arrives. The reader checks the manifest
before it allocates memory. Bytes go from the socket straight to their place in the file. A fetch of the same
state after a failed fetch keeps the blocks that are already in place.

All calls block, so make them in a thread of their own; any thread may call ``cancel``.
"""

import contextlib
import math
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from fabric.ckpt_server.fetch.http_source import (
    LEAST_BYTES_PER_S,
    TRANSIENT,
    HttpAccess,
    HttpAddress,
    HttpConnection,
    IdleConnections,
    SourceRefused,
    read_exactly,
    refusal,
)
from fabric.ckpt_server.fetch.multi_source import (
    HostMemory,
    MultiSourceFetch,
    Source,
    all_failed,
    source_error,
)
from fabric.ckpt_server.format.manifest import (
    DIGEST_DIGITS,
    SEAL,
    bytes_digest,
    check_manifest,
    is_hex,
    seal,
    state_digest,
)
from fabric.ckpt_server.format.safetensors_file import is_count, parse_json
from fabric.errors import ConfigError, Gone, IntegrityError, StateError
from fabric.model import SnapshotRef, Value
from fabric.runtime.http.token_file import TokenFile

# The fetcher asks one source after the other for a reduced gradient, and waits only briefly for each.
#
# A joining replica needs one gradient per step, and near the end of its catch-up the members wait for it.
# So, while there are other sources, a slow source gets about a second, and is then asked last for a while.

_MAX_META_CHARACTERS = 60_000
_MAX_LAYOUT_CHARACTERS = 128
_TURN_S = 1.0  # how long one source may hold the request for a gradient while there are other sources
_LATE_S = 1.0  # the source's answer may take this much longer than the wait that the request names
_FAIR_BYTES_PER_S = 1e6  # the slowest transfer accepted while there are other sources
_WAIT_S = 50.0  # how long the last source may hold the request: servers answer within 60 s
_LAST_S = 30.0  # for this time the fetcher asks a source that answered too late only after all other sources


class GradientMeta(Value):
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


class _NotYet(StateError):
    """The source works, but does not have the gradient yet."""


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


_MAX_MANIFEST_BYTES = 128 << 20
_MANIFEST_GRACE_S = 2.0  # how long the fetcher waits for other manifests after the first manifest
_MANIFEST_TRIES = 3


class FetchResult(Value):
    """A complete and verified state. ``sources``: the bytes from each URL. ``compression``: whether the last
    bytes came compressed, and why."""

    nbytes: int
    seconds: float
    sources: dict[str, int]
    manifest: dict[str, Any]
    warnings: tuple[str, ...] = ()
    compression: str = ""


class StateFetcher:
    """Fetches from checkpoint servers until it is cancelled; one fetch at a time.

    ``token`` empty means none. Ranges of at most ``range_bytes`` come over ``streams_per_source`` connections
    per source; a connection waits up to ``timeout_s`` for bytes. ``rank``: fetch this rank's part, from
    servers of that rank; a wanted digest is always of the full state. ``same_host``: read the memory of a
    server on this host directly.
    """

    def __init__(
        self,
        token: TokenFile | str = "",
        *,
        streams_per_source: int = 2,
        range_bytes: int = 64 << 20,
        timeout_s: float = 30.0,
        ssl_context: ssl.SSLContext | None = None,
        rank: int = 0,
    ) -> None:
        tokens = TokenFile.of(token)
        if not (shown := tokens.shown()).isascii() or not shown.isprintable():
            raise ConfigError("The token contains characters that cannot be sent; check the token file.")
        self._access = HttpAccess(tokens, timeout_s, ssl_context)
        self._streams = streams_per_source
        self._range_bytes = range_bytes
        self._rank = rank
        self.same_host = True
        self._unfinished = ""
        self._idle = IdleConnections(self._access)
        # URL -> the time until which this source is asked for gradients after all others
        self._late: dict[str, float] = {}
        self.warnings: list[str] = []

    def cancel(self) -> None:
        """End every transfer at once; the fetcher cannot be used afterwards."""
        self._access.cancel()
        self._idle.close()

    @property
    def is_cancelled(self) -> bool:
        return self._access.is_cancelled

    def close(self) -> None:
        self._idle.close()

    def fetch_manifest(self, url: str, step: int, generation: int) -> dict[str, Any]:
        """Return the checked manifest of that state from the source ``url``. Raises StateError or Gone."""
        source = Source(HttpAddress.parse(url))
        manifest = self._ask(source, SnapshotRef(generation, step, ""), self._idle.take(source.address))
        if manifest is None:
            raise all_failed(f"the manifest of step {step}", [source])
        return manifest

    def fetch_state(
        self,
        urls: Sequence[str],
        state: SnapshotRef,
        allocate: Callable[[int], memoryview],
        blocks: Collection[int] | None = None,
    ) -> FetchResult:
        """Fetch ``state`` from ``urls`` into ``allocate(nbytes)`` (writable, at least that long).

        ``blocks``: fetch only these blocks, and leave all other memory as it is. Raises Gone when every
        source has dropped the state, IntegrityError when the sources hold other bytes, else StateError. Each
        error has every source's reason. Verified blocks stay in the memory after an error; the next call for
        the same state does not fetch them again.
        """
        begun_s = time.monotonic()
        self.warnings = []
        sources = [Source(HttpAddress.parse(url)) for url in dict.fromkeys(urls)]
        if not sources:
            raise StateError(
                f"There is no source for step {state.step}; a checkpoint server must hold a snapshot of it."
            )
        manifest, good = self._holders(sources, state)
        if manifest is None:
            raise all_failed(f"step {state.step}", sources)
        nbytes, memory = manifest["nbytes"], allocate(manifest["nbytes"])
        if memory.readonly or not memory.c_contiguous or memory.nbytes < nbytes:
            raise StateError(f"The memory for a state of {nbytes} bytes is too small or not writable.")
        compression = self._stripe(manifest, good, memory.cast("B")[:nbytes], blocks)
        received = {source.url: source.nbytes for source in sources}
        seconds = time.monotonic() - begun_s
        warnings = tuple(self.warnings)
        return FetchResult(nbytes, seconds, received, manifest, warnings, compression)

    def fetch_gradient(
        self,
        urls: Sequence[str],
        *,
        generation: int,
        step: int,
        into: memoryview,
        wait_s: float = 0.0,
        digest: Callable[[memoryview], str] = bytes_digest,
    ) -> GradientMeta:
        """Fetch the reduced gradient of ``step`` into ``into``, and verify it by ``digest``.

        Ask one source after the other; wait up to ``wait_s`` until a source publishes the gradient. Raises
        Gone when every source has dropped the gradient, else StateError; then ``into`` is undefined.
        """
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
                meta = self._ask_gradient(
                    source, generation, step, into.cast("B"), digest, left_s=left_s, is_last=not waiting
                )
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
            self._require_running()
        if any(source.error is None for source in sources):
            raise StateError(f"The gradient of step {step} was not published within {wait_s:g} s.")
        raise all_failed(f"the gradient of step {step}", sources)

    def _ask_gradient(
        self,
        source: Source,
        generation: int,
        step: int,
        into: memoryview,
        digest: Callable[[memoryview], str],
        *,
        left_s: float,
        is_last: bool,
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
        if digest(into[: meta.nbytes]) != meta.digest:
            raise IntegrityError("it sent wrong bytes")
        return meta

    def _stripe(
        self,
        manifest: dict[str, Any],
        group: list[Source],
        target: memoryview,
        blocks: Collection[int] | None,
    ) -> str:
        """Fetch the manifest's bytes from the group, from this host alone if possible. Return whether they
        came compressed, and why."""

        def over(sources: list[Source]) -> str:
            striping = MultiSourceFetch(manifest, sources, target, self._access, self._idle)
            resume = self._unfinished == manifest["digest"]
            self._unfinished = manifest["digest"]
            try:
                striping.run(self._streams, self._range_bytes, resume=resume, wanted=blocks)
            finally:
                self.warnings += striping.warnings
            self._unfinished = ""
            return striping.compression

        try:
            if self.same_host:
                state = SnapshotRef(manifest["generation"], manifest["step"], manifest["digest"])
                token = self._access.tokens.shown()
                for source in group:
                    place = source.address.place
                    source.memory = HostMemory.find(place, state, token, manifest["nbytes"])
            near = [source for source in group if source.memory is not None]
            if 0 < len(near) < len(group):
                with contextlib.suppress(StateError):
                    return over(near)
                self._require_running()
            return over([source for source in group if source.error is None] or group)
        finally:
            for source in group:
                if source.memory is not None:
                    source.memory.close()

    def _holders(
        self, sources: list[Source], state: SnapshotRef
    ) -> tuple[dict[str, Any] | None, list[Source]]:
        """Return the manifest of ``state`` and its sources; None without a source, with reasons in the
        sources."""
        promised: dict[str, Any] | None = None
        good: list[Source] = []
        for source, manifest in zip(sources, self._ask_all(sources, state), strict=True):
            if manifest is None:
                self.warnings.append(f"{source.url} is not used: {source.error}.")
            elif state_digest(manifest) != state.digest or manifest.get("rank", 0) != self._rank:
                source.error = IntegrityError(f"it holds the digest {state_digest(manifest)} for this step")
                self.warnings.append(
                    f"{source.url} is not used: {source.error}, and {state.digest} is asked for."
                )
            elif promised is not None and manifest["digest"] != promised["digest"]:
                # One content digest may belong to several files: each layout of ranks has a file of its own.
                source.error = IntegrityError("it holds that state in another layout of ranks")
            else:
                promised = manifest  # any of the manifests will do: equal digests promise equal bytes
                good.append(source)
        return promised, good

    def _ask_all(self, sources: list[Source], state: SnapshotRef) -> list[dict[str, Any] | None]:
        """Ask all sources at once; None for a source without an answer, or with a much later one."""
        lines = [self._idle.take(source.address) for source in sources]
        with ThreadPoolExecutor(len(sources), "fabric-manifest") as pool:
            asked = [
                pool.submit(self._ask, source, state, line)
                for source, line in zip(sources, lines, strict=True)
            ]
            late = set(asked)
            while late and not any(
                future.done() and (future.exception() is not None or future.result() is not None)
                for future in asked
            ):
                late = wait(late, return_when="FIRST_COMPLETED").not_done
            late = wait(late, timeout=_MANIFEST_GRACE_S).not_done
            for line, future in zip(lines, asked, strict=True):
                if future in late:
                    line.retire()
        self._require_running()
        return [None if future in late else future.result() for future in asked]

    def _ask(self, source: Source, state: SnapshotRef, line: HttpConnection) -> dict[str, Any] | None:
        """Return the source's manifest, or None with the reason in ``source.error``."""
        step, generation = state.step, state.generation
        path = f"/v1/snapshots/{step}/manifest?generation={generation}&tensors=0"
        for _ in range(_MANIFEST_TRIES):
            complete = False
            try:
                with line.within(self._access.timeout_s):
                    response = line.get(path)
                    if response.status != 200:
                        raise refusal(response)
                manifest = check_manifest(line.read_json(response, _MAX_MANIFEST_BYTES))
                if (manifest["step"], manifest["generation"]) != (step, generation):
                    raise SourceRefused("it answers with another step or generation")
                manifest.pop("tensors", None)  # the loader reads the tensors from the file's own header
                complete = True
                return manifest
            except (*TRANSIENT, StateError) as error:
                source.error = source_error(error)
                if source.error is error:
                    return None
            finally:
                self._idle.give(line, reusable=complete)
        return None

    def _require_running(self) -> None:
        if self._access.is_cancelled:
            raise StateError("The fetch was cancelled; nothing was loaded.")
