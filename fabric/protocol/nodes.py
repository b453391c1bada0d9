"""The meeting of one replica's hosts: who is which node of the next attempt, and when an attempt is over.

A replica of several hosts has one launcher on each. A launcher says what it does, at each change and every
few seconds, and is told what to do next. This table keeps nothing for a new leader, which learns the running
attempt, and the nodes' numbers, from the launchers' own words. No clock and no network here.

An attempt begins when every number has a host that waits. It is over when each of its nodes has said how its
ranks ended, or is lost. Only then do the launchers judge, all from the same facts. A host
that is lost keeps its number only until a spare host stands by.
"""

from collections.abc import Callable, Collection
from itertools import chain, islice
from typing import Annotated, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from fabric.model import Value

MAX_NODES = 1024
MAX_RANKS_OF_HOST = 64
MAX_LAUNCHERS = 2 * MAX_NODES  # nodes and spare hosts of one replica
# Silence after which a node that runs is lost: alone, or with one sign: another node's end or a broken link.
SILENT_S, SUSPECT_S = 15.0, 3.0
BROKEN_S = 0.5  # a launcher whose connection has broken comes back within this time
UNCLAIMED_S = 30.0  # a number that no host ever claimed goes to a spare host after this time
MOST_SHAPES = 4  # so many groups of hosts that were started alike are tried for an attempt
_MOST_TRIED = 16  # so many spare hosts, of the lost host's rack and of all, are compared with one lost host
_ENOUGH = 0.95  # hosts of one kind differ by less memory than this part says

SPARE = -1
_Rank = Annotated[int, Meta(ge=0, lt=8192)]
_Number = Annotated[int, Meta(ge=SPARE, lt=MAX_NODES)]
_Count = Annotated[int, Meta(ge=0, lt=2**31)]
_Text = Annotated[str, Meta(max_length=300)]
_Word = Annotated[str, Meta(min_length=1, max_length=128)]


class NodeEnd(Value):
    """How ranks of an attempt ended: those of one host, or of all."""

    codes: Annotated[dict[_Rank, int], Meta(max_length=MAX_RANKS_OF_HOST)]  # exit code by rank of the replica
    # The ranks that failed first.
    first: Annotated[tuple[_Rank, ...], Meta(max_length=MAX_RANKS_OF_HOST)] = ()
    ran_s: Annotated[float, Meta(ge=0)] = 0.0  # to the first failure
    # The hosts of which nobody knows how their ranks ended.
    lost: Annotated[tuple[_Text, ...], Meta(max_length=8)] = ()

    @property
    def is_clean(self) -> bool:
        """Whether every rank has finished."""
        return not self.lost and set(self.codes.values()) == {0}


class NodeSays(Value):
    """One launcher's words about itself."""

    id: _Word  # of this process, so that one that replaces it is another
    host: _Word
    number: _Number  # the number that it was started with; SPARE: a spare host
    nodes: Annotated[int, Meta(ge=1, le=MAX_NODES)]
    shape: _Text  # what must be equal on all hosts, in words such as "2 nodes of 4 ranks"
    address: _Word  # host and port at which rank 0 of the next attempt listens, if it runs here
    rack: Annotated[str, Meta(max_length=64)] = ""
    run: Annotated[str, Meta(max_length=64)] = ""  # the attempt in which it is; empty: it waits for one
    attempt: _Count = 0  # number of the newest attempt in which it was
    node: _Number = SPARE  # its number in that attempt
    end: NodeEnd | None = None  # how its ranks ended in ``run``; None: they run
    gone: _Text = ""  # why this launcher ends now
    device: Annotated[str, Meta(max_length=64)] = ""  # kind of this host's GPUs; empty: it has none
    devices: _Count = 0  # number of its GPUs
    device_gb: Annotated[float, Meta(ge=0)] = 0.0  # memory of the smallest GPU
    memory_gb: Annotated[float, Meta(ge=0)] = 0.0  # memory of the host; 0: unknown
    instead: _Text = ""  # the host in whose place it is in that attempt; empty: none

    @property
    def hardware(self) -> str:
        """Describe this host's GPUs and memory."""
        gpus = f"{self.devices} x {self.device} of {self.device_gb:.0f} GB" if self.device else "no GPU"
        return f"{gpus} and {self.memory_gb:.0f} GB of memory"

    def replaces(self, lost: "NodeSays | None") -> bool:
        """Whether this host is as good as the one that was ``lost``, as far as both have said."""
        return lost is None or (
            (self.device == lost.device or not lost.memory_gb)
            and self.devices >= lost.devices
            and self.device_gb >= _ENOUGH * lost.device_gb
            and self.memory_gb >= _ENOUGH * lost.memory_gb
        )


class HostRow(Value):
    """One host of a replica of several hosts, as people see it."""

    id: str  # of its launcher; empty where none is known
    node: int  # SPARE: it has no place
    host: str
    rack: str
    state: str  # member, waiting for an attempt, missing, or spare host
    for_s: float  # it has been in this state for so long
    why: str = ""
    replica: str = ""


class NodeOrder(Value):
    """An order to one launcher.

    "wait" for an order, "start" its ranks, let them "run", "stop" them, or "judge" how the attempt ``ended``.
    "leave": nobody needs this host any more.
    """

    do: Literal["wait", "start", "run", "stop", "judge", "leave"]
    why: str = ""
    run: str = ""
    attempt: int = 0
    node: int = SPARE
    head: str = ""  # where rank 0 listens
    ended: NodeEnd | None = None
    replica: str = ""  # the replica that the order is about; a spare host may serve any
    is_refusal: bool = False  # a person must look at this host, which waits in vain
    instead: str = ""  # the host in whose place this one starts

    @property
    def key(self) -> tuple[str, str, str]:
        """The part that differs between two orders to one launcher."""
        return (self.do, self.run, self.why)


class _Launcher(Struct):
    """One launcher as it was heard last."""

    says: NodeSays
    since: float  # it waits since then
    at: float  # when its last request was answered
    open: int = 0  # its requests that wait for an answer
    is_broken: bool = False  # its last connection broke

    def silent_s(self, now: float) -> float:
        return 0.0 if self.open else now - self.at

    def is_here(self, now: float) -> bool:
        return self.silent_s(now) <= (BROKEN_S if self.is_broken else SUSPECT_S)


class _Attempt(Struct):
    """The newest attempt of which any launcher has said something."""

    number: int
    run: str
    nodes: int
    shape: str
    began: float  # for a new leader: when it learnt of the attempt
    head: str = ""
    seated: dict[int, NodeSays] = field(default_factory=dict)  # what each node's launcher said last
    node_of: dict[str, int] = field(default_factory=dict)  # number by launcher
    # Of nodes whose place a spare host took: the host before, and when.
    instead: dict[int, tuple[str, float]] = field(default_factory=dict)
    ended: dict[int, NodeEnd] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)  # why, by number
    # Why a node's launcher is away, and since when.
    away: dict[int, tuple[str, float]] = field(default_factory=dict)
    why: str = ""  # the first failure; empty while all is well
    is_elsewhere: bool = False  # a node has another launcher than in the attempt before
    outcome: NodeEnd | None = None

    def seat(self, node: int, says: NodeSays) -> None:
        self.seated[node], self.node_of[says.id] = says, node

    def name(self, node: int) -> str:
        says = self.seated.get(node)
        return f"node {node}" if says is None else f"node {node} ({says.host})"

    def note_end(self, node: int, end: NodeEnd) -> None:
        if node in self.lost or node in self.ended:
            return
        self.ended[node] = end
        if not end.is_clean:
            failed = min(end.first or (rank for rank, code in end.codes.items() if code), default=0)
            why = f"rank {failed} on {self.name(node)} ended with {end.codes.get(failed, 1)}"
            self.why = self.why or why

    def note_loss(self, node: int, why: str, now: float) -> None:
        self.away.setdefault(node, (f"{self.name(node)} {why}", now))
        if node not in self.ended:
            self.lost.setdefault(node, f"{self.name(node)} {why}")
            self.why = self.why or self.lost[node]

    def settle(self) -> None:
        """Fix the outcome when each node has ended or is lost; it never changes afterwards."""
        if self.outcome is None and len(self.ended) + len(self.lost) == self.nodes:
            parts = [self.ended[node] for node in sorted(self.ended)]
            codes = {rank: code for part in parts for rank, code in part.codes.items()}
            # Hosts' clocks differ. Ranks that lost a peer end with a code; the rank that died first has a
            # signal.
            failed = [rank for part in parts for rank in part.first]
            killed = [rank for rank in failed if codes.get(rank, 0) < 0]
            first, ran_s = tuple(sorted(killed or failed)), max((part.ran_s for part in parts), default=0.0)
            self.outcome = NodeEnd(codes, first, ran_s, tuple(x for _, x in sorted(self.lost.items())))


class ReplicaNodes:
    """The launchers of one replica. ``new_run`` makes the name of an attempt, fresh each time."""

    def __init__(self, new_run: Callable[[], str]) -> None:
        self._new_run = new_run
        self.launchers: dict[str, _Launcher] = {}
        self._suspects: Collection[str] = ()  # another spare host is taken first
        self._attempt: _Attempt | None = None

    @property
    def stage(self) -> tuple[str, str, bool]:
        """The run of the newest attempt, why it fails, and whether it is over: orders change with it."""
        attempt = self._attempt
        return ("", "", False) if attempt is None else (attempt.run, attempt.why, attempt.outcome is not None)

    @property
    def attempt(self) -> tuple[int, dict[int, str], set[str]]:
        """The number of the newest attempt, each of its nodes in words, and their launchers."""
        attempt = self._attempt
        if attempt is None:
            return 0, {}, set()
        words = {
            node: f"node {node} on {says.host}"
            + (f" in the place of {attempt.instead[node][0]}" if node in attempt.instead else "")
            for node, says in sorted(attempt.seated.items())
        }
        return attempt.number, words, set(attempt.node_of)

    @property
    def is_elsewhere(self) -> bool:
        """Whether a node of the newest attempt has another launcher than before, and perhaps no memory."""
        return self._attempt is not None and self._attempt.is_elsewhere

    def rows(self, now: float) -> list[HostRow]:
        """Describe the replica's hosts by number, then those that stand by; none after the replica's end."""
        attempt = self._attempt
        if not self.launchers or (attempt and attempt.outcome and attempt.outcome.is_clean):
            return []
        if attempt is not None and attempt.outcome is None:
            seats: dict[int, _Launcher] = {}
            nodes = attempt.nodes
        else:
            like = self._likes(now)[0] if self._waiting(now) else attempt
            seats, nodes = ({}, 0) if like is None else (self._seats(like.shape, like.nodes, now), like.nodes)
        began = min((x.since for x in self.launchers.values() if not x.says.run), default=now)
        rows = [self._row(node, seats, began, now) for node in range(nodes)]
        placed = {row.id for row in rows}
        for launcher in self.launchers.values():
            says = launcher.says
            if says.id not in placed and not says.run:
                # A bound for the work: each order looks at all launchers.
                why = self._order_to_wait(launcher, now).why if len(rows) < nodes + _MOST_TRIED else ""
                for_s = now - launcher.since
                rows.append(HostRow(says.id, SPARE, says.host, says.rack, "spare host", for_s, why))
        return rows

    def _row(self, node: int, seats: dict[int, _Launcher], began: float, now: float) -> HostRow:
        attempt = self._attempt
        says = seats[node].says if node in seats else attempt.seated.get(node) if attempt else None
        if says is None:
            why = f"node {node} has {'not been heard' if attempt and not attempt.outcome else 'no host'} yet"
            return HostRow("", node, "", "", "missing", now - began, why)
        launcher = self.launchers.get(says.id)
        if node in seats or (launcher and launcher.is_here(now) and attempt and attempt.outcome):
            return HostRow(
                says.id, node, says.host, says.rack, "waiting", now - (launcher or seats[node]).since
            )
        assert attempt is not None
        if node in attempt.lost or attempt.outcome:
            heard = now - launcher.silent_s(now) if launcher else now
            why, at = attempt.away.get(node, (f"{attempt.name(node)} is silent", heard))
            return HostRow(says.id, node, says.host, says.rack, "missing", now - at, why)
        instead, at = attempt.instead.get(node, ("", attempt.began))
        why = f"in the place of {instead}" if instead else ""
        return HostRow(says.id, node, says.host, says.rack, "member", now - at, why)

    def hear(self, says: NodeSays, now: float, suspects: Collection[str] = ()) -> None:
        """Take one request of a launcher. ``answered`` must follow. ``suspects``: hosts that failed often."""
        self._suspects = suspects
        launcher = self.launchers.get(says.id)
        if launcher is not None and launcher.says == says and launcher.is_here(now):
            launcher.is_broken, launcher.open = False, launcher.open + 1
            return  # no news; each look at all launchers takes long where there are many
        if launcher is None and (says.gone or len(self.launchers) >= MAX_LAUNCHERS):
            self._note(says, now)
            return
        if launcher is None:
            launcher = self.launchers[says.id] = _Launcher(says, now, now)
        if launcher.says.run and not says.run:
            launcher.since = now
        launcher.says, launcher.is_broken, launcher.open = says, False, launcher.open + 1
        self._note(says, now)
        if says.gone:
            del self.launchers[says.id]
        self.sweep(now)

    def answered(self, identity: str, now: float, *, broken: bool = False) -> None:
        """Note that a request of this launcher has its answer, or that its connection has broken."""
        launcher = self.launchers.get(identity)
        if launcher is not None:
            launcher.open, launcher.at = launcher.open - 1, now
            launcher.is_broken = broken and not launcher.open

    def sweep(self, now: float) -> None:
        """Note losses, and begin an attempt where that is possible now."""
        attempt = self._attempt
        if attempt is not None and attempt.outcome is None:
            for node in set(range(attempt.nodes)) - set(attempt.ended) - set(attempt.lost):
                seated = attempt.seated.get(node)
                launcher = self.launchers.get(seated.id) if seated is not None else None
                silent_s = now - attempt.began if launcher is None else launcher.silent_s(now)
                signs = bool(attempt.why) + (launcher is not None and launcher.is_broken)
                if silent_s > (SILENT_S, SUSPECT_S, BROKEN_S)[signs]:
                    attempt.note_loss(node, f"has not been heard for {silent_s:.0f} s", now)
            attempt.settle()
        for name, launcher in list(self.launchers.items()):
            if launcher.silent_s(now) > SILENT_S:
                del self.launchers[name]
                if attempt is not None and name in attempt.node_of:
                    attempt.note_loss(attempt.node_of[name], "is silent", now)
        if attempt is None or attempt.outcome is not None:
            self._begin(now)

    def order(self, identity: str, now: float) -> NodeOrder:
        """Return what this launcher shall do."""
        launcher, attempt = self.launchers.get(identity), self._attempt
        if launcher is None:
            return NodeOrder("wait", "the lighthouse does not know this launcher")
        says = launcher.says
        if not says.run:
            return self._order_to_wait(launcher, now)
        if attempt is None or says.run != attempt.run:
            if says.end is None:
                return NodeOrder("stop", "the replica's other hosts are in a newer attempt", says.run)
            alone = replace(says.end, lost=("the other hosts are in a newer attempt",))
            return NodeOrder("judge", "", says.run, says.attempt, says.node, ended=alone)
        if says.end is None:
            gone = attempt.lost.get(says.node)
            return NodeOrder("stop" if attempt.why or gone else "run", attempt.why, says.run)
        if attempt.outcome is None:
            running = sorted(set(range(attempt.nodes)) - set(attempt.ended) - set(attempt.lost))
            return NodeOrder("wait", f"{attempt.name(running[0])} has not ended yet", says.run)
        return NodeOrder("judge", attempt.why, says.run, says.attempt, says.node, ended=attempt.outcome)

    # --- what is heard ------------------------------------------------------------------------------------

    def _note(self, says: NodeSays, now: float) -> None:
        attempt = self._attempt
        if says.run and (attempt is None or (says.run != attempt.run and says.attempt > attempt.number)):
            attempt = _Attempt(says.attempt, says.run, says.nodes, says.shape, now)
            self._attempt = attempt
        if attempt is None or says.run != attempt.run:
            if attempt is not None and says.gone and says.id in attempt.node_of:
                attempt.note_loss(attempt.node_of[says.id], f"has left: {says.gone}", now)
            return
        if says.node not in range(attempt.nodes) or attempt.seated.get(says.node, says).id != says.id:
            return
        attempt.seat(says.node, says)
        if says.instead:  # a new leader learns it
            attempt.instead.setdefault(says.node, (says.instead, now))
        if says.end is not None:
            attempt.note_end(says.node, says.end)
        elif says.gone:
            attempt.note_loss(says.node, f"has left: {says.gone}", now)
        attempt.settle()

    # --- the next attempt ---------------------------------------------------------------------------------

    def _order_to_wait(self, launcher: _Launcher, now: float) -> NodeOrder:
        attempt, says = self._attempt, launcher.says
        if attempt is not None:
            node = attempt.node_of.get(says.id)
            if node is not None and attempt.outcome is None and says.attempt < attempt.number:
                instead, _ = attempt.instead.get(node, ("", 0.0))
                return NodeOrder(
                    "start", "", attempt.run, attempt.number, node, attempt.head, instead=instead
                )
        if (differs := self._difference(says, now)) is not None:
            return NodeOrder("wait", differs, is_refusal=True)
        if attempt is not None and attempt.outcome is None:
            if not any(says.replaces(x) for x in attempt.seated.values()) and says.number == SPARE:
                return self._refusal(says, min(attempt.seated, default=0))
            if (holder := attempt.seated.get(says.number)) is not None:
                return NodeOrder("wait", f"{holder.host} is node {says.number}: this host stands by")
            return NodeOrder("wait", f"attempt {attempt.number} runs: this host stands by")
        seats = self._seats(says.shape, says.nodes, now)
        missing = [node for node in range(says.nodes) if node not in seats]
        if launcher not in seats.values():
            if (holds := seats.get(says.number)) is not None:
                return NodeOrder("wait", f"{holds.says.host} is node {says.number} too: this host stands by")
            if missing and attempt is not None and not says.replaces(attempt.seated.get(missing[0])):
                return self._refusal(says, missing[0])
        return NodeOrder("wait", f"no host is node {', '.join(map(str, missing[:8]))} yet" if missing else "")

    def _refusal(self, says: NodeSays, node: int) -> NodeOrder:
        """Say that this spare host cannot be that node."""
        lost = self._attempt.seated.get(node) if self._attempt is not None else None
        if self._attempt is None or lost is None:
            return NodeOrder("wait", "this host stands by")
        unlike = f"{says.host} has {says.hardware}, and {self._attempt.name(node)} has {lost.hardware}"
        return NodeOrder("wait", f"{unlike}: start a spare host like it", is_refusal=True)

    def _waiting(self, now: float) -> list[_Launcher]:
        """The launchers that wait for an attempt, the one that waits longest first."""
        here = [x for x in self.launchers.values() if not x.says.run and x.is_here(now)]
        return sorted(here, key=lambda x: (x.since, x.says.id))

    def _difference(self, says: NodeSays, now: float) -> str | None:
        """Say which other host was started otherwise; None where all agree."""
        attempt = self._attempt
        if attempt is not None and attempt.outcome is None and attempt.shape != says.shape:
            seated = attempt.seated
            others = (seated[min(seated)].host, attempt.shape) if seated else ("", "")
        else:
            unlike = [x.says for x in self._waiting(now) if x.says.shape != says.shape]
            others = (unlike[0].host, unlike[0].shape) if unlike else ("", "")
        if not others[1]:
            return None
        return (
            f"{others[0]} was started with {others[1]}, and {says.host} with {says.shape}: start both alike"
        )

    def _seats(self, shape: str, nodes: int, now: float) -> dict[int, _Launcher]:
        """The launcher of each number in the next attempt, of those started alike; a number without one is
        missing.
        """
        waiting = [x for x in self._waiting(now) if x.says.shape == shape]
        before = self._attempt.seated if self._attempt is not None else {}
        by_id = {launcher.says.id: launcher for launcher in waiting}
        seats = {n: by_id[says.id] for n, says in before.items() if says.id in by_id and n < nodes}
        seated = {launcher.says.id for launcher in seats.values()}
        # A holder that is here is on its way from the last attempt to the next.
        holders = {n: self.launchers.get(says.id) for n, says in before.items()}
        away = {n for n, holder in holders.items() if holder is None or not holder.is_here(now)}
        open_ = [n for n in range(nodes) if n not in seats and (n in away or n not in before)]
        claims: dict[int, _Launcher] = {}
        for launcher in waiting:
            if launcher.says.id not in seated:
                claims.setdefault(launcher.says.number, launcher)
        seats |= {node: claims[node] for node in open_ if node in claims}
        seated = {launcher.says.id for launcher in seats.values()}
        # A host whose place was taken while it was away is a spare host too.
        free = {SPARE, *before}
        waiting.sort(key=lambda x: x.says.host in self._suspects)
        spares = {x.says.id: x for x in waiting if x.says.id not in seated and x.says.number in free}
        by_rack: dict[str, dict[str, _Launcher]] = {}
        for identity, launcher in spares.items():
            by_rack.setdefault(launcher.says.rack, {})[identity] = launcher
        began = min((x.since for x in waiting), default=now)
        for node in open_:
            if node in seats or not spares or not (node in before or now - began > UNCLAIMED_S):
                continue
            lost = before.get(node)
            near = by_rack.get(lost.rack, {}) if lost is not None else {}
            tried = chain(islice(near.values(), _MOST_TRIED), islice(spares.values(), _MOST_TRIED))
            fits = next((x for x in tried if x.says.replaces(lost)), None)
            if fits is not None:
                seats[node] = fits
                del spares[fits.says.id], by_rack[fits.says.rack][fits.says.id]
        return seats

    def _likes(self, now: float) -> list[NodeSays]:
        """One launcher of each group that was started alike, first of the group of the last attempt."""
        before = self._attempt
        shapes = {launcher.says.shape: launcher.says for launcher in reversed(self._waiting(now))}
        return sorted(shapes.values(), key=lambda says: before is None or says.shape != before.shape)

    def _begin(self, now: float) -> None:
        """Begin an attempt of hosts that were started alike: as the last attempt's, if they are complete."""
        before = self._attempt
        if len(self.launchers) < min((x.says.nodes for x in self.launchers.values()), default=1):
            return  # some hosts have not come
        for like in self._likes(now)[:MOST_SHAPES]:  # a bound for the work of one message
            seats = self._seats(like.shape, like.nodes, now)
            if len(seats) == like.nodes:
                newest = max(launcher.says.attempt for launcher in self.launchers.values())
                number = 1 + max(newest, before.number if before is not None else 0)
                attempt = _Attempt(number, self._new_run(), like.nodes, like.shape, now)
                attempt.head = seats[0].says.address
                for node, launcher in sorted(seats.items()):
                    attempt.seat(node, launcher.says)
                    was = before.seated.get(node) if before is not None else None
                    attempt.is_elsewhere |= was is not None and was.id != launcher.says.id
                    if before is not None and was is not None and was.host == launcher.says.host:
                        attempt.instead |= {n: x for n, x in before.instead.items() if n == node}
                    elif was is not None:
                        attempt.instead[node] = (was.host, now)
                self._attempt = attempt
                return
