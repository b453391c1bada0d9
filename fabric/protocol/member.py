"""The member core: one replica's part in epochs, rounds, recovery and joining. Pure.

``handle(event, now)`` returns the effects to perform, ``next_deadline()`` when to call again with Tick.
The rules are those of docs/protocol.md, numbered alike. Three things move independently and meet here:
the main thread (user code, then waiting), the round (exchange and commit barrier), and the epochs that the
leader announces. After every event ``_advance`` starts whatever has become possible.
"""

from collections.abc import Callable
from typing import Any

from fabric.errors import IllegalTransition
from fabric.model import Fence, Record, SnapshotRef, StepTimes
from fabric.protocol import member_io as io
from fabric.protocol import messages as m
from fabric.protocol.assignment import assign
from fabric.protocol.member_state import (
    MAX_MISSES,
    TRANSITIONS,
    Contact,
    Fetch,
    Identity,
    Kept,
    Links,
    MemberConfig,
    Mode,
    State,
)
from fabric.protocol.round import Round


class Member:
    """See the module. ``snapshots`` are those that my checkpoint server still holds from before."""

    def __init__(
        self,
        identity: Identity,
        config: MemberConfig,
        now: float,
        state: State | None = None,
        snapshots: tuple[SnapshotRef, ...] = (),
    ) -> None:
        self.identity = identity
        self.config = config
        self.mode = Mode.OUTSIDE
        self.state = state or State()
        self.waiting = False  # whether the main thread waits for an Apply, Compute, ...
        self.kept = Kept()
        self.hold: io.Hold | None = None
        self.round: Round | None = None
        self.current: Record | None = None  # the epoch I run in (or last ran in)
        self.newest: Record | None = None
        self.report: m.Report | None = None
        self.resume: m.Resume | None = None
        self.links = Links()
        self.fetch = Fetch()
        self.contact = Contact(last=now, next_beat=now)
        self.serving: dict[str, int] = {}  # newcomer -> the step at which a snapshot is promised to it
        self.listeners: set[str] = set()  # newcomers that live on published gradients
        self.snapshots = snapshots
        self.snapshotting = -1
        self.busy = ""  # what the user's code does for long, for people
        self.pend: tuple[int, int, tuple[str, ...]] = (0, 0, ())
        self.stopped = False
        self._now = now
        self._effects: list[io.Effect] = []

    # --- the contract -----------------------------------------------------------------------------

    def handle(self, event: io.Event, now: float) -> list[io.Effect]:
        """Take one event at time ``now`` (monotonic seconds); return the effects to perform in order."""
        self._now = now
        self._effects = []
        if not self.stopped:
            _HANDLERS[type(event)](self, event)
            self._advance()
            self._beat_when_due()
        return self._effects

    def next_deadline(self) -> float | None:
        """When to call again with Tick at the latest."""
        return None if self.stopped or not self.contact.connected else self.contact.next_beat

    @property
    def phase(self) -> str:
        """One word or two for people: the mode, and what the main thread does."""
        return f"{self.mode.value}{', waiting' if self.waiting else ''}"

    # --- the main thread --------------------------------------------------------------------------

    def on_ready(self, event: io.Ready) -> None:
        if event.step != self.state.step:
            raise IllegalTransition(f"ready for step {event.step} with the state at {self.state.step}")
        self.state.digest = event.digest
        self.waiting = True
        self.contact.next_beat = self._now
        self._last_times = event.times

    def on_computed(self, event: io.Computed) -> None:
        self.waiting = True
        kept = self.kept
        if kept.stale or event.step != self.state.step:
            self._drop_kept()
            return
        kept.computing = ()
        kept.weight += event.weight
        for name, value in event.metrics:
            kept.metrics[name] = kept.metrics.get(name, 0.0) + value

    def on_installed(self, event: io.Installed) -> None:
        self.waiting = True
        self.fetch.doing = ""
        self.state = State(self.fetch.generation, event.step, event.digest)
        if event.last:
            self.on_closing(io.Closing())
        self._do(io.Note("installed", self._epoch(), event.step))

    def on_install_failed(self, event: io.InstallFailed) -> None:
        self._stop(1, event.why)

    def on_closing(self, _: io.Closing) -> None:
        self.waiting = False
        self.contact.finished = True
        fence = Fence(self._fence().store_id, self.state.generation, self._fence().epoch)
        self._do(io.SendLeader(m.Finished(fence, self.state.step)))

    # --- links and the data plane -----------------------------------------------------------------

    def on_linked(self, event: io.Linked) -> None:
        self.links.up.add(event.epoch)

    def on_link_failed(self, event: io.LinkFailed) -> None:
        if self._runs(event.epoch):
            self._abort(event.why, event.about)
        elif self.newest is not None and event.epoch == self.newest.epoch:
            self._send_aborted(self.newest.fence, event.why, event.about)

    def on_link_lost(self, event: io.LinkLost) -> None:
        for record in (self.current, self.newest):
            if record is not None and record.lists(event.replica, event.incarnation):
                self.links.up.discard(record.epoch)
        running = self.mode in (Mode.RUN, Mode.CATCH_UP)
        if running and self.current is not None and self.current.lists(event.replica, event.incarnation):
            self._abort(f"the link to {event.replica} ended: {event.why}", event.replica)
            return
        newest = self.newest if self.mode is not Mode.OUTSIDE else None
        if newest is not None and newest.lists(event.replica, event.incarnation):
            self._do(io.LinkUp(newest))

    def on_exchanged(self, event: io.Exchanged) -> None:
        if self._is_round(event.epoch, event.step):
            assert self.round is not None
            self.round.gradient_digest = event.gradient_digest

    def on_exchange_failed(self, event: io.ExchangeFailed) -> None:
        if self._is_round(event.epoch, event.step):
            self._abort(event.why, event.about)

    # --- peers ------------------------------------------------------------------------------------

    def on_peer(self, event: io.FromPeer) -> None:
        message, fence = event.message, event.message.fence
        promised = self.report.fence if self.report is not None else None
        if promised is not None and fence < promised:
            return
        if self.current is not None and fence.epoch < self.current.epoch:
            return
        if self._is_round(fence.epoch, message.step):
            self._collect(event.replica, event.incarnation, message)
            return
        self.links.keep_early((fence.epoch, message.step), event, self._floor())
        if isinstance(message, m.Contribution):
            self._first_data()

    def _first_data(self) -> None:
        """Rule 9: a newcomer learns from the first contribution of its epoch which step is under way."""
        record = self.newest
        if self.mode is not Mode.JOINED or record is None or record.is_forced:
            return
        steps = [
            key[1]
            for key, events in self.links.early.items()
            if key[0] == record.epoch and any(self._by_veteran(record, e) for e in events)
        ]
        if not steps:
            return
        step = min(steps)
        if self.state.step > step:
            self._leave(f"my step {self.state.step} is ahead of the job's {step}")
            return
        self._go_to(record)
        self._enter_mode(Mode.RUN)
        self._open_round(step, ())

    @staticmethod
    def _by_veteran(record: Record, event: io.FromPeer) -> bool:
        member = record.member(event.replica)
        return member is not None and not member.fresh and isinstance(event.message, m.Contribution)

    def _collect(self, replica: str, incarnation: int, message: m.PeerMessage) -> None:
        round_ = self.round
        assert round_ is not None
        if not round_.record.lists(replica, incarnation):
            return
        if isinstance(message, m.Bar):
            round_.bars.setdefault(replica, message)
            return
        if message.layout != self.identity.layout:
            self._abort(f"{replica} has other parameters (layout {message.layout})", replica)
            return
        round_.contributions.setdefault(replica, message)

    # --- the leader: epochs -----------------------------------------------------------------------

    def on_leader(self, event: io.FromLeader) -> None:
        _FROM_LEADER[type(event.message)](self, event.message)

    def on_connected(self, _: io.LeaderConnected) -> None:
        """Every session begins with who I am; what else the leader must know is said again."""
        self.contact.connected = True
        self.contact.next_beat = self._now
        me, state = self.identity, self.state
        self._do(
            io.SendLeader(
                m.Session(
                    replica=me.replica,
                    incarnation=me.incarnation,
                    generation=state.generation,
                    step=state.step,
                    digest=state.digest,
                    epoch=self._epoch(),
                    link=me.link,
                    ckpt=me.ckpt,
                    micro_batches=me.micro_batches,
                    layout=me.layout,
                    data=me.data,
                    shares=me.shares,
                    snapshots=self.snapshots,
                    predecessors_gone=me.predecessors_gone,
                    finished=self.contact.finished,
                )
            )
        )
        if self.fetch.doing == "asked":
            self.fetch.doing = ""

    def on_lost(self, _: io.LeaderLost) -> None:
        self.contact.connected = False

    def on_epoch(self, message: m.Epoch) -> None:
        record, newest = message.record, self.newest
        if newest is not None and record.fence <= newest.fence:
            if record.fence == newest.fence:
                self._repeat_answer()
            return
        self.newest = record
        if self._is_leaving(record):
            self._do(io.LinkUp(record))
            return
        if not record.lists(self.identity.replica, self.identity.incarnation):
            if self.mode is not Mode.OUTSIDE:
                self._leave(f"epoch {record.epoch} goes on without me: {record.reason}")
            # Only who is known to know the epoch is admitted to the next.
            self.contact.next_beat = self._now
            return
        if self.mode is Mode.OUTSIDE:
            self._join(record)
        if self.mode in (Mode.RUN, Mode.CATCH_UP):
            if not self._is_broken_by(record):
                self._do(io.LinkUp(record))
                return
            self._abort(f"epoch {record.epoch}: {record.reason}", "")
            if record.is_forced:
                self._report(record)
        elif record.is_forced:
            self._report(record)
        elif self.mode is Mode.JOINED:
            self._do(io.LinkUp(record))
            self._first_data()
        else:
            self._repeat_aborted()

    def _join(self, record: Record) -> None:
        self._enter_mode(Mode.JOINED)
        if self.fetch.doing == "asked":
            self.fetch.doing = ""
        if not record.is_forced and self.state.generation != record.generation:
            # Admitted for a state that I have lost since.
            self._cannot_catch_up("I hold no state of this generation any more")

    def _is_leaving(self, record: Record) -> bool:
        """A drained member stays in its round until everybody is ready for the epoch without it."""
        if record.is_forced or self.current is None or self.mode is not Mode.RUN:
            return False
        me = self.current.member(self.identity.replica)
        listed = record.lists(self.identity.replica, self.identity.incarnation)
        return me is not None and me.leaving and not listed and not self._is_broken_by(record)

    def _is_broken_by(self, record: Record) -> bool:
        """Rule 6: I missed a forced epoch, or somebody of my roster who was not leaving is gone."""
        current = self.current
        assert current is not None
        gone = [x for x in current.roster if not x.leaving and not record.lists(x.replica, x.incarnation)]
        return current.epoch < record.forced or bool(gone)

    def _repeat_answer(self) -> None:
        """Rule 6, same epoch announced again (a new leader asks): say again what was answered."""
        assert self.newest is not None
        if self.contact.fallen is not None:
            self._do(io.SendLeader(self.contact.fallen))
        if self.mode is not Mode.OUTSIDE and self.newest.epoch not in self.links.up:
            self._do(io.LinkUp(self.newest))
        if self.report is not None and self.report.fence == self.newest.fence:
            self._do(io.SendLeader(self.report))
        if self.mode is Mode.ABORTED:
            self._repeat_aborted()
        elif self.mode is Mode.RUN and self.current is not None and self.pend[0] == self.current.epoch:
            self._do(io.SendLeader(m.Running(self.current.fence, self.pend[1])))

    def _repeat_aborted(self) -> None:
        if self.contact.aborted is not None:
            self._do(io.SendLeader(self.contact.aborted))

    def _report(self, record: Record) -> None:
        """Rule 7: built once per forced epoch, a promise to take no part in older ones."""
        if self.mode is not Mode.REPORTED or self.report is None or self.report.fence != record.fence:
            self._enter_mode(Mode.REPORTED)
        hold = self.hold
        epoch, step, roster = self.pend
        self.report = m.Report(
            fence=record.fence,
            state_generation=self.state.generation,
            step=self.state.step,
            digest=self.state.digest,
            round_epoch=epoch,
            round_step=step,
            round_roster=roster,
            holds=hold is not None and (hold.epoch, hold.step) == (epoch, step),
            gradient_digest=hold.gradient_digest if hold is not None else "",
            # What the main thread is computing is promised: it is finished before I contribute again.
            have=() if self.kept.stale else tuple(sorted(self.kept.have)),
            committed_digest=self.state.committed_digest,
        )
        self._do(io.SendLeader(self.report))
        self._do(io.LinkUp(record))

    def on_resume(self, message: m.Resume) -> None:
        """Rule 8."""
        record = self.newest
        if self.mode is not Mode.REPORTED or record is None or message.fence != record.fence:
            return
        assert record.is_forced
        self.resume = message
        self._go_to(record)
        self._do(io.Note("resume", record.epoch, message.step, message.reason))
        if record.cold == record.epoch or self.state.generation != record.generation:
            # The second: the cold start's own decision never reached me, or my fetch of its base failed.
            self._start_generation(record)
        hold = self.hold
        if hold is not None and self._may_commit(hold, message):
            self._commit(hold)
        self.hold = None
        if any(a.replica == self.identity.replica and a.drop for a in message.table):
            self._drop_kept()
        if self.state.step > message.step and self.state.generation == record.generation:
            raise IllegalTransition(f"told to resume at {message.step} with the state at {self.state.step}")
        there = self.state.step == message.step and self.state.generation == record.generation
        self._enter_mode(Mode.RUN if there else Mode.CATCH_UP)

    def _may_commit(self, hold: io.Hold, message: m.Resume) -> bool:
        assert self.newest is not None
        return (
            self.state.step == hold.step == message.step - 1
            and hold.epoch >= self.newest.cold
            and hold.gradient_digest == message.commit_digest
        )

    def _start_generation(self, record: Record) -> None:
        """Rule 6 of the leader: keep my state if it is the base, else fetch that."""
        base = record.base
        self.hold, self.contact.fallen = None, None
        self._drop_kept()
        same = self.state.step == base.step and base.digest in ("", self.state.digest)
        if same and self.fetch.doing != "install":
            self.state.generation = record.generation
            self.state.committed_digest = ""
        else:
            self.state.generation = 0
            self._want(SnapshotRef(base.generation, base.step, base.digest), base.sources)

    def _want(self, wanted: SnapshotRef | None, urls: tuple[str, ...] = ()) -> None:
        """Fetch this state next (None: nothing); what is under way ends first, and counts for nothing."""
        old = self.fetch
        if old.doing == "gradient":
            self._do(io.CancelFetch())
        under_way = old.doing if old.doing in ("state", "install") else ""
        self.fetch = Fetch(doing=under_way, void=True, generation=old.generation, wanted=wanted, urls=urls)

    # --- the leader: the rest ---------------------------------------------------------------------

    def on_serve(self, message: m.Serve) -> None:
        if self.mode not in (Mode.RUN, Mode.CATCH_UP) or message.step < self.state.step:
            self._do(io.SendLeader(m.Missed(self._fence(), message.joiner, message.step)))
            return
        self.serving[message.joiner] = message.step
        self.listeners.add(message.joiner)
        self._do(io.Listen(True))

    def on_serve_end(self, message: m.ServeEnd) -> None:
        self.serving.pop(message.joiner, None)
        self.listeners.discard(message.joiner)
        if not self.listeners:
            self._do(io.Listen(False))

    def on_sources(self, message: m.Sources) -> None:
        newest = self.newest
        if newest is None or message.fence.generation != newest.generation or self.fetch.doing != "asked":
            return
        if self.mode not in (Mode.OUTSIDE, Mode.JOINED):
            return
        mine, theirs = self.state, message.state
        if mine.digest and (mine.step, mine.digest) == (theirs.step, theirs.digest):
            # What I hold is what they hold, whatever generation I had it from.
            self.state = State(newest.generation, mine.step, mine.digest)
        if self.state.generation != newest.generation or theirs.step > mine.step:
            self.state.generation = 0
            self._want(theirs, message.urls)
        else:
            self.fetch = Fetch(urls=message.urls)

    def on_complete(self, message: m.Complete) -> None:
        self._do(io.Finish(message.step))
        self.stopped = True

    def on_rejected(self, message: m.Rejected) -> None:
        if not message.retry:
            self._stop(1, message.reason)

    def on_beat_reply(self, message: m.BeatReply) -> None:
        sent = self.contact.sent.pop(message.number, None)
        if sent is not None:
            self.contact.last = max(self.contact.last, sent)
            self.contact.sent = {n: t for n, t in self.contact.sent.items() if n > message.number}

    # --- transfer ---------------------------------------------------------------------------------

    def on_state_fetched(self, event: io.StateFetched) -> None:
        fetch = self.fetch
        if fetch.doing != "state":
            return
        fetch.doing = ""
        if not fetch.void:
            fetch.state, fetch.wanted = fetch.wanted, None

    def on_fetch_failed(self, event: io.FetchFailed) -> None:
        fetch = self.fetch
        if fetch.doing != "state":
            return
        fetch.doing = ""
        if not fetch.void:
            self.fetch = Fetch()
            self._cannot_catch_up(event.why)

    def on_gradient(self, event: io.GradientFetched) -> None:
        if self.fetch.doing != "gradient":
            return
        self.fetch.doing, self.fetch.misses = "", 0
        if event.step == self.state.step and self._is_behind():
            self.fetch.gradient = event

    def on_gradient_gone(self, event: io.GradientGone) -> None:
        if self.fetch.doing != "gradient":
            return
        fetch = self.fetch
        fetch.doing, fetch.misses = "", fetch.misses + 1
        if event.step != self.state.step or not self._is_behind():
            return
        if event.gone or (fetch.misses >= MAX_MISSES and self.mode in (Mode.RUN, Mode.CATCH_UP)):
            self.state.generation = 0
            self._cannot_catch_up(event.why)
        elif fetch.misses >= MAX_MISSES and self.mode is Mode.OUTSIDE and self.contact.connected:
            # Perhaps nobody steps; perhaps the servers that I ask are not where they were.
            self._ask(f"nobody delivers the gradient of step {event.step}")

    def _ask(self, why: str) -> None:
        assert self.newest is not None
        self.fetch.doing, self.fetch.misses = "asked", 0
        self._do(io.SendLeader(m.NeedState(self.newest.fence, why)))

    def _cannot_catch_up(self, why: str) -> None:
        self._do(io.Note("catch-up failed", self._epoch(), self.state.step, why))
        if self.mode is not Mode.OUTSIDE and self.newest is not None:
            self.contact.fallen = m.Fallen(self.newest.fence, why)
            self._do(io.SendLeader(self.contact.fallen))

    def on_snapshotted(self, event: io.Snapshotted) -> None:
        if event.step == self.snapshotting:
            self.snapshotting = -1
        if event.digest:
            ref = SnapshotRef(self.state.generation, event.step, event.digest)
            self.snapshots = (*self.snapshots[-1:], ref)
        for joiner, step in list(self.serving.items()):
            if step == event.step:
                del self.serving[joiner]
                reply: m.MemberMessage = (
                    m.Taken(self._fence(), joiner, step, event.digest)
                    if event.digest
                    else m.Missed(self._fence(), joiner, step)
                )
                self._do(io.SendLeader(reply))

    def on_tick(self, _: io.Tick) -> None:
        pass

    # --- what has become possible -----------------------------------------------------------------

    def _advance(self) -> None:
        """Start what the last event made possible; at most one thing for the main thread."""
        if self.waiting:
            self._advance_main()
        self._fetch_when_behind()
        self._contribute_when_computed()
        self._exchange_when_linked()
        self._hold_when_reduced()
        self._commit_when_agreed()

    def _advance_main(self) -> None:
        if self.kept.stale:
            self._drop_kept()
        self._snapshot_when_due()
        if self._is_behind():
            self._catch_up_main()
        elif self.mode is Mode.CATCH_UP:
            assert self.resume is not None
            if self.state.step == self.resume.step and self.state.generation > 0:
                self._enter_mode(Mode.RUN)
        if self.waiting and self.mode is Mode.RUN and self.round is None:
            self._enter_round()

    def _catch_up_main(self) -> None:
        fetch = self.fetch
        if fetch.state is not None:
            assert self.newest is not None
            self._drop_kept()
            self._do(io.Install(fetch.state.step, fetch.state.digest))
            self.fetch = Fetch(doing="install", generation=self.newest.generation, urls=fetch.urls)
            self.waiting = False
        elif fetch.gradient is not None:
            self._drop_kept()
            self.state = State(self.state.generation, self.state.step + 1, "", fetch.gradient.gradient_digest)
            self._do(io.Apply(fetch.gradient.step, None, live=False, digest=True))
            fetch.gradient = None
            self.waiting = False

    def _is_behind(self) -> bool:
        """Whether my state must be brought up from what others hold."""
        if self.contact.finished:
            return False
        if self.mode in (Mode.OUTSIDE, Mode.JOINED):
            return self.newest is not None
        if self.mode is Mode.CATCH_UP:
            assert self.resume is not None
            return self.state.generation == 0 or self.state.step < self.resume.step
        return self.mode is Mode.RUN and self.round is not None and self.round.step > self.state.step

    def _fetch_when_behind(self) -> None:
        fetch, newest = self.fetch, self.newest
        outdated = newest is not None and self.state.generation != newest.generation
        if fetch.doing == "gradient" and (outdated or not self._is_behind()):
            fetch.doing = ""
            self._do(io.CancelFetch())
        if fetch.doing or fetch.state or fetch.gradient or newest is None or not self._is_behind():
            return
        if fetch.wanted is not None:
            fetch.doing, fetch.void = "state", False
            self._do(io.FetchState(fetch.wanted, fetch.urls))
        elif self.state.generation == newest.generation:
            if not self.waiting:
                return  # the main thread may still read the buffer of the last one
            roster = [x.ckpt for x in newest.roster if x.replica != self.identity.replica]
            urls = tuple(dict.fromkeys([*self.fetch.urls, *roster]))
            fetch.doing = "gradient"
            self._do(io.FetchGradient(newest.generation, self.state.step, urls))
        elif self.mode is Mode.OUTSIDE and self.contact.connected:
            self._ask("I hold no state of this generation")

    def _snapshot_when_due(self) -> None:
        due = self.mode in (Mode.RUN, Mode.CATCH_UP) and self.state.step in self.serving.values()
        if due and self.snapshotting != self.state.step:
            self.snapshotting = self.state.step
            self._do(io.TakeSnapshot(self.state.step))

    def _enter_round(self) -> None:
        """Rules 1, 4, 7 and 10: what is my share of the next round?"""
        record = self.current
        assert record is not None
        if self.contact.finished or len(record.roster) < self.config.min_replicas:
            return
        if self._now - self.contact.last > self.config.autonomy_s:
            self._stop(75, "no lighthouse answered for autonomy_s: stopped before the next round")
            return
        self._open_round(self.state.step, self._share(record))

    def _share(self, record: Record) -> tuple[int, ...]:
        step, me, resume = self.state.step, self.identity.replica, self.resume
        if resume is not None and resume.fence == record.fence and resume.step == step:
            ids = next((a.micro_batches for a in resume.table if a.replica == me), ())
            return tuple(i for i in ids if i not in self.kept.have)
        first = self.links.first_step == step and not record.is_forced
        able = [x for x in record.roster if not (first and x.fresh)]
        return assign(range(self.identity.micro_batches), able).get(me, ())

    def _open_round(self, step: int, share: tuple[int, ...]) -> None:
        record = self.current
        assert record is not None
        if self.pend[0] != record.epoch:
            self._do(io.SendLeader(m.Running(record.fence, step)))
        self.pend = (record.epoch, step, record.names)
        self.round = Round(record, step, share)
        for event in self.links.take_early((record.epoch, step)):
            if self.round is not None:
                self._collect(event.replica, event.incarnation, event.message)
        if share and self.round is not None:
            self.kept.have |= set(share)
            self.kept.computing = share
            self.waiting = False
            self._do(io.Compute(step, share))

    def _contribute_when_computed(self) -> None:
        """Only once linked: what is sent to a member without a link is lost."""
        round_ = self.round
        if round_ is None or round_.contributed or self.kept.computing:
            return
        if round_.record.epoch not in self.links.up:
            return
        at_step = round_.step == self.state.step
        if at_step and not self.waiting:
            return
        kept = self.kept if at_step else Kept()
        message = m.Contribution(
            fence=round_.record.fence,
            step=round_.step,
            weight=kept.weight,
            micro_batches=tuple(sorted(kept.have)),
            layout=self.identity.layout,
            metrics=tuple(sorted(kept.metrics.items())),
        )
        round_.contributed = True
        round_.contributions[self.identity.replica] = message
        self._to_roster(message)

    def _exchange_when_linked(self) -> None:
        round_ = self.round
        if round_ is None or not round_.contributed or round_.exchanging:
            return
        if round_.record.epoch in self.links.up:
            round_.exchanging = True
            weight = round_.contributions[self.identity.replica].weight
            self._do(io.StartExchange(round_.record.fence, round_.step, weight))

    def _hold_when_reduced(self) -> None:
        """Rule 2: from here on the hold is a promise."""
        round_ = self.round
        if round_ is None or self.identity.replica in round_.bars or not self.waiting:
            return
        hold = round_.hold() if round_.step == self.state.step else None
        if hold is None:
            return
        self.hold = hold
        newest = self.newest
        round_.ready_record = round_.record
        if newest is not None and newest.epoch > round_.record.epoch and newest.epoch in self.links.up:
            round_.ready_record = newest
        bar = m.Bar(
            fence=round_.record.fence,
            step=round_.step,
            ready=round_.ready_record.epoch,
            gradient_digest=hold.gradient_digest,
            state_digest=self.state.digest,
        )
        round_.bars[self.identity.replica] = bar
        self._to_roster(bar)

    def _commit_when_agreed(self) -> None:
        """Rule 3: everybody holds, so it is committed; digests that differ abort instead."""
        round_, hold = self.round, self.hold
        if round_ is None or hold is None or not round_.complete():
            return
        disagreement = round_.disagreement()
        if disagreement:
            self._abort(disagreement, "")
            # Evicted for this, I would not trust my own state either.
            self.links.suspect = True
            return
        following = round_.next_epoch()
        record = round_.ready_record
        switch = record is not None and following > round_.record.epoch
        self._commit(hold, first_of_epoch=switch)
        if switch:
            assert record is not None and record.epoch == following
            self._go_to(record)
            if not record.lists(self.identity.replica, self.identity.incarnation):
                self._stop(0, "drained: the others go on without this replica")
            elif record.epoch not in self.links.up:
                self._abort(f"a link was lost on the way into epoch {record.epoch}", "")

    def _commit(self, hold: io.Hold, first_of_epoch: bool = False) -> None:
        following = hold.step + 1
        mine = dict(hold.contributions).get(self.identity.replica, ())
        every = self.config.digest_every
        self.state = State(self.state.generation, following, "", hold.gradient_digest)
        self.hold, self.round, self.kept = None, None, Kept()
        self.waiting = False
        self._do(io.Publish(self.state.generation, hold))
        wanted = bool(every) and (first_of_epoch or following % every == 0)
        self._do(io.Apply(hold.step, hold, live=bool(mine), digest=wanted))

    # --- shared moves -----------------------------------------------------------------------------

    def _abort(self, why: str, about: str) -> None:
        """Rule 5: once per round; the kept gradient and the hold stay."""
        assert self.current is not None
        if self.mode is Mode.ABORTED:
            return
        self._enter_mode(Mode.ABORTED)
        self.round = None
        self._do(io.AbortExchange(self.current.epoch, why))
        self._do(io.Note("abort", self.current.epoch, self.state.step, why, about))
        self._send_aborted(self.current.fence, why, about)

    def _send_aborted(self, fence: Fence, why: str, about: str) -> None:
        self.contact.aborted = m.Aborted(fence, self.state.step, why, about)
        self._do(io.SendLeader(self.contact.aborted))

    def _leave(self, why: str) -> None:
        """Rule 6, not in the roster: what I kept for a round counts for nothing; my state may."""
        if self.round is not None and self.current is not None:
            self._do(io.AbortExchange(self.current.epoch, why))
        me = self.current.member(self.identity.replica) if self.current is not None else None
        if me is not None and me.leaving:
            self._stop(0, "drained: the others go on without this replica")
            return
        self._enter_mode(Mode.OUTSIDE)
        self.contact.fallen = None
        self.hold, self.round, self.resume = None, None, None
        self.serving.clear()
        self.listeners.clear()
        self._drop_kept()
        self._want(None)
        if self.links.suspect:
            self.state.generation = 0
            self.links.suspect = False
        self._do(io.Note("outside", self._epoch(), self.state.step, why))

    def _drop_kept(self) -> None:
        """Forget the kept gradient, at once or when the main thread has finished adding to it."""
        if not self.waiting and self.kept.computing:
            self.kept.stale = True
            return
        if self.kept.have:
            self._do(io.DropGradient())
        self.kept = Kept()

    def _go_to(self, record: Record) -> None:
        self.current = record
        self.round = None
        self.links.first_step = self.state.step if record.is_forced else self._planned_first_step(record)
        self.links.up = {e for e in self.links.up if e >= record.epoch}
        self._do(io.Switch(record))

    def _planned_first_step(self, record: Record) -> int:
        early = [step for epoch, step in self.links.early if epoch == record.epoch]
        return max([self.state.step, *early]) if self.mode is Mode.JOINED else self.state.step

    def _enter_mode(self, mode: Mode) -> None:
        if mode not in TRANSITIONS[self.mode]:
            raise IllegalTransition(
                f"{self.identity.replica} cannot go from {self.mode.value} to {mode.value} "
                f"at step {self.state.step} in epoch {self._epoch()}"
            )
        self.mode = mode

    def _beat_when_due(self) -> None:
        contact = self.contact
        if not contact.connected or self._now < contact.next_beat:
            return
        contact.number += 1
        contact.sent[contact.number] = self._now
        contact.next_beat = self._now + self.config.beat_s
        waiting_for = self.round.missing() if self.round is not None and self.round.contributed else ()
        self._do(
            io.SendLeader(
                m.Beat(
                    number=contact.number,
                    epoch=self.newest.epoch if self.newest is not None else 0,
                    generation=self.state.generation,
                    step=self.state.step,
                    digest=self.state.digest,
                    phase=self.phase,
                    waiting_for=waiting_for,
                    busy=self.busy,
                    times=self._last_times,
                )
            )
        )
        self._last_times = None

    _last_times: StepTimes | None = None

    def _to_roster(self, message: m.PeerMessage) -> None:
        assert self.round is not None
        for x in self.round.record.roster:
            if x.replica != self.identity.replica:
                self._do(io.SendPeer(x.replica, x.incarnation, message))

    def _stop(self, code: int, reason: str) -> None:
        self._do(io.Stop(code, reason))
        self.stopped = True

    def _do(self, effect: io.Effect) -> None:
        self._effects.append(effect)

    def _runs(self, epoch: int) -> bool:
        current = self.current
        running = self.mode in (Mode.RUN, Mode.CATCH_UP)
        return running and current is not None and current.epoch == epoch

    def _is_round(self, epoch: int, step: int) -> bool:
        round_ = self.round
        return round_ is not None and (round_.record.epoch, round_.step) == (epoch, step)

    def _floor(self) -> int:
        return self.current.epoch if self.current is not None else 0

    def _epoch(self) -> int:
        return self.current.epoch if self.current is not None else 0

    def _fence(self) -> Fence:
        record = self.current or self.newest
        return record.fence if record is not None else Fence("", 0, 0)


_HANDLERS: dict[type, Callable[[Member, Any], None]] = {
    io.Ready: Member.on_ready,
    io.Computed: Member.on_computed,
    io.Installed: Member.on_installed,
    io.InstallFailed: Member.on_install_failed,
    io.Closing: Member.on_closing,
    io.Linked: Member.on_linked,
    io.LinkFailed: Member.on_link_failed,
    io.LinkLost: Member.on_link_lost,
    io.Exchanged: Member.on_exchanged,
    io.ExchangeFailed: Member.on_exchange_failed,
    io.FromPeer: Member.on_peer,
    io.FromLeader: Member.on_leader,
    io.LeaderConnected: Member.on_connected,
    io.LeaderLost: Member.on_lost,
    io.StateFetched: Member.on_state_fetched,
    io.FetchFailed: Member.on_fetch_failed,
    io.GradientFetched: Member.on_gradient,
    io.GradientGone: Member.on_gradient_gone,
    io.Snapshotted: Member.on_snapshotted,
    io.Tick: Member.on_tick,
}

_FROM_LEADER: dict[type, Callable[[Member, Any], None]] = {
    m.Epoch: Member.on_epoch,
    m.Resume: Member.on_resume,
    m.Serve: Member.on_serve,
    m.ServeEnd: Member.on_serve_end,
    m.Sources: Member.on_sources,
    m.Complete: Member.on_complete,
    m.Rejected: Member.on_rejected,
    m.BeatReply: Member.on_beat_reply,
}
