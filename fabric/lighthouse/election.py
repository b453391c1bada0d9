"""Who leads: one key in the store, created under a lease by whoever comes first.

The lease is only a hint, so two things make a leader safe. It counts the end of its lease on its own
clock, from before each renewal was sent and with a margin, and stops by itself. And every write that it
makes is guarded by the revision at which the key was created (``Term.guard``), so that a leader that was
stopped, or whose clock lies, can change nothing once another one has been elected.

Everybody else watches the key, which names the leader's address, and stands for election when it goes.
"""

import asyncio
import json
import logging
import random
import secrets
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

from fabric.errors import Compacted, LeaseGone, StoreError, StoreIndefinite, StoreUnavailable
from fabric.store import Compare, KeyValue, Lease, Put, Store

log = logging.getLogger(__name__)

Clock = Callable[[], float]

# The part of the lease, and at most so many seconds, by which a leader stops before its lease can end.
MARGIN_SHARE = 0.2
MARGIN_MOST_S = 1.0
_REVOKE_S = 1.5
_RETRY_S = (0.05, 1.0)
_MAX_VALUE_BYTES = 4096


def boot_time() -> float:
    """Seconds since boot; unlike the monotonic clock it goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One lighthouse process: its random id, and the base URL at which others reach it."""

    id: str
    url: str


class Term:
    """One time of leading. ``revision`` is that of the election key's creation: it fences every write."""

    def __init__(
        self, store_id: str, guard: Compare, clock: Clock, resign: Callable[["Term", str], None]
    ) -> None:
        self.store_id = store_id
        self.guard = guard
        self.ends = 0.0
        self.is_over = False
        self._clock = clock
        self._resign = resign

    @property
    def revision(self) -> int:
        return self.guard.create_revision or 0

    @property
    def key(self) -> str:
        return self.guard.key

    def in_force(self) -> bool:
        """Whether the lease cannot have ended yet. Ask before every act as a leader."""
        return not self.is_over and self._clock() < self.ends

    def resign(self, reason: str) -> None:
        """Stop leading now; the lease is given back. Once is enough."""
        self._resign(self, reason)


@dataclass(frozen=True, slots=True)
class Hooks:
    """Called at once and in order. ``elected``: this process leads; ``lost``: it does no longer, and why;
    ``followed``: another process leads; ``written``: how an attempt to become the leader came out."""

    elected: Callable[[Term], None]
    lost: Callable[[str], None]
    followed: Callable[[Candidate], None]
    written: Callable[[str], None]


class Election:
    """Stands for election until cancelled. ``leader`` is whom the store named last."""

    def __init__(
        self, store: Store, namespace: str, lease_s: float, hooks: Hooks, *, clock: Clock = boot_time
    ) -> None:
        self.key = f"/fabric/{namespace}/election"
        self.me = Candidate(secrets.token_hex(8), "")
        self.leader: Candidate | None = None
        self.term: Term | None = None
        self._store = store
        self._lease_s = lease_s
        self._hooks = hooks
        self._clock = clock
        self._ended = asyncio.Event()
        self._said = ""

    async def run(self, store_id: str, url: str) -> None:
        """Follow or lead, for ever. ``url`` is how others reach this process; the store is connected."""
        self.me = Candidate(self.me.id, url)
        jitter = random.Random()  # noqa: S311 - spreads attempts, protects nothing
        pause_s = _RETRY_S[0]
        while True:
            try:
                await self._follow()
                await self._stand(store_id)
                pause_s = _RETRY_S[0]
            except Compacted:
                continue  # the watch came too late: look again
            except StoreError as error:
                self._say(str(error))
                await asyncio.sleep(pause_s * jitter.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _RETRY_S[1])
                store_id = await self._reconnect(error, store_id)

    @property
    def other(self) -> Candidate | None:
        """The leader, when it is another process that can be reached at an address of its own.

        A process that was killed and started again at the same address finds its own URL in the store
        until the old lease ends: sending anybody there would be a circle.
        """
        leader = self.leader
        return leader if leader and leader.id != self.me.id and leader.url != self.me.url else None

    async def _follow(self) -> None:
        """Return when nobody leads."""
        found, revision = await self._store.list(self.key)
        entry = next((kv for kv in found if kv.key == self.key), None)
        self._learn(entry)
        if entry is None:
            return
        async with aclosing(self._store.watch(self.key, revision + 1)) as events:
            async for event in events:
                if event.key_value.key != self.key:
                    continue
                self._learn(event.key_value if event.kind == "put" else None)
                if event.kind == "delete":
                    return
        raise StoreUnavailable("the store ended the watch of the election: it is being closed")

    async def _stand(self, store_id: str) -> None:
        """Try to become the leader, and lead while that lasts."""
        sent = self._clock()
        lease = await self._store.grant_lease(self._lease_s)
        term: Term | None = None
        try:
            term = await self._claim(lease, store_id)
            if term is not None:
                await self._lead(term, lease, sent)
        finally:
            if term is not None:
                self._end(term, "it is being stopped")
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(_REVOKE_S):
                    await self._store.revoke(lease.id)

    async def _claim(self, lease: Lease, store_id: str) -> Term | None:
        """Create the key; None when somebody else was quicker. An unknown outcome is looked up."""
        body = {"id": self.me.id, "url": self.me.url, "attempt": secrets.token_hex(8)}
        value = json.dumps(body).encode()
        try:
            guards = [Compare(self.key, create_revision=0)]
            revision = await self._store.commit(guards, [Put(self.key, value, lease.id)])
            self._hooks.written("refused" if revision is None else "written")
        except StoreIndefinite:
            self._hooks.written("indefinite")
        found = await self._store.get(self.key)
        if found is None or found.value != value:
            return None
        guard = Compare(self.key, create_revision=found.create_revision)
        return Term(store_id, guard, self._clock, self._end)

    async def _lead(self, term: Term, lease: Lease, sent: float) -> None:
        ttl_s = lease.ttl_s
        term.ends = sent + ttl_s - _margin(ttl_s)
        self._ended.clear()
        if not term.in_force():
            return
        self.term, self.leader, self._said = term, self.me, ""
        log.info("this lighthouse leads from now on (%s)", self.me.url)
        self._hooks.elected(term)
        renew = sent + ttl_s / 3
        while not term.is_over:
            await self._wait_until(min(renew, term.ends))
            if not term.in_force():
                self._end(term, "its lease may have ended, for the store did not renew it in time")
            elif self._clock() >= renew:
                sent = self._clock()
                renewed = await self._renew(term, lease)
                # After a failure the store is asked more often, for the time is running.
                renew = sent + (ttl_s / 3 if renewed else ttl_s / 20)

    async def _renew(self, term: Term, lease: Lease) -> bool:
        sent = self._clock()
        try:
            async with asyncio.timeout(max(0.0, term.ends - sent)):
                ttl_s = await self._store.keep_alive(lease.id)
        except LeaseGone as error:
            self._end(term, str(error))
        except TimeoutError:
            self._say("the store does not answer the renewal of the lease")
        except StoreError as error:
            self._say(str(error))
        else:
            term.ends = max(term.ends, sent + ttl_s - _margin(ttl_s))
            self._said = ""
            return True
        return False

    async def _wait_until(self, moment: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, moment - self._clock())):
                await self._ended.wait()

    def _end(self, term: Term, reason: str) -> None:
        if term.is_over:
            return
        term.is_over = True
        if self.term is not term:
            return
        self.term = self.leader = None
        self._ended.set()
        log.warning("this lighthouse leads no longer: %s", reason)
        self._hooks.lost(reason)

    def _learn(self, entry: KeyValue | None) -> None:
        self.leader = None if entry is None else _candidate(entry.value)
        self._said = ""
        if entry is not None and self.leader is None:
            self._say(f"the key {self.key} holds no lighthouse's name: delete it if it stays there")
        other = self.other
        if other is not None:
            log.info("the lighthouse at %s leads", other.url)
            self._hooks.followed(other)

    async def _reconnect(self, error: StoreError, store_id: str) -> str:
        """The store's id, read again where the store may be another one now (wiped, or replaced)."""
        if isinstance(error, StoreUnavailable | StoreIndefinite | LeaseGone):
            return store_id
        with suppress(StoreError):
            await self._store.close()
            return await self._store.connect()
        return store_id

    def _say(self, why: str) -> None:
        if why != self._said:
            self._said = why
            log.warning("election: %s", why)


def _margin(ttl_s: float) -> float:
    return min(MARGIN_MOST_S, MARGIN_SHARE * ttl_s)


def _candidate(value: bytes) -> Candidate | None:
    """Whom the key's value names, or None for what no lighthouse wrote."""
    if len(value) > _MAX_VALUE_BYTES:
        return None
    try:
        body = json.loads(value)
    except ValueError:
        return None
    found = [body.get("id"), body.get("url")] if isinstance(body, dict) else [None]
    if not all(isinstance(text, str) and text.isprintable() for text in found):
        return None
    leader = Candidate(*found)
    return leader if leader.url.startswith(("http://", "https://")) else None
