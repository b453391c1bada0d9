"""One file from several sources into one memory: every block is verified or fetched again.

Each source has a few streams; all streams take ranges from one queue. A source that sends wrong bytes is
named in a warning and asked once more; the second time it is dropped. A source that dies or stalls loses its
range and is dropped after three failures in a row. A verified block is never fetched twice.
"""

import http.client
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import xxhash
from msgspec import to_builtins
from msgspec.structs import replace

from fabric.ckpt_server.fetch.http_source import (
    LEAST_BYTES_PER_S,
    PIECE_BYTES,
    TRANSIENT,
    HttpAccess,
    HttpAddress,
    HttpConnection,
    IdleConnections,
    SourceRefused,
    refusal,
)
from fabric.ckpt_server.format.manifest import block_digest
from fabric.ckpt_server.wire.channel_protocol import LOCAL_ASK_S, RequestChannel, close_all, local_socket_name
from fabric.ckpt_server.wire.compression import IDENTITY, SHUFFLE, decompress
from fabric.errors import FabricError, Gone, IntegrityError, ProtocolError, StateError
from fabric.model import SnapshotRef, Value
from fabric.runtime.priority import lower_priority

# A snapshot read out of the memory of a checkpoint server on this host, not over the network.
#
# The reader connects to the server's unix socket, and checks with the kernel that the server runs as the
# same user. It sends the job's token and the name of the state. It gets a read-only descriptor of the
# memory, and reads it as a file. The server ends the connection when it withdraws the slot; bytes read
# later may be of another state. So the reader verifies all bytes by the manifest's digests.


class HostMemory:
    """The reader's side: one snapshot in the memory of a server on this host. Any thread may read."""

    def __init__(self, channel: RequestChannel, descriptors: list[int]) -> None:
        self._channel = channel
        self._descriptors = descriptors  # of the memory; empty after ``close``

    @classmethod
    def find(cls, place: str, state: SnapshotRef, token: str, nbytes: int) -> "HostMemory | None":
        """Return the memory of the server at ``place`` (host:port) if it holds ``state`` of ``nbytes``, or
        None.

        The digest in ``state`` is that of the file."""
        memory = None
        try:
            channel = RequestChannel(local_socket_name(place), f"the server at {place}", LOCAL_ASK_S)
            memory = cls(channel, [])
            _, memory._descriptors = channel.ask({**to_builtins(state), "token": token}, LOCAL_ASK_S)
            if len(memory._descriptors) == 1 and os.fstat(memory._descriptors[0]).st_size >= nbytes:
                return memory
        except (OSError, FabricError) as error:
            log.debug("%s is not read from its memory: %s", place, error)
        if memory is not None:
            memory.close()
        return None

    def read(self, into: memoryview, at: int) -> None:
        """Fill ``into`` from byte ``at`` on. Raises ConnectionError where the memory ends too early."""
        while len(into):
            # Read the memory and do not map it: the kernel copies as fast, without page tables.
            count = os.preadv(self._descriptors[0], [into], at)
            if not count:
                raise ConnectionError(f"its memory ends {len(into)} bytes too early")
            at, into = at + count, into[count:]

    def still_there(self) -> bool:
        """Whether the bytes read so far are of the wanted state; tell the server that we still read."""
        return self._channel.send_sign()

    def close(self) -> None:
        """Let the server use the slot again. No thread may be reading."""
        close_all(self._descriptors)
        self._channel.close()


# The blocks of a file that are still to be fetched, and the streams that claim them.
#
# One queue of ranges serves all streams of all sources: a fast stream takes more. A request costs as much
# time as some hundred kilobytes, so ranges are large at first; they get smaller towards the end, so that
# all streams end together. A range that a stream could not finish goes back into the queue, marked with
# that stream's source, which does not get it again while another source is left. A stream without a range
# may take over one that another source has held for several times as long as its blocks usually take. So
# a source that trickles cannot delay the end.


_PATIENCE_MIN_S = 0.5
_PATIENCE_UNKNOWN_S = 2.0
_PATIENCE_FACTOR = 4.0
_LOOK_S = 0.05
_FEWEST_BLOCKS = 2


class BlockRange(Value):
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
        self._pending = deque(runs_of(block for block, is_done in enumerate(done) if not is_done))
        self._claims: set[RangeClaim] = set()
        self._pace: dict[str, _Pace] = {}

    @property
    def complete(self) -> bool:
        return self._left == 0

    @property
    def alive(self) -> bool:
        return bool(self._alive)

    def take(self, source: str, end: Callable[[], None]) -> RangeClaim | None:
        """Wait for a range for ``source`` and return it. None when ``source`` has no more ranges to fetch."""
        with self._changed:
            while not self._stopped and self._left and source in self._alive:
                block_range = self._pick(source)
                if block_range is not None:
                    now = self._clock()
                    claim = RangeClaim(block_range, source, now, end, moved_s=now)
                    self._claims.add(claim)
                    return claim
                self._reclaim(source)
                self._changed.wait(_LOOK_S)
            return None

    def finished(self, block: int) -> None:
        """Note that ``block`` is in place and verified."""
        with self._changed:
            for claim in self._claims:
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
            self._claims.discard(claim)
            pace = self._pace.setdefault(claim.source, _Pace())
            avoid = claim.block_range.avoid | ({claim.source} if failed else frozenset())
            rest = [block for block in claim.block_range.blocks if not self._done[block]]
            pace.blocks += claim.block_range.count - len(rest)
            pace.seconds += self._clock() - claim.since_s
            self._pending.extendleft(BlockRange(block, 1, avoid) for block in reversed(rest))
            self._changed.notify_all()

    def drop(self, source: str) -> None:
        """Give ``source`` no more ranges, and take back those it has."""
        with self._changed:
            self._alive.discard(source)
            for claim in self._claims:
                if claim.source == source:
                    claim.end()
            self._changed.notify_all()

    def end_stuck(self, limit_s: float) -> None:
        """Take back every range that has finished no block for ``limit_s``, even from the only source.

        A source that trickles would hold the range for ever.
        """
        with self._changed:
            for claim in self._claims:
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
        for index, candidate in enumerate(self._pending):
            if source not in candidate.avoid or self._alive <= candidate.avoid:
                del self._pending[index]
                most = max(_FEWEST_BLOCKS, self._left // (2 * self._streams))
                if self._left <= (_FEWEST_BLOCKS + 1) * self._streams:  # near the end: one range per stream
                    most = -(-self._left // self._streams)
                size = min(candidate.count, self._most_blocks, most)
                if size < candidate.count:
                    rest = replace(candidate, first=candidate.first + size, count=candidate.count - size)
                    self._pending.insert(index, rest)
                return replace(candidate, count=size)
        return None

    def _reclaim(self, source: str) -> None:
        pace = self._pace.get(source)
        now = self._clock()
        for claim in self._claims:
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


# Decides whether a fetch compresses its bytes, from the link speed measured during the fetch.
#
# A fetch begins plain. A link that is faster than compression stays plain. On a slower link one range is
# tried compressed. After that range the fetch uses the faster way (plain or compressed), and tries the
# other from time to time. The module has no clock and no sockets; any thread may use it.


# On a faster link compression gains nothing: one thread compresses no faster on the machines that we know.
FAST_BYTES_S = 400e6
# Compression takes processor time on two hosts, so it must multiply the speed by this factor.
GAIN = 1.1
_FIRST_PLAIN = 2  # uncompressed first ranges per stream: a connection's first bytes come slowly
_LOOK_AGAIN = 32  # ranges sent in the chosen way (plain or compressed) before one range tries the other way
_MIN_BYTES = 1 << 20  # a smaller range measures the request's duration, not the link's speed


class LinkSpeed:
    """The measurements of ``streams`` streams together; ``why`` explains the decision."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._lock = threading.Lock()
        self._plain_ranges = 0
        self._plain = 0.0  # bytes per second of one stream, measured on the last plain ranges
        self._compressed = 0.0
        self._trial: bool | None = None  # whether the range on trial is compressed; None: no trial
        self._since = 0

    def compress_next(self) -> bool:
        """Return whether to compress the next range. The caller must then call ``measured``."""
        with self._lock:
            if not self._is_known or self._is_fast:
                return False
            if self._trial is not None or (self._compressed and self._since < _LOOK_AGAIN):
                self._since += 1
                return self._chosen
            self._trial, self._since = not self._chosen, 0
            return self._trial

    def measured(self, compressed: bool, nbytes: int, seconds: float) -> None:
        """Note that ``nbytes`` of the state arrived and were decompressed in ``seconds`` on one stream.

        They are 0 where the range failed, for a reason other than the link's speed."""
        rate = nbytes / max(seconds, 1e-9)
        with self._lock:
            if compressed == self._trial:
                self._trial = None
            if nbytes < _MIN_BYTES:
                return
            if compressed:
                self._compressed = rate
            else:
                self._plain = rate if not self._plain else (self._plain + rate) / 2
                self._plain_ranges += 1

    @property
    def why(self) -> str:
        """The last decision, and its reason."""
        with self._lock:
            plain = f"{self._plain * self._streams / 1e6:.0f} MB/s"
            compressed = f"{self._compressed * self._streams / 1e6:.0f} MB/s"
            if not self._is_known:
                return "plain: too little was fetched to measure the link"
            if self._is_fast:
                return f"plain: the link gives {plain}, faster than compressing"
            if not self._compressed:
                return f"plain: the link gives {plain}, and nothing was left to try compression with"
            chosen = "compressed" if self._chosen else "plain"
            return f"{chosen}: the link gives {plain} plain and {compressed} compressed"

    @property
    def _is_known(self) -> bool:
        return self._plain_ranges >= _FIRST_PLAIN * self._streams

    @property
    def _is_fast(self) -> bool:
        return self._plain * self._streams >= FAST_BYTES_S

    @property
    def _chosen(self) -> bool:
        return self._compressed > GAIN * self._plain


log = logging.getLogger(__name__)

_MAX_FAILURES = 3
_MAX_WRONG_ANSWERS = 2
_WAIT_S = 0.1
_MAX_REFUSAL_BYTES = 64 << 10
BLOCKS_PATH = "/v1/snapshots/{}/blocks/{}-{}{}"
_CONTENT_RANGE = re.compile(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20})")


@dataclass(slots=True)
class Source:
    """One source during a fetch."""

    address: HttpAddress
    compresses: bool = True  # False after this source has refused compression
    memory: HostMemory | None = None  # the source's memory, where the source is on this host
    nbytes: int = 0  # number of bytes received from this source
    shared: int = 0  # bytes received through the source's shared memory
    failures: int = 0  # failures of this source in a row
    wrong_answers: int = 0
    error: StateError | None = None  # why the fetch does not use this source any more

    @property
    def url(self) -> str:
        return self.address.url


class MultiSourceFetch:
    """Fetches the file of ``manifest`` from ``sources`` into ``target`` (exactly its size), once."""

    def __init__(
        self,
        manifest: Mapping[str, Any],
        sources: Sequence[Source],
        target: memoryview,
        access: HttpAccess,
        idle: IdleConnections,
    ) -> None:
        self._manifest = manifest
        self._block_bytes: int = manifest["block_bytes"]
        self._sources = sources
        self._target = target
        self._access = access
        self._idle = idle
        self._lock = threading.Lock()
        self._queue = RangeQueue([], 1, 1, set(), time.monotonic)
        self._speed = LinkSpeed(1)
        self.warnings: list[str] = []

    @property
    def compression(self) -> str:
        """Say whether the last bytes came compressed, and why, or that they were read from memory."""
        shared = sum(source.shared for source in self._sources)
        if not shared:
            return self._speed.why
        if shared == sum(source.nbytes for source in self._sources):
            return "plain: read from shared memory, over this host's socket"
        return f"{self._speed.why}; {shared / 1e6:.0f} MB of it were read from shared memory on this host"

    def run(
        self,
        streams: int,
        range_bytes: int,
        *,
        resume: bool,
        wanted: Collection[int] | None = None,
    ) -> None:
        """Fetch the ``wanted`` blocks (None: all) into the target. Raises StateError, also on a cancel.

        With ``resume``, blocks that the target holds already are not fetched.
        """
        digests = self._manifest["blocks"]
        wanted = range(len(digests)) if wanted is None else wanted
        done = [
            block not in wanted or (resume and block_digest(self._block(block)) == digest)
            for block, digest in enumerate(digests)
        ]
        most = max(1, range_bytes // self._block_bytes)
        streams = streams_per_source(streams, len(self._sources), len(os.sched_getaffinity(0)))
        workers, urls = len(self._sources) * streams, {source.url for source in self._sources}
        self._speed = LinkSpeed(workers)
        self._queue = queue = RangeQueue(done, most, workers, urls, time.monotonic)
        with ThreadPoolExecutor(workers, "fabric-fetch", lower_priority) as pool:
            running = [pool.submit(self._stream, source) for source in self._sources for _ in range(streams)]
            try:
                self._watch(running)
            finally:
                queue.stop()
                for url in urls:
                    queue.drop(url)
        for future in running:
            future.result()

    def _watch(self, running: list[Future[None]]) -> None:
        stuck_s = self._access.timeout_s + self._block_bytes / LEAST_BYTES_PER_S
        while not self._queue.complete:
            if self._access.is_cancelled:
                raise StateError("The fetch was cancelled; nothing was loaded.")
            if not self._queue.alive:
                raise all_failed(f"step {self._manifest['step']}", self._sources)
            if any(future.done() and future.exception() for future in running):
                return  # a bug raised in a stream: ``run`` raises its exception again
            self._queue.end_stuck(stuck_s)
            self._queue.wait(_WAIT_S)

    def _stream(self, source: Source) -> None:
        connection, sound = self._idle.take(source.address), False
        try:
            while (claim := self._queue.take(source.url, connection.abort)) is not None:
                if source.memory is not None:
                    self._read(source, source.memory, claim)
                else:
                    self._fetch_claim(source, connection, claim)
            sound = True  # a connection whose response was not read to the end is closed already
        finally:
            self._idle.give(connection, reusable=sound)

    def _fetch_claim(self, source: Source, connection: HttpConnection, claim: RangeClaim) -> None:
        nbytes, begun_s = 0, time.monotonic()
        compressed = source.compresses and self._speed.compress_next()
        try:
            nbytes = self._fetch(source, connection, claim, compressed)
        except IntegrityError as error:
            self._count_wrong_bytes(source, error)
        except (SourceRefused, Gone) as error:
            self._drop(source, error)
        except (*TRANSIENT, StateError, ProtocolError) as error:
            if not claim.reclaimed and not self._access.is_cancelled:
                with self._lock:
                    source.failures += 1
                if source.failures >= _MAX_FAILURES:
                    self._drop(source, StateError(_one_line(error)))
                else:
                    self._queue.wait(_WAIT_S * source.failures)
        finally:
            failed, refused = not nbytes, compressed and not source.compresses
            self._speed.measured(compressed, 0 if refused else nbytes, time.monotonic() - begun_s)
            self._queue.release(claim, failed=failed)
            if failed or claim.reclaimed:  # another thread may have ended the connection after its range
                connection.close()

    def _read(self, source: Source, memory: HostMemory, claim: RangeClaim) -> None:
        """Copy a range from the memory of a server on this host into place."""
        failed, at = True, claim.block_range.first * self._block_bytes

        def read(into: memoryview) -> None:
            nonlocal at
            memory.read(into, at)
            at += len(into)

        try:
            for block in claim.block_range.blocks:
                self._finish(source, block, _receive(read, self._block(block)))
                with self._lock:
                    source.shared += len(self._block(block))
            failed = not memory.still_there()
        except IntegrityError as error:
            if memory.still_there():
                self._count_wrong_bytes(source, error)
        except OSError as error:
            log.debug("%s: its memory is not read any more: %s", source.url, error)
        finally:
            self._queue.release(claim, failed=False)
            if failed:  # the slot was withdrawn, or the server has ended: the HTTP answer gives the reason
                source.memory = None

    def _fetch(self, source: Source, connection: HttpConnection, claim: RangeClaim, compressed: bool) -> int:
        """Fetch a range into place; return its size."""
        blocks, coding = claim.block_range.blocks, SHUFFLE if compressed else IDENTITY
        response = self._ask(connection, blocks, coding)
        if response.status == 404 and compressed:  # the source does not offer that coding
            response.read(_MAX_REFUSAL_BYTES)
            connection.close()
            source.compresses, coding = False, IDENTITY
            response = self._ask(connection, blocks, coding)
        self._check(response, blocks, coding)
        body = connection.body(response)
        for block in blocks:
            part = self._block(block)
            if coding == IDENTITY:
                self._finish(source, block, _receive(body.read, part))
                continue
            decompress(body.read, part)
            if block == blocks[-1] and response.read(1):
                raise SourceRefused("it sends more than the blocks that were asked for")
            self._finish(source, block, block_digest(part))
        return sum(len(self._block(block)) for block in blocks)

    def _finish(self, source: Source, block: int, digest: str) -> None:
        """Check the digest of ``block``, which is in place. Raises IntegrityError."""
        if digest != self._manifest["blocks"][block]:
            raise IntegrityError(f"block {block} of {len(self._manifest['blocks'])}")
        with self._lock:
            source.nbytes += len(self._block(block))
            source.failures = 0
        self._queue.finished(block)

    def _ask(self, connection: HttpConnection, blocks: range, coding: str) -> http.client.HTTPResponse:
        step, query = self._manifest["step"], f"?generation={self._manifest['generation']}"
        if coding == IDENTITY:
            return connection.get(f"/v1/snapshots/{step}/data{query}", self._bounds(blocks))
        return connection.get(BLOCKS_PATH.format(step, blocks[0], blocks[-1], query), coding=coding)

    def _bounds(self, blocks: range) -> tuple[int, int]:
        end = (blocks[-1] + 1) * self._block_bytes
        return blocks[0] * self._block_bytes, min(end, self._manifest["nbytes"])

    def _check(self, response: http.client.HTTPResponse, blocks: range, coding: str) -> None:
        """Raise the source's refusal, or SourceRefused unless the answer is of exactly these blocks."""
        if response.status != 200 and (response.status != 206 or coding != IDENTITY):
            raise refusal(response)
        sent = response.getheader("Content-Encoding") or IDENTITY
        if sent != coding:
            raise SourceRefused(f"it sends the coding {sent[:40]!r} where {coding} was asked for")
        # The tag is the state's digest, a dash, and a mark that distinguishes a part's answer from the file.
        tag = response.getheader("ETag")
        if tag is not None and tag.strip('W/"').partition("-")[0] != self._manifest["digest"]:
            raise Gone("it holds another file of this step by now")
        if coding == IDENTITY:
            (begin, end), nbytes = self._bounds(blocks), self._manifest["nbytes"]
            if response.status == 206:
                offered = response.getheader("Content-Range") or ""
                match = _CONTENT_RANGE.fullmatch(offered)
                if match is None or tuple(map(int, match.groups())) != (begin, end - 1, nbytes):
                    raise SourceRefused(
                        f"it offers {offered[:80]!r} where bytes {begin} to {end - 1} of {nbytes} were asked"
                        " for"
                    )
            elif (begin, end) != (0, nbytes):
                raise SourceRefused("it ignores byte ranges")
            if response.length != end - begin:
                raise SourceRefused(f"it sends {response.length} bytes where {end - begin} were asked for")

    def _count_wrong_bytes(self, source: Source, error: IntegrityError) -> None:
        with self._lock:
            source.wrong_answers += 1
            drop = source.wrong_answers >= _MAX_WRONG_ANSWERS
            self.warnings.append(
                f"{source.url} sent wrong bytes for {error}; they were not used"
                f"{' and the source is not used any more' if drop else ''}."
            )
        if drop:
            self._drop(source, IntegrityError(f"it sent wrong bytes {source.wrong_answers} times"))

    def _drop(self, source: Source, error: StateError) -> None:
        with self._lock:
            if source.error is None:
                source.error = error
                if not isinstance(error, IntegrityError):
                    self.warnings.append(f"{source.url} is not used any more: {error}.")
        self._queue.drop(source.url)

    def _block(self, block: int) -> memoryview:
        return self._target[block * self._block_bytes : (block + 1) * self._block_bytes]


def streams_per_source(wanted: int, sources: int, processors: int) -> int:
    """Return the number of streams per source, in all at most one per processor.

    More streams only take turns, and their bytes leave the caches while they wait.
    """
    return max(1, min(wanted, processors // sources))


def _receive(read: Callable[[memoryview], None], part: memoryview) -> str:
    """Fill ``part`` by ``read``, in order; return its digest."""
    hasher = xxhash.xxh3_64()
    for begin in range(0, len(part), PIECE_BYTES):
        piece = part[begin : begin + PIECE_BYTES]
        read(piece)
        hasher.update(piece)
    return hasher.hexdigest()


def all_failed(what: str, sources: Sequence[Source]) -> StateError:
    """Return the error with the reason of every source."""
    reasons = "; ".join(f"{source.url}: {source.error or 'no reason'}" for source in sources)
    kinds = {type(source.error) for source in sources}
    kind = kinds.pop() if len(kinds) == 1 else StateError
    chosen: type[StateError] = kind if kind in (Gone, IntegrityError) else StateError
    return chosen(f"No source could deliver {what}, and nothing was loaded ({reasons}).")


def _one_line(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it stopped sending"
    return " ".join(str(error).split())[:300] or type(error).__name__


def source_error(error: Exception) -> StateError:
    """Return the error of a source: its own refusal, which is final, or a failed transfer."""
    if isinstance(error, Gone | IntegrityError | SourceRefused):
        return error
    return StateError(_one_line(error))
