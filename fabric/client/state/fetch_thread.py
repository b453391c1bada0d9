"""The transfer thread: fetches a snapshot or one published gradient at a time, and can be cancelled."""

import threading
from collections.abc import Callable

import torch

from fabric.ckpt_server.fetch.fetcher import GradientMeta
from fabric.client.process.worker import Worker
from fabric.client.state.state_loader import FetchedState, NoSlotMemory, StateLoader, fetch_failure
from fabric.errors import FabricError, Gone
from fabric.protocol.messages import member_events as io
from fabric.runtime.failpoints import Failpoints

# A long poll shorter than the server's bound; the core asks again.
_WAIT_S = 20.0
# After trouble of this host's own: an epoch is formed for every try, and the next one may fail alike.
_PAUSE_S = 1.0


class FetchThread:
    """Performs FetchState and FetchGradient; what arrived is in ``state`` and ``gradient``."""

    def __init__(
        self,
        state_loader: StateLoader,
        gradient_bytes: int,
        points: Failpoints,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._state_loader = state_loader
        # A cancelled fetcher is spent: its sockets are shut down for good.
        self._fetcher = state_loader.make_fetcher()
        self._gradient_bytes = gradient_bytes
        self._points = points
        self._worker = Worker("fabric-fetch", on_crash, background=True)
        self._wanted = 0
        self._closing = threading.Event()
        self.buffer: torch.Tensor | None = None
        self.state: FetchedState | None = None
        self.gradient: GradientMeta | None = None
        self.generation = 0  # of that gradient, whatever has been decided since

    def fetch_state(self, order: io.FetchState, post: Callable[[io.Event], None]) -> None:
        """Queue a snapshot's fetch."""
        self._worker.submit(lambda: self._fetch_state(order, post))

    def _fetch_state(self, order: io.FetchState, post: Callable[[io.Event], None]) -> None:
        self._points.hit("fetch", order.state.step)
        self.state = None
        try:
            self.state = self._state_loader.load(order, self._fetcher)
        except FabricError as error:
            if isinstance(error, NoSlotMemory):
                self._closing.wait(_PAUSE_S)
            post(fetch_failure(order, error))
            return
        post(io.StateFetched(order.state.step, order.state.digest))

    def fetch_gradient(self, order: io.FetchGradient, post: Callable[[io.Event], None]) -> None:
        """Queue one gradient's fetch; CancelFetch makes those queued before it void."""
        ticket = self._wanted = self._wanted + 1
        self._worker.submit(lambda: self._fetch_gradient(order, ticket, post))

    def _fetch_gradient(self, order: io.FetchGradient, ticket: int, post: Callable[[io.Event], None]) -> None:
        if ticket != self._wanted:
            return
        if self.buffer is None:
            self.buffer = torch.zeros(self._gradient_bytes, dtype=torch.uint8)
        try:
            meta = self._fetcher.fetch_gradient(
                order.urls,
                generation=order.generation,
                step=order.step,
                into=self.buffer.numpy().data,
                wait_s=_WAIT_S,
            )
        except Gone as error:
            if ticket == self._wanted:
                post(io.GradientGone(order.step, gone=True, why=str(error)))
            return
        except FabricError as error:
            # Not published yet, or every source is away for the moment: the core asks again.
            if ticket == self._wanted:
                post(io.GradientGone(order.step, gone=False, why=str(error)))
            return
        self.gradient, self.generation = meta, order.generation
        post(io.GradientFetched(order.step, meta.digest))

    def as_held(self) -> io.PreparedRound:
        """What the fetched gradient's round was, as its members held it."""
        found = self.gradient
        assert found is not None
        contributions = found.meta.get("contributions", {})
        return io.PreparedRound(
            epoch=found.epoch,
            step=found.step,
            gradient_digest=found.digest,
            weight=found.weight,
            contributions=tuple((str(k), tuple(v)) for k, v in contributions.items()),
            metrics=tuple(sorted(found.meta.get("metrics", {}).items())),
            nonfinite=str(found.meta.get("nonfinite", "")),
        )

    def cancel(self) -> None:
        """The gradient under way is no longer wanted."""
        self._wanted += 1
        spent, self._fetcher = self._fetcher, self._state_loader.make_fetcher()
        spent.cancel()

    def close(self) -> None:
        self._closing.set()
        self.cancel()
        self._worker.close(within_s=1.0)
