"""The blocks of a file that are still to be fetched, and the streams that claim them.

One queue of ranges serves all streams of all sources: a fast stream takes more. A request costs as much time
as some hundred kilobytes, so ranges are large at first; they get smaller towards the end, so that all streams
end together. A range that a stream could not finish goes back into the queue, marked with that stream's
source, which does not get it again while another source is left. A stream without a range may take over one
that another source has held for several times as long as its blocks usually take. So a source that trickles
cannot delay the end.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

_PATIENCE_MIN_S = 0.5
_PATIENCE_UNKNOWN_S = 2.0
_PATIENCE_FACTOR = 4.0
_LOOK_S = 0.05
_FEWEST_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class BlockRange:
    """``count`` blocks from ``first``. ``avoid`` names the sources that failed to send this range."""

    first: int
    count: int
    avoid: frozenset[str] = frozenset()

    @property
    def blocks(self) -> range:
        return range(self.first, self.first + self.count)


@dataclass(eq=False, slots=True)
class RangeClaim:
    """A range that one stream fetches; ``end`` makes that stream give it up. ``moved_s``: the time when the
    stream took the range, or last completed a block of it."""

    block_range: BlockRange
    source: str
    since_s: float
    end: Callable[[], None]
    reclaimed: bool = False
    moved_s: float = 0.0


@dataclass(slots=True)
class _Pace:
    blocks: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Shared:
    pending: deque[BlockRange]
    claims: set[RangeClaim] = field(default_factory=set)
    pace: dict[str, _Pace] = field(default_factory=dict)


class RangeQueue:
    """The blocks of one file, for ``streams`` streams. All methods may be called from any thread."""

    def __init__(
        self, done: list[bool], most_blocks: int, streams: int, sources: set[str], clock: Callable[[], float]
    ) -> None:
        self._done = list(done)
        self._left = done.count(False)
        self._most_blocks = most_blocks
        self._streams = streams
        self._alive = set(sources)
        self._clock = clock
        self._changed = threading.Condition()
        self._stopped = False
        self._shared = _Shared(deque(runs_of(block for block, is_done in enumerate(done) if not is_done)))

    @property
    def complete(self) -> bool:
        return self._left == 0

    @property
    def alive(self) -> bool:
        """Whether any source is left."""
        return bool(self._alive)

    def take(self, source: str, end: Callable[[], None]) -> RangeClaim | None:
        """Wait for a range for ``source`` and return it. None when ``source`` has no more ranges to fetch."""
        with self._changed:
            while not self._stopped and self._left and source in self._alive:
                block_range = self._pick(source)
                if block_range is not None:
                    now = self._clock()
                    claim = RangeClaim(block_range, source, now, end, moved_s=now)
                    self._shared.claims.add(claim)
                    return claim
                self._reclaim(source)
                self._changed.wait(_LOOK_S)
            return None

    def finished(self, block: int) -> None:
        """Note that ``block`` is in place and verified."""
        with self._changed:
            for claim in self._shared.claims:
                if block in claim.block_range.blocks:
                    claim.moved_s = self._clock()
            if not self._done[block]:
                self._done[block] = True
                self._left -= 1
                if not self._left:
                    self._changed.notify_all()

    def release(self, claim: RangeClaim, *, failed: bool) -> None:
        """Give a range back. Its unfinished blocks are fetched again, after a failure from another source."""
        with self._changed:
            self._shared.claims.discard(claim)
            pace = self._shared.pace.setdefault(claim.source, _Pace())
            avoid = claim.block_range.avoid | ({claim.source} if failed else frozenset())
            rest = [block for block in claim.block_range.blocks if not self._done[block]]
            pace.blocks += claim.block_range.count - len(rest)
            pace.seconds += self._clock() - claim.since_s
            self._shared.pending.extendleft(BlockRange(block, 1, avoid) for block in reversed(rest))
            self._changed.notify_all()

    def drop(self, source: str) -> None:
        """Give ``source`` no more ranges, and take back those it has."""
        with self._changed:
            self._alive.discard(source)
            for claim in self._shared.claims:
                if claim.source == source:
                    claim.end()
            self._changed.notify_all()

    def end_stuck(self, limit_s: float) -> None:
        """Take back every range that has finished no block for ``limit_s``, even from the only source.

        A source that trickles would hold the range for ever.
        """
        with self._changed:
            for claim in self._shared.claims:
                if self._clock() - claim.moved_s > limit_s:
                    claim.moved_s = self._clock()
                    claim.end()

    def stop(self) -> None:
        """End all claims; ``take`` then returns None."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return after a change, or after ``timeout_s``."""
        with self._changed:
            self._changed.wait(timeout_s)

    def _pick(self, source: str) -> BlockRange | None:
        pending = self._shared.pending
        for index, candidate in enumerate(pending):
            if source not in candidate.avoid or self._alive <= candidate.avoid:
                del pending[index]
                most = max(_FEWEST_BLOCKS, self._left // (2 * self._streams))
                if self._left <= (_FEWEST_BLOCKS + 1) * self._streams:  # near the end: one range per stream
                    most = -(-self._left // self._streams)
                size = min(candidate.count, self._most_blocks, most)
                if size < candidate.count:
                    rest = replace(candidate, first=candidate.first + size, count=candidate.count - size)
                    pending.insert(index, rest)
                return replace(candidate, count=size)
        return None

    def _reclaim(self, source: str) -> None:
        pace = self._shared.pace.get(source)
        now = self._clock()
        for claim in self._shared.claims:
            patience = _PATIENCE_UNKNOWN_S
            if pace is not None and pace.blocks:
                expected_s = claim.block_range.count * pace.seconds / pace.blocks
                patience = max(_PATIENCE_MIN_S, _PATIENCE_FACTOR * expected_s)
            due = patience * 2 ** len(claim.block_range.avoid)  # doubled at each retry of this range
            if claim.source != source and not claim.reclaimed and now - claim.since_s > due:
                claim.reclaimed = True
                claim.end()


def runs_of(blocks: Iterable[int]) -> list[BlockRange]:
    """Return the runs of neighbouring blocks; ``blocks`` are in order."""
    runs: list[BlockRange] = []
    for block in blocks:
        if runs and block == runs[-1].first + runs[-1].count:
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(BlockRange(block, 1))
    return runs
