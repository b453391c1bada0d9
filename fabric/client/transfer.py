"""The transfer thread: fetches a snapshot or one published gradient at a time, and can be cancelled."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fabric.ckpt_server.digest import file_digest
from fabric.ckpt_server.fetch import Fetched, GradientMeta, StateFetcher
from fabric.ckpt_server.manifest import state_digest
from fabric.client.durable import Durable
from fabric.client.snapshots import Snapshots
from fabric.client.worker import Worker
from fabric.errors import FabricError, Gone, IntegrityError, StateError
from fabric.model import DURABLE, SnapshotRef
from fabric.protocol import member_io as io
from fabric.runtime.points import Points

# A long poll shorter than the server's bound; the core asks again.
_WAIT_S = 20.0
OWN_MEMORY = "own memory"  # where a state came from that nobody had to send


@dataclass(slots=True)
class Arrived:
    """A fetched state in one of my own slots, not yet loaded."""

    slot: int
    file: memoryview
    fetched: Fetched


class Transfer:
    """Performs FetchState and FetchGradient; what arrived is in ``state`` and ``gradient``."""

    def __init__(
        self,
        make_fetcher: Callable[[], StateFetcher],
        snapshots: Snapshots,
        gradient_bytes: int,
        points: Points,
        on_crash: Callable[[BaseException], None],
        durable: Durable,
    ) -> None:
        self._durable = durable
        # A cancelled fetcher is spent: its sockets are shut down for good.
        self._make_fetcher = make_fetcher
        self._fetcher = make_fetcher()
        self._snapshots = snapshots
        self._gradient_bytes = gradient_bytes
        self._points = points
        self._worker = Worker("fabric-transfer", on_crash, background=True)
        self._wanted = 0
        self.buffer: torch.Tensor | None = None
        self.state: Arrived | None = None
        self.gradient: GradientMeta | None = None
        self.generation = 0  # of that gradient, whatever has been decided since

    def fetch_state(self, order: io.FetchState, post: Callable[[io.Event], None]) -> None:
        """Queue a snapshot's fetch."""
        self._worker.submit(lambda: self._fetch_state(order, post))

    def _fetch_state(self, order: io.FetchState, post: Callable[[io.Event], None]) -> None:
        self._points.reach("fetch", order.state.step)
        self.state = self._from_memory(order.state)
        if self.state is not None:
            post(io.StateFetched(order.state.step, order.state.digest))
            return
        slot = -1
        file = memoryview(b"")

        def allocate(nbytes: int) -> memoryview:
            nonlocal slot, file
            slot, memory = self._snapshots.target(nbytes)
            file = memory[:nbytes]
            return file

        try:
            fetched = self._climb(order, allocate)
        except FabricError as error:
            # From durable storage, or whole and wrong: asking again gives the same.
            unusable = DURABLE in order.urls or isinstance(error, IntegrityError)
            post(io.FetchFailed(str(error), unusable))
            return
        self.state = Arrived(slot, file, fetched)
        post(io.StateFetched(order.state.step, order.state.digest))

    def _climb(self, order: io.FetchState, allocate: Callable[[int], memoryview]) -> Fetched:
        """The ladder: from memory, wherever it is, else from durable storage. Raises FabricError."""
        memory = [url for url in order.urls if url != DURABLE]
        reasons = []
        if memory:
            try:
                return self._fetcher.fetch_state(memory, order.state, allocate)
            except FabricError as error:
                if DURABLE not in order.urls:
                    raise
                reasons.append(str(error))
        try:
            return self._durable.restore(order.state, allocate)
        except StateError as error:
            raise StateError("; ".join([*reasons, str(error)])) from error

    def _from_memory(self, state: SnapshotRef) -> Arrived | None:
        """The state where this host's own checkpoint server has kept it, verified; None where it has not."""
        slot, began = self._snapshots.held(state), time.monotonic()
        if slot < 0:
            return None
        try:
            manifest = self._fetcher.fetch_manifest(self._snapshots.url, state.step, state.generation)
            file = self._snapshots.look(slot, manifest["nbytes"])
        except FabricError:
            return None
        if state_digest(manifest) != state.digest or file_digest(file) != manifest["digest"]:
            return None
        seconds, nbytes = time.monotonic() - began, len(file)
        return Arrived(slot, file, Fetched(nbytes, seconds, {OWN_MEMORY: nbytes}, manifest))

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

    def as_held(self) -> io.Hold:
        """What the fetched gradient's round was, as its members held it."""
        found = self.gradient
        assert found is not None
        contributions = found.meta.get("contributions", {})
        return io.Hold(
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
        spent, self._fetcher = self._fetcher, self._make_fetcher()
        spent.cancel()

    def close(self) -> None:
        self.cancel()
        self._worker.close(within_s=1.0)
