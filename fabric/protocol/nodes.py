"""The meeting of one replica's hosts: who is which node of the next attempt, and when an attempt is over.

A replica of several hosts has one launcher on each. A launcher says what it does, at each change and every
few seconds, and is told what to do next. This table keeps nothing for a new leader, which learns the running
attempt, and the nodes' numbers, from the launchers' own words. No clock and no network here.

An attempt begins when every number has a host that waits. It is over when each of its nodes has said how its
ranks ended, or is lost. Only then do the launchers judge, all from the same facts. A host
that is lost keeps its number only until a spare host stands by.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from msgspec import Meta

MAX_NODES = 1024
MAX_RANKS_OF_HOST = 64
MAX_LAUNCHERS = 2 * MAX_NODES  # nodes and spare hosts of one replica
# Silence after which a node that runs is lost: alone, or where another node's end shows that it may be.
SILENT_S, SUSPECT_S = 15.0, 3.0
BROKEN_S = 1.0  # a launcher whose connection has broken comes back within this time
UNCLAIMED_S = 30.0  # a number that no host ever claimed goes to a spare host after this time
MOST_SHAPES = 4  # so many groups of hosts that were started alike are tried for an attempt

SPARE = -1
_Rank = Annotated[int, Meta(ge=0, lt=8192)]
_Number = Annotated[int, Meta(ge=SPARE, lt=MAX_NODES)]
_Count = Annotated[int, Meta(ge=0, lt=2**31)]
_Text = Annotated[str, Meta(max_length=300)]
_Word = Annotated[str, Meta(min_length=1, max_length=128)]


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """How ranks of an attempt ended: those of one host, or of all."""

    # Exit code by rank of the replica.
    codes: Annotated[dict[_Rank, int], Meta(max_length=MAX_RANKS_OF_HOST)]
    first: Annotated[
        tuple[_Rank, ...], Meta(max_length=MAX_RANKS_OF_HOST)
    ] = ()  # the ranks that failed first
    ran_s: Annotated[float, Meta(ge=0)] = 0.0  # to the first failure
    lost: Annotated[
        tuple[_Text, ...], Meta(max_length=8)
    ] = ()  # the hosts of which nobody knows how their ranks ended

    @property
    def is_clean(self) -> bool:
        """Whether every rank has finished."""
        return not self.lost and set(self.codes.values()) == {0}


@dataclass(frozen=True, slots=True)
class NodeSays:
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


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """An order to one launcher.

    "wait" for an order, "start" its ranks, let them "run", "stop" them, or "judge" how the attempt ``ended``.
    """

    do: Literal["wait", "start", "run", "stop", "judge"]
    why: str = ""
    run: str = ""
    attempt: int = 0
    node: int = SPARE
    head: str = ""  # where rank 0 listens
    ended: NodeEnd | None = None
    replica: str = ""  # the replica that the order is about; a spare host may serve any

    @property
    def key(self) -> tuple[str, str, str]:
        """The part that differs between two orders to one launcher."""
        return (self.do, self.run, self.why)


@dataclass(slots=True)
class _Launcher:
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


@dataclass(slots=True)
class _Attempt:
    """The newest attempt of which any launcher has said something."""

    number: int
    run: str
    nodes: int
    shape: str
    began: float  # for a new leader: when it learnt of the attempt
    head: str = ""
    roster: dict[int, str] = field(default_factory=dict)  # launcher by number
    node_of: dict[str, int] = field(default_factory=dict)  # number by launcher
    hosts: dict[int, str] = field(default_factory=dict)
    racks: dict[int, str] = field(default_factory=dict)
    ended: dict[int, NodeEnd] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)  # why, by number
    why: str = ""  # the first failure; empty while all is well
    outcome: NodeEnd | None = None

    def seat(self, node: int, says: NodeSays) -> None:
        self.roster[node], self.hosts[node], self.racks[node] = says.id, says.host, says.rack
        self.node_of[says.id] = node

    def name(self, node: int) -> str:
        host = self.hosts.get(node)
        return f"node {node} ({host})" if host else f"node {node}"

    def note_end(self, node: int, end: NodeEnd) -> None:
        if node in self.lost or node in self.ended:
            return
        self.ended[node] = end
        if not end.is_clean:
            failed = min(end.first or (rank for rank, code in end.codes.items() if code), default=0)
            why = f"rank {failed} on {self.name(node)} ended with {end.codes.get(failed, 1)}"
            self.why = self.why or why

    def note_loss(self, node: int, why: str) -> None:
        if node not in self.ended:
            self.lost.setdefault(node, f"{self.name(node)} {why}")
            self.why = self.why or self.lost[node]

    def settle(self) -> None:
        """Fix the outcome when each node has ended or is lost; it never changes afterwards."""
        if self.outcome is None and len(self.ended) + len(self.lost) == self.nodes:
            parts = [self.ended[node] for node in sorted(self.ended)]
            self.outcome = NodeEnd(
                {rank: code for part in parts for rank, code in part.codes.items()},
                self._first(parts),
                max((part.ran_s for part in parts), default=0.0),
                tuple(self.lost[node] for node in sorted(self.lost)),
            )

    def _first(self, parts: list[NodeEnd]) -> tuple[int, ...]:
        # Hosts' clocks differ. Ranks that lost a peer end with a code; the rank that died first has a signal.
        failed = [rank for part in parts for rank in part.first]
        codes = {rank: code for part in parts for rank, code in part.codes.items()}
        killed = [rank for rank in failed if codes.get(rank, 0) < 0]
        return tuple(sorted(killed or failed))


class ReplicaNodes:
    """The launchers of one replica. ``new_run`` makes the name of an attempt, fresh each time."""

    def __init__(self, new_run: Callable[[], str]) -> None:
        self._new_run = new_run
        self.launchers: dict[str, _Launcher] = {}
        self._attempt: _Attempt | None = None

    @property
    def stage(self) -> tuple[str, str, bool]:
        """The run of the newest attempt, why it fails, and whether it is over: orders change with it."""
        attempt = self._attempt
        return ("", "", False) if attempt is None else (attempt.run, attempt.why, attempt.outcome is not None)

    @property
    def attempt(self) -> tuple[int, dict[int, str], set[str]]:
        """The number of the newest attempt, the host of each of its nodes, and their launchers."""
        attempt = self._attempt
        return (0, {}, set()) if attempt is None else (attempt.number, attempt.hosts, set(attempt.node_of))

    def hear(self, says: NodeSays, now: float) -> None:
        """Take one request of a launcher. ``answered`` must follow."""
        launcher = self.launchers.get(says.id)
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
                self._note_silence(attempt, node, now)
            attempt.settle()
        for name, launcher in list(self.launchers.items()):
            if launcher.silent_s(now) > SILENT_S:
                del self.launchers[name]
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
                attempt.note_loss(attempt.node_of[says.id], f"has left: {says.gone}")
            return
        if says.node not in range(attempt.nodes) or attempt.roster.get(says.node, says.id) != says.id:
            return
        attempt.seat(says.node, says)
        if says.end is not None:
            attempt.note_end(says.node, says.end)
        elif says.gone:
            attempt.note_loss(says.node, f"has left: {says.gone}")
        attempt.settle()

    def _note_silence(self, attempt: _Attempt, node: int, now: float) -> None:
        launcher = self.launchers.get(attempt.roster.get(node, ""))
        silent_s = now - attempt.began if launcher is None else launcher.silent_s(now)
        limit_s = SUSPECT_S if attempt.why or (launcher is not None and launcher.is_broken) else SILENT_S
        if silent_s > limit_s:
            attempt.note_loss(node, f"has not been heard for {silent_s:.0f} s")

    # --- the next attempt ---------------------------------------------------------------------------------

    def _order_to_wait(self, launcher: _Launcher, now: float) -> NodeOrder:
        attempt, says = self._attempt, launcher.says
        if attempt is not None:
            node = attempt.node_of.get(says.id)
            if node is not None and attempt.outcome is None and says.attempt < attempt.number:
                return NodeOrder("start", "", attempt.run, attempt.number, node, attempt.head)
        if (differs := self._difference(says, now)) is not None:
            return NodeOrder("wait", differs)
        if attempt is not None and attempt.outcome is None:
            if (holder := attempt.hosts.get(says.number)) is not None:
                return NodeOrder("wait", f"{holder} is node {says.number}: this host stands by")
            return NodeOrder("wait", f"attempt {attempt.number} runs: this host stands by")
        seats = self._seats(says, now)
        missing = [node for node in range(says.nodes) if node not in seats]
        return NodeOrder("wait", f"no host is node {', '.join(map(str, missing[:8]))} yet" if missing else "")

    def _waiting(self, now: float) -> list[_Launcher]:
        """The launchers that wait for an attempt, the one that waits longest first."""
        here = [x for x in self.launchers.values() if not x.says.run and x.is_here(now)]
        return sorted(here, key=lambda x: (x.since, x.says.id))

    def _difference(self, says: NodeSays, now: float) -> str | None:
        """Say which other host was started otherwise; None where all agree."""
        attempt = self._attempt
        if attempt is not None and attempt.outcome is None and attempt.shape != says.shape:
            others = (attempt.hosts[min(attempt.hosts)], attempt.shape) if attempt.hosts else ("", "")
        else:
            unlike = [x.says for x in self._waiting(now) if x.says.shape != says.shape]
            others = (unlike[0].host, unlike[0].shape) if unlike else ("", "")
        if not others[1]:
            return None
        return (
            f"{others[0]} was started with {others[1]}, and {says.host} with {says.shape}: start both alike"
        )

    def _seats(self, like: NodeSays, now: float) -> dict[int, _Launcher]:
        """The launcher of each number in the next attempt, of those started ``like`` this one; a number
        without one is missing.
        """
        waiting, nodes = [x for x in self._waiting(now) if x.says.shape == like.shape], like.nodes
        before = self._attempt.roster if self._attempt is not None else {}
        by_id = {launcher.says.id: launcher for launcher in waiting}
        seats = {n: by_id[name] for n, name in before.items() if name in by_id and n < nodes}
        seated = {launcher.says.id for launcher in seats.values()}
        # A holder that is here is on its way from the last attempt to the next.
        holders = {n: self.launchers.get(identity) for n, identity in before.items()}
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
        spares = {x.says.id: x for x in waiting if x.says.id not in seated and x.says.number in free}
        by_rack: dict[str, list[str]] = {}
        for identity, launcher in reversed(spares.items()):
            by_rack.setdefault(launcher.says.rack, []).append(identity)
        began = waiting[0].since if waiting else now
        for node in open_:
            if node in seats or not spares or not (node in before or now - began > UNCLAIMED_S):
                continue
            near = by_rack.get(self._attempt.racks.get(node, "") if self._attempt is not None else "", [])
            while near and near[-1] not in spares:
                near.pop()
            seats[node] = spares.pop(near[-1] if near else next(iter(spares)))
        return seats

    def _begin(self, now: float) -> None:
        """Begin an attempt of hosts that were started alike: as the last attempt's, if they are complete."""
        before = self._attempt
        shapes = {launcher.says.shape: launcher.says for launcher in reversed(self._waiting(now))}
        likes = sorted(shapes.values(), key=lambda says: before is None or says.shape != before.shape)
        for like in likes[:MOST_SHAPES]:  # a bound for the work of one message
            seats = self._seats(like, now)
            if len(seats) == like.nodes:
                newest = max(launcher.says.attempt for launcher in self.launchers.values())
                number = 1 + max(newest, before.number if before is not None else 0)
                attempt = _Attempt(number, self._new_run(), like.nodes, like.shape, now)
                attempt.head = seats[0].says.address
                for node, launcher in sorted(seats.items()):
                    attempt.seat(node, launcher.says)
                self._attempt = attempt
                return
