"""Election of the leader: a queue of keys in the store, one per candidate, each under the candidate's lease.

The candidate whose key has the lowest create revision leads. The others wait and renew their leases. When the
leader's key disappears, the next candidate leads after its next look at the queue, without a write.

The lease is only a hint, so two rules make a leader safe. First, a leader stops when its lease may have
ended. It measures that on its own clock from before each renewal, with a margin. Second, the create revision
of its key guards every write (``Term.guard``). So once its key is gone, a leader can change nothing, even if
it was suspended or its clock is wrong. No other candidate leads while the key exists.

A lease outlives its key where a person deletes the key or empties the store. So a leader looks at its own key
too. Every candidate reads the store's id before it creates its key: an emptied store has another id.

When thousands of sessions reconnect at once, the event loop is busy for seconds, and losing the lead would
then cost most. So a thread with its own handle on the store renews the lease. A process whose loop is stuck
must not lead for ever, so the thread renews only while the loop turns.
"""

import asyncio
import json
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct

from fabric.errors import LeaseGone, StoreError, StoreIndefinite, StoreReplaced, StoreUnavailable
from fabric.model import Value
from fabric.runtime.system_calls import seconds_since_boot
from fabric.runtime.tasks import BackgroundLoop
from fabric.store.base import Compare, KeyValue, Lease, Operation, Put, Store, settle_store_id

log = logging.getLogger(__name__)

Clock = Callable[[], float]

# A leader stops this share of its lease before the lease can end, but at most so many seconds before.
MARGIN_SHARE = 0.2
MARGIN_MOST_S = 1.0
# The pause between two looks at the queue, or at the leader's own key.
LOOK_S = 0.2
# The same for the next one in the queue: after a clean end nobody leads for so long.
NEXT_LOOK_S = 0.03
_REVOKE_S = 1.5
# After this many leases without a turn of the event loop, the thread no longer renews the lease.
STUCK_LEASES = 3.0
_RETRY_S = (0.05, 1.0)
_MAX_VALUE_BYTES = 4096


class Candidate(Value):
    """One lighthouse process: its random id, and the base URL at which others reach it."""

    id: str
    url: str


class Term:
    """One term as the leader. The loop and the renewing thread share ``ends`` and ``turned``."""

    def __init__(
        self, store_id: str, guard: Compare, clock: Clock, resign: Callable[["Term", str], None]
    ) -> None:
        self.store_id = store_id
        self.guard = guard
        self.ends = 0.0  # the time when the lease ends
        self.turned = clock()  # the time when the event loop last turned
        self.is_over = False
        self._clock = clock
        self._resign = resign

    @property
    def revision(self) -> int:
        """The create revision of the election key, which fences every write."""
        return self.guard.create_revision or 0

    @property
    def key(self) -> str:
        return self.guard.key

    def in_force(self) -> bool:
        """Whether the lease is certainly still valid."""
        return not self.is_over and self._clock() < self.ends

    def holds(self) -> bool:
        """Whether this process still leads; ask before every act. A term whose lease may have ended is over.

        A loop that was stuck reads messages of members before its timers run.
        """
        if self.is_over or self._clock() >= self.ends:
            self.resign("its lease may have ended")
        return not self.is_over

    def resign(self, reason: str) -> None:
        """Stop leading now and give the lease back. Further calls change nothing."""
        self._resign(self, reason)


class ElectionHooks(Value):
    """The callbacks of an election; the loop calls them at once and in order."""

    elected: Callable[[Term], None]  # called when this process begins to lead
    lost: Callable[[str], None]  # called with the reason when this process no longer leads
    followed: Callable[[Candidate], None]  # called when another process leads
    written: Callable[[str], None]  # called with the outcome of an attempt to become the leader


class Election:
    """Stands for election until cancelled. ``leader`` is the leader as the store last named it.

    ``lease_store``: another handle on the store, for the thread that renews the lease. Without it (in
    tests) the loop renews.
    """

    def __init__(
        self,
        store: Store,
        namespace: str,
        lease_s: float,
        hooks: ElectionHooks,
        *,
        lease_store: Store | None = None,
        clock: Clock = seconds_since_boot,
    ) -> None:
        self.prefix = f"/fabric/{namespace}/election/"
        self.me = Candidate(secrets.token_hex(8), "")
        self.leader: Candidate | None = None
        self.term: Term | None = None
        self._store = store
        self._lease_store = lease_store
        self._side: BackgroundLoop | None = None
        self._lease_s = lease_s
        self._hooks = hooks
        self._clock = clock
        self._changed = asyncio.Event()
        self._said = ""

    async def run(self, url: str) -> None:
        """Follow or lead, for ever. ``url`` is the address at which others reach this process."""
        self.me = Candidate(self.me.id, url)
        self._side = BackgroundLoop("fabric-lease") if self._lease_store is not None else None
        jitter = random.Random()  # noqa: S311 - spreads attempts, protects nothing
        pause_s = _RETRY_S[0]
        try:
            while True:
                try:
                    await self._stand()
                    pause_s = _RETRY_S[0]
                except StoreError as error:
                    self._say(str(error))
                    await asyncio.sleep(pause_s * jitter.uniform(0.5, 1.0))
                    pause_s = min(2 * pause_s, _RETRY_S[1])
                    if not isinstance(error, StoreUnavailable | StoreIndefinite | LeaseGone):
                        with suppress(StoreError):  # the store may have been wiped or replaced
                            await self._store.close()
                            await self._store.connect()
        finally:
            if self._side is not None:
                self._side.close()

    @property
    def other(self) -> Candidate | None:
        """The leader, if it is another process at another address.

        A process that was killed and started again at the same address finds its own URL in the store until
        the old lease ends. A redirect to that URL would never end.
        """
        leader = self.leader
        return leader if leader and leader.id != self.me.id and leader.url != self.me.url else None

    async def _stand(self) -> None:
        """Enter the queue, wait until this candidate is first, and lead until its key is lost."""
        store_id = await settle_store_id(self._store)
        sent = self._clock()
        lease = await self._store.grant_lease(self._lease_s)
        term: Term | None = None
        try:
            term = await self._enter(lease, store_id)
            if term is not None:
                term.ends = sent + lease.ttl_s - _margin(lease.ttl_s)
                await self._hold(term, lease, sent)
        finally:
            if term is not None:
                self._end(term, "it is being stopped")
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(_REVOKE_S):
                    await self._store.revoke(lease.id)

    async def _enter(self, lease: Lease, store_id: str) -> Term | None:
        """Create this candidate's key, last in the queue; return None if the key is not there then."""
        key = f"{self.prefix}{lease.id:x}"
        value = json.dumps({"id": self.me.id, "url": self.me.url}).encode()
        try:
            revision = await self._store.commit(
                [Compare(key, create_revision=0)], [Put(key, value, lease.id)]
            )
            self._hooks.written("refused" if revision is None else "written")
        except StoreIndefinite:
            self._hooks.written("indefinite")
        entry = await self._store.get(key)
        if entry is None or entry.value != value:
            return None
        guard = Compare(key, create_revision=entry.create_revision)
        return Term(store_id, guard, self._clock, self._end)

    async def _hold(self, term: Term, lease: Lease, sent: float) -> None:
        """Keep the key in the queue until it is lost; lead once it is the first."""
        self._changed.clear()
        turn = asyncio.get_running_loop().create_task(self._await_turn(term))
        renewals: asyncio.Future[str]
        if self._side is None or self._lease_store is None:
            renewals = asyncio.get_running_loop().create_task(self._renew(term, lease, sent, self._store))
        else:
            aside = self._renew_aside(term, lease, sent, self._lease_store)
            renewals = asyncio.wrap_future(self._side.start(aside))
        loss = asyncio.get_running_loop().create_task(self._await_loss(term, turn))
        for each in (turn, renewals, loss):
            each.add_done_callback(lambda _: self._changed.set())
        try:
            while not term.is_over:
                term.turned = self._clock()
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, min(lease.ttl_s / 3, term.ends - term.turned))):
                        await self._changed.wait()
                self._changed.clear()
                if turn.done() and self.term is None:
                    turn.result()
                    self._begin(term)
                if renewals.done():
                    self._end(term, renewals.result())
                elif loss.done():
                    self._end(term, loss.result())
                elif not term.in_force():
                    self._end(term, "its lease may have ended, for the store did not renew it in time")
        finally:
            for each in (turn, renewals, loss):
                each.cancel()
            await asyncio.gather(turn, renewals, loss, return_exceptions=True)

    async def _await_turn(self, term: Term) -> None:
        """Return when no key in the queue is older than this candidate's. Raises LeaseGone without its
        key."""
        pause_s = LOOK_S
        while True:
            with suppress(StoreUnavailable):  # the lease bounds how long it may be so
                entries, _ = await self._store.list(self.prefix)
                before = self._learn({kv.key: kv for kv in entries}, term)
                if not before:
                    return
                pause_s = NEXT_LOOK_S if before == 1 else LOOK_S
            await asyncio.sleep(pause_s)

    async def _await_loss(self, term: Term, turn: "asyncio.Task[None]") -> str:
        """Return a sentence once the key of this term is gone, or the store is another one or an older copy.

        An older copy may hold the key and the lease, which is then renewed there for ever. A store that does
        not answer is asked again; the lease bounds how long a leader can lead without it.
        """
        await asyncio.wait({turn})
        gone = (
            f"its key {term.key} is gone from the store: the lease has ended there, or somebody has deleted "
            "the key or emptied the store"
        )
        while True:
            try:
                entry = await self._store.get(term.key)
                if entry is None or entry.create_revision != term.revision:
                    return gone
            except StoreReplaced as error:
                return str(error)
            except StoreError:
                pass
            await asyncio.sleep(LOOK_S)

    def _learn(self, line: Mapping[str, KeyValue], term: Term) -> int:
        """Note which candidate is first in the queue; return how many are before this one."""
        if term.key not in line:
            raise LeaseGone(f"the key {term.key} is gone, and with it the place in the line: start over")
        first = min(line.values(), key=lambda kv: kv.create_revision)
        if first.key == term.key:
            return 0
        try:
            body = json.loads(first.value) if len(first.value) <= _MAX_VALUE_BYTES else None
        except ValueError:
            body = None
        words = [body.get("id"), body.get("url")] if isinstance(body, dict) else []
        texts = [word for word in words if isinstance(word, str) and word.isprintable()]
        is_one = len(texts) == 2 and texts[1].startswith(("http://", "https://"))
        leader = Candidate(*texts) if is_one else None
        if leader is None:
            self._say(f"the key {first.key} holds no lighthouse's name: delete it if it stays there")
        if leader != self.leader:
            self.leader = leader
            self._said = ""
            if self.other is not None:
                log.info("the lighthouse at %s leads", self.other.url)
                self._hooks.followed(self.other)
        return sum(kv.create_revision < term.revision for kv in line.values())

    def _begin(self, term: Term) -> None:
        if not term.in_force():
            return
        self.term, self.leader, self._said = term, self.me, ""
        log.info("this lighthouse leads from now on (%s)", self.me.url)
        self._hooks.elected(term)

    async def _renew_aside(self, term: Term, lease: Lease, sent: float, store: Store) -> str:
        """Renew in the thread, which may touch no object of the loop except ``term``."""
        try:
            return await self._renew(term, lease, sent, store)
        finally:
            await store.close()

    async def _renew(self, term: Term, lease: Lease, sent: float, store: Store) -> str:
        """Renew the lease in time until it is lost; return a sentence that says why."""
        logged, connected = "", store is self._store
        renew = sent + lease.ttl_s / 3
        # Connect to the store at once: at the first renewal the process may have no file descriptor left.
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(max(0.0, renew - self._clock())):
                if not connected:
                    await store.connect()
                    connected = True
        # The check ends the loop even if a cancellation was lost because timeouts ended at the same moment.
        while not term.is_over:
            await asyncio.sleep(max(0.0, renew - self._clock()))
            sent = self._clock()
            why = ""
            if sent - term.turned > STUCK_LEASES * lease.ttl_s:
                why = "the event loop hangs: this lighthouse lets its lease end"
            else:
                try:
                    async with asyncio.timeout(max(0.0, term.ends - sent)):
                        if not connected:
                            await store.connect()
                            connected = True
                        ttl_s = await store.keep_alive(lease.id)
                    term.ends = max(term.ends, sent + ttl_s - _margin(ttl_s))
                except TimeoutError:
                    why = "the store does not answer the renewal of the lease"
                except LeaseGone as error:
                    return str(error)
                except StoreError as error:
                    why = str(error)
            if why and why != logged:
                log.warning("election: %s", why)
            logged = why
            # After a failure renew more often, because the lease runs out.
            renew = sent + lease.ttl_s / (20 if why else 3)
        return "its term is over"

    def _end(self, term: Term, reason: str) -> None:
        if term.is_over:
            return
        term.is_over = True
        self.leader = None
        self._changed.set()
        if self.term is not term:
            return
        self.term = None
        log.warning("this lighthouse leads no longer: %s", reason)
        self._hooks.lost(reason)

    def _say(self, why: str) -> None:
        if why != self._said:
            self._said = why
            log.warning("election: %s", why)


def _margin(ttl_s: float) -> float:
    return min(MARGIN_MOST_S, MARGIN_SHARE * ttl_s)


# Whether the store answers, and whether it takes writes: a full store answers every read and refuses every
# write.
#
# The second probe is a write whose guard can never hold. A store that takes writes says that the guard
# failed, and changes nothing. A full store refuses the write before it looks at the guard.


# A missing key has revision 0, and no store reaches this revision.
_NEVER = (1 << 62) - 1
_WRITE_EVERY_S = 10.0
_WRITE_ANSWER_S = 5.0


class StoreProbe(Struct):
    """``refusal``: the store's message if it refused the last write, else empty.

    A read is tried at most once in ``every_s``. A request waits for it at most ``patience_s``, because
    kubelets wait one second; then it gets the last answer."""

    store: Store
    key: str
    name: str = ""  # the store's URL, for people
    every_s: float = 1.0
    answer_s: float = 1.0
    patience_s: float = 0.4
    is_reachable: bool = True
    refusal: str = ""
    asked: float = float("-inf")
    asking: asyncio.Task[None] | None = None

    async def ask(self) -> bool:
        """Return whether the store answers."""
        if self.asking is None and time.monotonic() - self.asked >= self.every_s:
            self.asking = asyncio.get_running_loop().create_task(self._ask())
        if self.asking is not None:
            await asyncio.wait({self.asking}, timeout=self.patience_s)
        return self.is_reachable

    async def _ask(self) -> None:
        is_reachable = False
        try:
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(self.answer_s):
                    await self.store.get(self.key)
                is_reachable = True
        finally:
            self.is_reachable, self.asked, self.asking = is_reachable, time.monotonic(), None

    async def watch_writes(self) -> None:
        """Try a write again and again, until cancelled."""
        while True:
            await self.try_writing()
            await asyncio.sleep(_WRITE_EVERY_S)

    async def try_writing(self) -> str:
        """Try a write once; return the refusal."""
        logged, key = self.refusal, f"{self.key}probe"
        try:
            async with asyncio.timeout(_WRITE_ANSWER_S):
                await self.store.commit([Compare(key, create_revision=_NEVER)], [Put(key, b"")])
            self.refusal = ""
        except (StoreUnavailable, StoreIndefinite, TimeoutError):
            pass  # a read is tried more often
        except StoreError as error:
            self.refusal = str(error)
        if bool(self.refusal) != bool(logged):
            log.warning(
                "the store takes writes again" if logged else f"the store refuses writes: {self.refusal}"
            )
        return self.refusal


# Writes to the store from a separate thread.
#
# A write takes eight turns of an event loop, to connect, send, and read the answer. With 10,000 sessions a
# turn of the lighthouse's loop takes some 50 ms. In that loop, an epoch would be in the store long before
# its members hear of it. From this thread a write costs one turn of that loop.


# The arguments, answer and errors are those of ``Store.commit``.
Commit = Callable[[Sequence[Compare], Sequence[Operation]], Awaitable[int | None]]


class StoreThread:
    """``store``: this thread's own handle; the first write connects it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._side = BackgroundLoop("fabric-writes")
        self._connecting = asyncio.Lock()
        self._is_connected = False

    async def commit(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> int | None:
        return await asyncio.wrap_future(self._side.start(self._commit(compares, operations)))

    async def close(self) -> None:
        """Give up the handle and end the thread."""
        await asyncio.wrap_future(self._side.start(self._store.close()))
        self._side.close()

    async def _commit(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> int | None:
        async with self._connecting:
            if not self._is_connected:
                await self._store.connect()
                self._is_connected = True
        try:
            return await self._store.commit(compares, operations)
        except (StoreUnavailable, StoreIndefinite, LeaseGone):
            raise
        except StoreError:
            # The store may have been wiped or replaced; a connected handle refuses another store for ever.
            self._is_connected = False
            await self._store.close()
            raise
