"""Fetches state and gradients from checkpoint servers, from several at the same time.

A joining replica asks every source for the manifest at once. It takes the state from all sources whose
manifest has the wanted digest; the manifest verifies each block as it arrives. The reader checks the manifest
before it allocates memory. Bytes go from the socket straight to their place in the file. A fetch of the same
state after a failed fetch keeps the blocks that are already in place.

All calls block, so make them in a thread of their own; any thread may call ``cancel``.
"""

import contextlib
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from fabric.ckpt_server.fetch.gradient_fetch import GradientFetcher, GradientMeta
from fabric.ckpt_server.fetch.http_source import (
    TRANSIENT,
    HttpAccess,
    HttpAddress,
    HttpConnection,
    IdleConnections,
    SourceRefused,
    refusal,
)
from fabric.ckpt_server.fetch.local_source import HostMemory
from fabric.ckpt_server.fetch.multi_source import MultiSourceFetch, Progress, Source, all_failed, source_error
from fabric.ckpt_server.format.digest import bytes_digest
from fabric.ckpt_server.format.manifest import check_manifest, state_digest
from fabric.ckpt_server.format.safetensors_file import MAX_FILE_BYTES
from fabric.errors import ConfigError, IntegrityError, StateError
from fabric.model import SnapshotRef
from fabric.runtime.http.token_file import TokenFile

__all__ = ["FetchResult", "GradientMeta", "StateFetcher"]

_MAX_MANIFEST_BYTES = 128 << 20
_MANIFEST_GRACE_S = 2.0  # how long the fetcher waits for other manifests after the first manifest
_MANIFEST_TRIES = 3


@dataclass(frozen=True, slots=True)
class FetchResult:
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
    per source; a connection waits up to ``timeout_s`` for bytes. ``progress(received, nbytes)`` is called in
    the fetching thread. States larger than ``max_nbytes`` are refused. ``rank``: fetch this rank's part, from
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
        progress: Progress | None = None,
        ssl_context: ssl.SSLContext | None = None,
        max_nbytes: int = MAX_FILE_BYTES,
        rank: int = 0,
    ) -> None:
        if streams_per_source < 1 or range_bytes < 1 or not timeout_s > 0:
            raise ConfigError(
                "A fetch needs at least one stream per source, a range size and a timeout above 0."
            )
        tokens = TokenFile.of(token)
        if not (shown := tokens.shown()).isascii() or not shown.isprintable():
            raise ConfigError("The token contains characters that cannot be sent; check the token file.")
        self._access = HttpAccess(tokens, timeout_s, ssl_context)
        self._streams = streams_per_source
        self._range_bytes = range_bytes
        self._progress = progress
        self._max_nbytes = max_nbytes
        self._rank = rank
        self.same_host = True
        self._unfinished = ""
        self._idle = IdleConnections(self._access)
        self._gradients = GradientFetcher(self._access, self._idle)
        self.warnings: list[str] = []

    def cancel(self) -> None:
        """End every transfer at once; the fetcher cannot be used afterwards."""
        self._access.sockets.shutdown()
        self._idle.close()

    @property
    def is_cancelled(self) -> bool:
        return self._access.sockets.closed

    def close(self) -> None:
        """Close idle connections."""
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
        compression = self._stripe(manifest, good, _allocated(allocate, manifest["nbytes"]), blocks)
        received = {source.url: source.nbytes for source in sources}
        seconds = time.monotonic() - begun_s
        warnings = tuple(self.warnings)
        return FetchResult(manifest["nbytes"], seconds, received, manifest, warnings, compression)

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
        return self._gradients.fetch(urls, generation, step, into, wait_s, digest)

    def _stripe(
        self,
        manifest: dict[str, Any],
        group: list[Source],
        target: memoryview,
        blocks: Collection[int] | None,
    ) -> str:
        """Fetch the manifest's bytes from the group, from this host alone if possible. Return whether they
        came compressed, and why."""
        try:
            near = self._near(manifest, group)
            if 0 < len(near) < len(group):
                with contextlib.suppress(StateError):
                    return self._stripe_over(manifest, near, target, blocks)
                self._require_running()
            return self._stripe_over(manifest, [s for s in group if s.error is None] or group, target, blocks)
        finally:
            for source in group:
                if source.memory is not None:
                    source.memory.close()

    def _near(self, manifest: dict[str, Any], group: list[Source]) -> list[Source]:
        """Return the sources of the group whose memory can be read."""
        if not self.same_host:
            return []
        state = SnapshotRef(manifest["generation"], manifest["step"], manifest["digest"])
        for source in group:
            source.memory = HostMemory.find(
                source.address.place, state, self._access.token, manifest["nbytes"]
            )
        return [source for source in group if source.memory is not None]

    def _stripe_over(
        self,
        manifest: dict[str, Any],
        group: list[Source],
        target: memoryview,
        blocks: Collection[int] | None,
    ) -> str:
        striping = MultiSourceFetch(manifest, group, target, self._access, self._idle)
        resume = self._unfinished == manifest["digest"]
        self._unfinished = manifest["digest"]
        try:
            striping.run(self._streams, self._range_bytes, self._progress, resume=resume, wanted=blocks)
        finally:
            self.warnings += striping.warnings
        self._unfinished = ""
        return striping.compression

    def _holders(
        self, sources: list[Source], state: SnapshotRef
    ) -> tuple[dict[str, Any] | None, list[Source]]:
        """Return the manifest of ``state`` and its sources; None without a source, with reasons in the
        sources."""
        promised: dict[str, Any] | None = None
        good: list[Source] = []
        for source, manifest in self._manifests(sources, state):
            if state_digest(manifest) != state.digest or manifest.get("rank", 0) != self._rank:
                source.error = IntegrityError(f"it holds the digest {state_digest(manifest)} for this step")
                self.warnings.append(
                    f"{source.url} is not used: {source.error}, and {state.digest} is asked for."
                )
                continue
            if promised is not None and manifest["digest"] != promised["digest"]:
                # One content digest may belong to several files: each layout of ranks has a file of its own.
                source.error = IntegrityError("it holds that state in another layout of ranks")
                continue
            promised = manifest  # any of the manifests will do: equal digests promise equal bytes
            good.append(source)
        return promised, good

    def _manifests(self, sources: list[Source], state: SnapshotRef) -> list[tuple[Source, dict[str, Any]]]:
        """Return the manifests of the sources that answer in time."""
        if len(sources) == 1:
            answers = [self._ask(sources[0], state, self._idle.take(sources[0].address))]
        else:
            answers = self._ask_all(sources, state)
        self._require_running()
        manifests = []
        for source, manifest in zip(sources, answers, strict=True):
            if manifest is not None:
                manifests.append((source, manifest))
            else:
                self.warnings.append(f"{source.url} is not used: {source.error}.")
        return manifests

    def _ask_all(self, sources: list[Source], state: SnapshotRef) -> list[dict[str, Any] | None]:
        """Ask all sources at once; None for a source without an answer, or with a much later one."""
        lines = [self._idle.take(source.address) for source in sources]
        with ThreadPoolExecutor(len(sources), "fabric-manifest") as pool:
            asked: list[Future[dict[str, Any] | None]] = [
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
                manifest = check_manifest(line.read_json(response, _MAX_MANIFEST_BYTES), self._max_nbytes)
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
        if self._access.sockets.closed:
            raise StateError("The fetch was cancelled; nothing was loaded.")


def _allocated(allocate: Callable[[int], memoryview], nbytes: int) -> memoryview:
    memory = allocate(nbytes)
    if memory.readonly or not memory.c_contiguous or memory.nbytes < nbytes:
        raise StateError(f"The memory for a state of {nbytes} bytes is too small or not writable.")
    return memory.cast("B")[:nbytes]
