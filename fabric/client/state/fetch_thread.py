"""The fetch thread: fetches a snapshot or a published gradient, one at a time; a fetch can be cancelled."""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace

from fabric.ckpt_server.fetch.fetcher import GradientMeta, StateFetcher
from fabric.ckpt_server.format.manifest import bytes_digest
from fabric.client.process.worker import Worker
from fabric.client.state.state_loader import FetchedState, NoSlotMemory, StateLoader, fetch_failure
from fabric.errors import FabricError, Gone, StateError
from fabric.ftar.lanes import FlatPlaces, LaneDirectory
from fabric.model import Member, Record
from fabric.protocol.messages import member_events as io
from fabric.protocol.rules.lanes import HeldParameter, TensorRegion
from fabric.protocol.rules.layout_text import read_layout
from fabric.runtime.failpoints import Failpoints

_torch: Any = torch  # torch declares no types for what counts the users of memory
# Seconds of waiting for one member's gradient before asking the next member.
_TURN_S = 1.0
# The pause before asking all members again: a server that has ended refuses without delay.
_RETRY_PAUSE_S = 0.05


class PieceFetcher:
    """Puts together the gradient of the rank of ``lanes`` from those of ranks of another layout.

    Every rank publishes its flat gradient. This rank reads, from one member, the gradients of the ranks that
    hold parts of its parameters. It copies those parts to their places in its own flat gradient.
    """

    # Returns the newest record; the engine sets this function.
    newest: Callable[[], Record | None] = staticmethod(lambda: None)

    def __init__(self, lanes: LaneDirectory) -> None:
        self._lanes = lanes
        self._row = lanes.layout.ranks[lanes.rank]
        self._places = FlatPlaces(self._row, lanes.late)
        self._memory = torch.zeros(0, dtype=torch.uint8, device="cpu")

    def fetch(
        self,
        fetcher: StateFetcher,
        order: io.FetchGradient,
        flat: torch.Tensor,
        wait_s: float,
        digest: Callable[[memoryview], str] = bytes_digest,
    ) -> GradientMeta:
        """Fill ``flat`` from the first member that has the gradient. Raises Gone where all members have
        dropped it, else StateError. ``digest``: the digest by which the members of this job name gradients.
        """
        record, deadline = self.newest(), time.monotonic() + wait_s
        roster = order.members or (record.roster if record is not None else ())
        members = [x for x in roster if x.ckpt in order.urls and x.replica != self._lanes.replica and x.cuts]
        reasons: dict[str, FabricError] = {}
        while members:
            for member in members:
                try:
                    return self._from(member, fetcher, order, flat, digest)
                except FabricError as error:
                    reasons[member.replica] = error
                if fetcher.is_cancelled:
                    raise StateError("the fetch was cancelled; nothing was loaded")
            if all(isinstance(error, Gone) for error in reasons.values()) or time.monotonic() > deadline:
                break
            time.sleep(_RETRY_PAUSE_S)
        text = "; ".join(f"{name}: {error}" for name, error in reasons.items()) or "no member publishes it"
        gone = reasons and all(isinstance(error, Gone) for error in reasons.values())
        raise (Gone if gone else StateError)(text)

    def _from(
        self,
        member: Member,
        fetcher: StateFetcher,
        order: io.FetchGradient,
        flat: torch.Tensor,
        digest: Callable[[memoryview], str],
    ) -> GradientMeta:
        first: GradientMeta | None = None
        for rank, parts in self._parts(member).items():
            row = read_layout(member.cuts).ranks[rank]
            theirs = FlatPlaces(row, self._lanes.late)
            if len(self._memory) < theirs.nbytes:
                self._memory = torch.zeros(theirs.nbytes, dtype=torch.uint8, device="cpu")
            source = self._memory[: theirs.nbytes]
            meta = fetcher.fetch_gradient(
                [member.addresses[rank].ckpt.partition("#")[0]],
                generation=order.generation,
                step=order.step,
                into=source.numpy().data,
                wait_s=_TURN_S,
                digest=digest,
            )
            if meta.nbytes != theirs.nbytes or "round_digest" not in meta.meta:
                raise StateError(f"rank {rank} of {member.replica} publishes another gradient than announced")
            first = first or meta
            ours, others = ((x.epoch, x.weight, x.meta["round_digest"]) for x in (meta, first))
            if ours != others:
                raise StateError(f"rank {rank} of {member.replica} publishes another round than its rank 0")
            for name, region in parts:
                self._places.view(flat, name, region).copy_(theirs.view(source, name, region))
                self._places.presence(flat, name).copy_(theirs.presence(source, name))
        if first is None:
            raise StateError(f"{member.replica} holds nothing of what this rank holds")
        return replace(first, digest=str(first.meta["round_digest"]))

    def _parts(self, member: Member) -> dict[int, list[tuple[str, TensorRegion]]]:
        """Return the parts to read from each rank of ``member``. Of copies the lowest rank's is read.

        Where this rank holds nothing of a parameter, it reads an empty part, with the presence.
        """
        holders: dict[str, dict[TensorRegion, tuple[int, HeldParameter]]] = {}
        for rank, row in enumerate(read_layout(member.cuts).ranks):
            for held in row:
                holders.setdefault(held.name, {}).setdefault(held.region, (rank, held))
        parts: dict[int, list[tuple[str, TensorRegion]]] = {}
        for own in self._row:
            read = [(rank, own.region.common(x)) for x, (rank, _) in holders.get(own.name, {}).items()]
            for rank, common in [x for x in read if x[1].elements] or read[:1]:
                parts.setdefault(rank, []).append((own.name, common))
        return parts


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
        self.buffer: torch.Tensor | None = None  # of the last gradient, of which ``.grad`` may have parts
        self._bytes = memoryview(b"")  # of the buffer; errors of a fetch may hold it for a while
        self._own_uses = 0
        self._state: FetchedState | None = None
        self.gradient: GradientMeta | None = None

    def fetch_state(self, order: io.FetchState, post: Callable[[io.Event], None]) -> None:
        """Queue the fetch of a snapshot."""
        self._worker.submit(lambda: self._fetch_state(order, post))

    def _fetch_state(self, order: io.FetchState, post: Callable[[io.Event], None]) -> None:
        self._points.hit("fetch", order.state.step)
        if (unused := self.take_state()) is not None:
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
        # The loop may still hold parts of the last gradient: see ``FlatGradients.scatter``.
        if self.buffer is None or _uses(self.buffer) > self._own_uses:
            self.buffer = torch.zeros(self._gradient_bytes, dtype=torch.uint8, device="cpu")
            self._bytes = self.buffer.numpy().data
            self._own_uses = _uses(self.buffer)
        try:
            if self.pieces is not None:
                meta = self.pieces.fetch(self._fetcher, order, self.buffer, _WAIT_S, self._digest)
            else:
                meta = self._fetcher.fetch_gradient(
                    order.urls,
                    generation=order.generation,
                    step=order.step,
                    into=self._bytes,
                    wait_s=_WAIT_S,
                    digest=self._digest,
                )
                meta = replace(meta, digest=str(meta.meta.get("round_digest", meta.digest)))
        except FabricError as error:
            # If no server has published the gradient yet, or no source answers now, the core asks again.
            if ticket == self._wanted:
                post(io.GradientGone(order.step, gone=isinstance(error, Gone), why=str(error)))
            return
        self.gradient = meta
        post(io.GradientFetched(order.step, meta.digest))

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


def _uses(buffer: torch.Tensor) -> int:
    """Return how many tensors lie in the memory of ``buffer``."""
    uses: int = _torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)  # noqa: SLF001  (no public one)
    return uses
