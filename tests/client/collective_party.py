"""Members of a job that call collectives over real links and threads, without a lighthouse."""

import asyncio
import contextlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from msgspec.structs import replace
from protocol.makers import record_of

from fabric.client.collectives.collectives import CollectiveMembers, Collectives, SessionCollectives
from fabric.client.control.peers import CollectiveLinks, Peers
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.model import Member, Record
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.member_events import PreparedRound
from fabric.runtime.failpoints import Failpoints
from fabric.runtime.http.token_file import TokenFile
from fabric.transport.tcp import ListenerIdentity


class Party(SessionCollectives):
    """One member; as the engine of its collectives, it knows the epochs that the test announces."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, shared_memory: bool) -> None:
        self.name, self._loop = name, loop
        self.newest: Record | None = None
        self.current: Record | None = None
        self.plane = CpuRing(shared_memory=shared_memory)
        self.peers = Peers(ListenerIdentity("job", name), 1, TokenFile.of("token"), self.plane, link_s=1.0)
        self._pool = ThreadPoolExecutor(1)
        port = self.run_soon(self.peers.start("127.0.0.1", "0", lambda _: None)).result()
        self.member = Member(name, 1, f"127.0.0.1:{port}", "")
        self.links = CollectiveLinks(self.peers)
        self.collectives = Collectives(
            self, self.links, CollectiveMembers(self, name, 1), contextlib.nullcontext, Failpoints("")
        )

    def run_soon(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def announce(self, record: Record, in_force: bool = True) -> None:
        """Let the member learn of an epoch, on the thread of its links."""

        async def learn() -> None:
            self.newest = record
            self.current = record if in_force else self.current
            self.peers.on_record(record)

        self.run_soon(learn()).result()

    def commit(self, step: int, epoch: int | None = None) -> None:
        """Begin the phase after the commit of ``step``."""
        epoch = epoch or self.current.epoch
        prepared = PreparedRound(epoch, step, "", 1.0, (), ())
        self.collectives.members.end_step(io.Apply(1, step, prepared, contributed=True, digest=False))

    def compute(self, step: int) -> None:
        self.collectives.members.begin_step(io.Compute(step, (0,)))

    def later(self, work, *arguments, **options) -> Future:
        """Run one of the blocking calls in the member's own thread."""
        return self._pool.submit(work, *arguments, **options)

    def die(self) -> None:
        """End this member's links, as the death of its process does."""
        self.collectives.close()
        self.run_soon(self.peers.close()).result()

    def close(self) -> None:
        self.die()
        self._pool.shutdown()
        self.plane.close()


class Parties:
    """Members of one job on one event loop."""

    def __init__(self, *names: str, shared_memory: bool = True) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.all = {name: Party(name, self._loop, shared_memory) for name in names}

    def __enter__(self) -> "Parties":
        return self

    def __iter__(self):
        return iter(self.all.values())

    def __getitem__(self, name: str) -> Party:
        return self.all[name]

    def record(self, names: str, epoch: int, forced: int = 0, joining: str = "") -> Record:
        """Return the record of an epoch with these members; ``forced``: its newest forced epoch."""
        roster = tuple(replace(self[x].member, joining=x in joining.split()) for x in names.split())
        return replace(record_of(names, epoch=epoch), roster=roster, forced=forced)

    def announce(self, names: str, epoch: int, forced: int = 0, joining: str = "") -> None:
        """Put an epoch in force at its members."""
        for name in names.split():
            self[name].announce(self.record(names, epoch, forced, joining))

    def __exit__(self, *_: object) -> None:
        for party in self:
            party.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
