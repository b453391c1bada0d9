"""The fetch thread: fetches a snapshot or a published gradient, one at a time; a fetch can be cancelled."""

import threading
from collections.abc import Callable
from dataclasses import replace

import torch

from fabric.ckpt_server.fetch.fetcher import GradientMeta
from fabric.ckpt_server.format.manifest import bytes_digest
from fabric.client.process.worker import Worker
from fabric.client.state.gradient_pieces import PieceFetcher
from fabric.client.state.state_loader import FetchedState, NoSlotMemory, StateLoader, fetch_failure
from fabric.errors import FabricError, Gone
from fabric.protocol.messages import member_events as io
from fabric.runtime.failpoints import Failpoints

# Seconds of one long poll, within the server's limit. After a poll without result the core asks again.
_WAIT_S = 20.0
# The pause after a fetch failed on this host: every try needs a new epoch, and the next may fail too.
_PAUSE_S = 1.0


class FetchThread:
    """Performs FetchState and FetchGradient; the results are in ``take_state`` and ``gradient``."""

    def __init__(
        self,
        state_loader: StateLoader,
        gradient_bytes: int,
        points: Failpoints,
        on_crash: Callable[[BaseException], None],
        pieces: PieceFetcher | None = None,
        digest: Callable[[memoryview], str] = bytes_digest,
    ) -> None:
        """``digest``: the digest by which the members of this job name gradients."""
        self._state_loader = state_loader
        # A cancelled fetcher cannot work again: its sockets are shut down.
        self._fetcher = state_loader.make_fetcher()
        self._gradient_bytes = gradient_bytes
        self._digest = digest
        self.pieces = pieces  # reads gradients of other layouts, where replicas have unequal layouts
        self._points = points
        self._worker = Worker("fabric-fetch", on_crash, background=True)
        self._wanted = 0
        self._closing = threading.Event()
        self.buffer: torch.Tensor | None = None
        self._state: FetchedState | None = None
        self.gradient: GradientMeta | None = None

    def fetch_state(self, order: io.FetchState, post: Callable[[io.Event], None]) -> None:
        """Queue the fetch of a snapshot."""
        self._worker.submit(lambda: self._fetch_state(order, post))

    def _fetch_state(self, order: io.FetchState, post: Callable[[io.Event], None]) -> None:
        self._points.hit("fetch", order.state.step)
        unused = self.take_state()
        if unused is not None:
            self._state_loader.drop(unused)
        try:
            self._state = self._state_loader.load(order, self._fetcher)
        except FabricError as error:
            if isinstance(error, NoSlotMemory):
                self._closing.wait(_PAUSE_S)
            post(fetch_failure(order, error))
            return
        post(io.StateFetched(order.state.step, order.state.digest))

    def take_state(self) -> FetchedState | None:
        """Return the fetched state, which the caller loads or drops; the next call returns None."""
        state, self._state = self._state, None
        return state

    def fetch_gradient(self, order: io.FetchGradient, post: Callable[[io.Event], None]) -> None:
        """Queue the fetch of one gradient. ``cancel`` voids all fetches queued before it."""
        ticket = self._wanted = self._wanted + 1
        self._worker.submit(lambda: self._fetch_gradient(order, ticket, post))

    def _fetch_gradient(self, order: io.FetchGradient, ticket: int, post: Callable[[io.Event], None]) -> None:
        if ticket != self._wanted:
            return
        if self.buffer is None:
            self.buffer = torch.zeros(self._gradient_bytes, dtype=torch.uint8, device="cpu")
        try:
            meta = self._read_gradient(order, self.buffer)
        except Gone as error:
            if ticket == self._wanted:
                post(io.GradientGone(order.step, gone=True, why=str(error)))
            return
        except FabricError as error:
            # No server has published the gradient yet, or no source answers now: the core asks again.
            if ticket == self._wanted:
                post(io.GradientGone(order.step, gone=False, why=str(error)))
            return
        self.gradient = meta
        post(io.GradientFetched(order.step, meta.digest))

    def _read_gradient(self, order: io.FetchGradient, into: torch.Tensor) -> GradientMeta:
        if self.pieces is not None:
            return self.pieces.fetch(self._fetcher, order, into, _WAIT_S, self._digest)
        meta = self._fetcher.fetch_gradient(
            order.urls,
            generation=order.generation,
            step=order.step,
            into=into.numpy().data,
            wait_s=_WAIT_S,
            digest=self._digest,
        )
        return replace(meta, digest=str(meta.meta.get("round_digest", meta.digest)))

    def as_prepared(self) -> io.PreparedRound:
        """Return the fetched gradient as the prepared round in which its members computed it."""
        gradient = self.gradient
        assert gradient is not None
        contributions = gradient.meta.get("contributions", {})
        return io.PreparedRound(
            epoch=gradient.epoch,
            step=gradient.step,
            gradient_digest=gradient.digest,
            weight=gradient.weight,
            contributions=tuple((str(k), tuple(v)) for k, v in contributions.items()),
            metrics=tuple(sorted(gradient.meta.get("metrics", {}).items())),
            nonfinite=str(gradient.meta.get("nonfinite", "")),
        )

    def cancel(self) -> None:
        """Cancel the gradient fetch under way."""
        self._wanted += 1
        spent, self._fetcher = self._fetcher, self._state_loader.make_fetcher()
        spent.cancel()

    def close(self) -> None:
        self._closing.set()
        self.cancel()
        self._worker.close(within_s=1.0)
