"""Loads a replica's state from the first source that works.

The sources in order: this host's memory, the memory of other members, durable storage. When a source fails
half-way, the next source is tried for the same state. A state in another layout of ranks is resharded,
whatever its source: this rank reads the slices that it needs (``ckpt_server/reshard``).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Self

from fabric.ckpt_server.fetch.fetcher import FetchResult, StateFetcher
from fabric.ckpt_server.format.manifest import file_digest, state_digest
from fabric.ckpt_server.format.safetensors_file import read_preamble
from fabric.ckpt_server.reshard import (
    Layout,
    LayoutChanged,
    Misfit,
    RankFile,
    ServedRankFile,
    StoredRankFile,
    reshard,
)
from fabric.client.state.durable_policy import DurableCheckpoints, StorageUnavailable
from fabric.client.state.snapshots import Snapshots
from fabric.errors import FabricError, Gone, IntegrityError, StateError
from fabric.model import DURABLE, SnapshotRef
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.rank_messages import by_rank

OWN_MEMORY = "own memory"  # the source of a state that needed no transfer


class NoSlotMemory(StateError):
    """This host has no memory for a state: its own checkpoint server is lost, or refuses.

    It says nothing about the state or the members that hold it.
    """


_LAYOUT_TRIES = 3  # how often one layout is chosen while other replicas store the state in new layouts


# If ranks hold parts of several layouts, a replica may be storing the state in another layout just now. Its
# ranks do so one after the other, so the layouts are looked up again so often, with a pause between.
_MIXED_TRIES, _MIXED_PAUSE_S = 20, 0.5


class NoWholeLayout(StateError):
    """Every server has answered, and no layout of ranks has all of its parts there."""

    def __init__(self, message: str, is_mixed: bool) -> None:
        super().__init__(message)
        self.is_mixed = is_mixed  # whether there are parts of several layouts


@dataclass(slots=True)
class FetchedState:
    """A fetched state in one of this replica's own slots, not yet loaded."""

    slot: int
    file: memoryview
    fetched: FetchResult
    resharded: bool = False  # the file here differs from the file that other members have of this state


class StateLoader:
    """Loads the states of one rank.

    ``layout``: the parts of the live objects on this rank. ``make_fetcher`` takes a rank, by default ours.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        durable: DurableCheckpoints,
        layout: Layout,
        rank: int,
        size: int,
        make_fetcher: Callable[..., StateFetcher],
        unequal: bool = False,
    ) -> None:
        self._snapshots = snapshots
        self._durable = durable
        self._layout = layout
        self._rank, self._size = rank, size
        self._unequal = unequal
        self.make_fetcher = make_fetcher

    def load(self, order: io.FetchState, fetcher: StateFetcher) -> FetchedState:
        """Return the state, verified, in a slot of this replica.

        ``fetcher``: for the servers of this rank. Raises FabricError with each source's reason; see
        ``fetch_failure``.
        """
        arrived = self._from_own_memory(order, fetcher)
        if arrived is not None:
            return arrived
        served = by_rank(order.lanes or order.urls)
        reasons = []
        if served:
            try:
                return self._from_served(order, served, fetcher)
            except (Misfit, NoSlotMemory):
                raise
            except FabricError as error:
                if DURABLE not in order.urls:
                    raise
                reasons.append(str(error))
        try:
            return self._from_storage(order)
        except (Misfit, NoSlotMemory, StorageUnavailable):
            raise
        except StateError as error:
            raise StateError("; ".join([*reasons, str(error)])) from error

    def drop(self, state: FetchedState) -> None:
        """Give back the slot of a state that nobody will load."""
        self._snapshots.slots.give_back(state.slot)

    # --- sources -----------------------------------------------------------------------------------

    def _from_own_memory(self, order: io.FetchState, fetcher: StateFetcher) -> FetchedState | None:
        """Return the state, verified, if this host's own checkpoint server has kept it and it fits."""
        state = order.state
        slot, began = self._snapshots.slots.held(state), time.monotonic()
        if slot < 0:
            return None
        try:
            manifest = fetcher.fetch_manifest(self._snapshots.slots.handle.url, state.step, state.generation)
            if len(manifest.get("ranks", ("",))) != self._size:
                return None
            file = self._snapshots.slots.look(slot, manifest["nbytes"])
            if state_digest(manifest) != state.digest or file_digest(file) != manifest["digest"]:
                return None
            if self._size > 1 and not self._layout.fits(read_preamble(file)):
                return None
        except FabricError:
            return None
        seconds, nbytes = time.monotonic() - began, len(file)
        return FetchedState(slot, file, FetchResult(nbytes, seconds, {OWN_MEMORY: nbytes}, manifest))

    def _from_served(
        self, order: io.FetchState, served: Mapping[int, Sequence[str]], fetcher: StateFetcher
    ) -> FetchedState:
        """Read one layout; begin again when a server has replaced its file of the state meanwhile."""
        tries, mixed_tries = _LAYOUT_TRIES, _MIXED_TRIES
        while True:
            try:
                return self._from_others(order, self._of_one_layout(served, order.state), fetcher)
            except (LayoutChanged, Gone):
                tries -= 1
                if not tries:
                    raise
            except NoWholeLayout as error:
                mixed_tries -= 1
                if not mixed_tries or not error.is_mixed:
                    raise
                time.sleep(_MIXED_PAUSE_S)

    def _of_one_layout(
        self, served: Mapping[int, Sequence[str]], state: SnapshotRef
    ) -> Mapping[int, Sequence[str]]:
        """Return the URLs of ``served``, by rank, that have the state in one layout, if possible our own.

        Raises StateError where no layout is complete.
        """
        if not self._unequal:
            return served
        layouts: dict[tuple[str, ...], dict[int, list[str]]] = {}
        has_answered = []
        for rank, urls in served.items():
            fetcher = self.make_fetcher(rank)
            for url in urls:
                has_answered.append(False)
                with suppress(FabricError):
                    manifest = fetcher.fetch_manifest(url, state.step, state.generation)
                    has_answered[-1] = True
                    if state_digest(manifest) == state.digest:
                        key = tuple(manifest.get("ranks", (manifest["digest"],)))
                        layouts.setdefault(key, {}).setdefault(rank, []).append(url)
            fetcher.close()
        complete = [key for key, ranks in layouts.items() if len(ranks) == len(key)]
        if not complete:
            why = f"no member serves step {state.step} in all of its ranks"
            if len(layouts) > 1:
                why += f": its servers hold parts of {len(layouts)} layouts"
            raise NoWholeLayout(why, len(layouts) > 1) if all(has_answered) else StateError(why)
        best = min(complete, key=lambda key: (len(key) != self._size, len(key)))
        return {rank: tuple(urls) for rank, urls in layouts[best].items()}

    def _from_others(
        self, order: io.FetchState, served: Mapping[int, Sequence[str]], fetcher: StateFetcher
    ) -> FetchedState:
        ranks = 1 + max(served)
        if ranks == self._size == 1 and not self._unequal:  # the ordinary case: no layouts to compare
            with _Target(self._snapshots) as target:
                fetched = fetcher.fetch_state(served[0], order.state, target.allocate)
                return FetchedState(target.slot, target.file, fetched)
        parts: list[RankFile] = [
            ServedRankFile(
                rank,
                served.get(rank, ()),
                order.state,
                fetcher if rank == self._rank else self.make_fetcher(rank),
            )
            for rank in range(ranks)
        ]
        return self._take(order, parts)

    def _from_storage(self, order: io.FetchState) -> FetchedState:
        def read() -> FetchedState:
            checkpoint = self._durable.find_state(order.state)
            with ExitStack() as stack:
                ranks = range(checkpoint.ranks)
                parts: list[RankFile] = [StoredRankFile(rank, checkpoint, stack) for rank in ranks]
                return self._take(order, parts)

        return self._durable.patiently(read)

    # --- unchanged, or resharded ----------------------------------------------------------------------

    def _take(self, order: io.FetchState, parts: list[RankFile]) -> FetchedState:
        """Return this rank's part unchanged where it fits; else build it from slices of all parts."""
        began = time.monotonic()
        if len(parts) == self._size:
            own_part = parts[self._rank]
            header = own_part.header()
            if own_part.ranks == self._size and self._layout.fits(header):
                with _Target(self._snapshots) as target:
                    own_part.complete(target.allocate)
                    return _fetched_state(target, own_part.manifest, parts, began)
        job, replica = self._snapshots.job, self._snapshots.replica
        with _Target(self._snapshots, beside=order.state) as target:
            manifest = reshard(
                parts, order.state, self._layout, target.allocate, rank=self._rank, job=job, replica=replica
            )
            return _fetched_state(target, manifest, parts, began, resharded=True)


class _Target:
    """A slot of this replica's memory, which is given back where the fetch fails.

    Otherwise the next fetch would overwrite the other slot, and the replica would hold no state.
    ``beside``: the same state in another layout, which other members read.
    """

    def __init__(self, snapshots: Snapshots, beside: SnapshotRef | None = None) -> None:
        self._snapshots = snapshots
        self._beside = beside
        self.slot = -1
        self.file = memoryview(b"")

    def allocate(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` of a slot. Raises NoSlotMemory."""
        try:
            self.slot, memory = self._snapshots.target(nbytes, self._beside)
        except FabricError as error:
            raise NoSlotMemory(str(error)) from error
        self.file = memory[:nbytes]
        return self.file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.slot >= 0:
            self._snapshots.slots.give_back(self.slot)


def _fetched_state(
    target: _Target, manifest: dict[str, Any], parts: list[RankFile], began: float, resharded: bool = False
) -> FetchedState:
    sources: dict[str, int] = {}
    for part in parts:
        for url, nbytes in part.sources.items():
            sources[url] = sources.get(url, 0) + nbytes
    compression = next((part.compression for part in parts if part.compression), "")
    seconds = time.monotonic() - began
    fetched = FetchResult(sum(sources.values()), seconds, sources, manifest, compression=compression)
    return FetchedState(target.slot, target.file, fetched, resharded)


def fetch_failure(order: io.FetchState, error: FabricError) -> io.FetchFailed:
    """Return the event that tells the core of a failed load.

    ``unusable``: another try would fail too, because the state came from storage, was complete and wrong, or
    lacks a part everywhere.
    ``misfit``: the state does not fit here, whatever its source. ``restart``: storage stays away, and may be
    back for the next process. A failure of this host sets none of them.
    """
    own = isinstance(error, NoSlotMemory | StorageUnavailable)
    unusable = not own and (DURABLE in order.urls or isinstance(error, IntegrityError | NoWholeLayout))
    away = isinstance(error, StorageUnavailable)
    return io.FetchFailed(str(error), unusable, misfit=isinstance(error, Misfit), restart=away)
