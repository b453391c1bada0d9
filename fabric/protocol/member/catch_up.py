"""Catching up by what others hold, and serving those who do: snapshots and published gradients.

One fetch at a time. A state is fetched, then installed by the main thread; published gradients are fetched
one by one and applied by the user's own update code, until the member is where it must be.
"""

from fabric.model import Record, SnapshotRef
from fabric.protocol.member.base import MemberBase
from fabric.protocol.member.state import (
    MAX_MISSES,
    Fetch,
    MemberState,
    Mode,
)
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m


class MemberCatchUp(MemberBase):
    """A member that can be behind, and that keeps what others behind it need."""

    # --- serving ---------------------------------------------------------------------------------------

    def on_serve(self, message: m.TakeSnapshotFor) -> None:
        if self.mode not in (Mode.RUN, Mode.CATCH_UP) or message.step < self.state.step:
            self._emit(io.SendLeader(m.SnapshotMissed(self._fence(), message.joiner, message.step)))
            # The leader counted on an older step of mine: it hears this one, and the next ones as they come.
            self.contact.next_beat = self.contact.asked = self._now
            return
        self.serving[message.joiner] = message.step
        self.listeners.add(message.joiner)
        self._emit(io.RetainGradients(True))

    def on_serve_end(self, message: m.StopServing) -> None:
        self.serving.pop(message.joiner, None)
        self.listeners.discard(message.joiner)
        if not self.listeners:
            self._emit(io.RetainGradients(False))

    def on_snapshotted(self, event: io.Snapshotted) -> None:
        if event.step == self.snapshotting:
            self.snapshotting = -1
        if event.digest:
            generation = event.generation if event.generation >= 0 else self.state.generation
            ref = SnapshotRef(generation, event.step, event.digest)
            self.snapshots = (*self.snapshots[-1:], ref)
        for joiner, step in list(self.serving.items()):
            if step == event.step:
                del self.serving[joiner]
                reply: m.MemberMessage = (
                    m.SnapshotTaken(self._fence(), joiner, step, event.digest)
                    if event.digest
                    else m.SnapshotMissed(self._fence(), joiner, step)
                )
                self._emit(io.SendLeader(reply))

    def _snapshot_when_due(self) -> None:
        due = self.mode in (Mode.RUN, Mode.CATCH_UP) and self.state.step in self.serving.values()
        if due and self.snapshotting != self.state.step:
            self.snapshotting = self.state.step
            self._emit(io.TakeSnapshot(self.state.step))

    # --- catching up -----------------------------------------------------------------------------------

    def on_sources(self, message: m.StateSources) -> None:
        newest = self.newest
        fence = message.fence
        if newest is None or (fence.store_id, fence.generation) != (newest.store_id, newest.generation):
            return
        if self._is_awaiting() or (message.again and self.mode is Mode.OUTSIDE):
            self._start_from(message)
            return
        if self.fetch.doing != "asked":
            return
        if self.mode not in (Mode.OUTSIDE, Mode.JOINED):
            return
        mine, theirs = self.state, message.state
        if mine.digest and (mine.step, mine.digest) == (theirs.step, theirs.digest):
            # What I hold is what they hold, whatever generation I had it from.
            self.state = MemberState(newest.generation, mine.step, mine.digest)
        if self.state.generation != newest.generation or theirs.step > mine.step:
            self.state.generation = 0
            self._want(theirs, message.urls)
        else:
            self.fetch = Fetch(urls=message.urls)

    def _start_from(self, message: m.StateSources) -> None:
        """Drop what I have and what I do, and load this state, unless I am there or on the way already."""
        assert self.newest is not None
        wanted = message.state
        there = self.state.generation == self.newest.generation and self.state.step >= wanted.step
        if there or wanted in (self.fetch.wanted, self.fetch.state):
            return
        self.state.generation = 0
        self._want(wanted, message.urls)

    def _is_awaited(self, record: Record) -> bool:
        """Whether the others wait in this epoch until my state has arrived."""
        me = record.member(self.identity.replica)
        return me is not None and me.blocking_join and me.incarnation == self.identity.incarnation

    def _is_awaiting(self) -> bool:
        return self.mode is Mode.CATCH_UP and self.current is not None and self._is_awaited(self.current)

    def _want(self, wanted: SnapshotRef | None, urls: tuple[str, ...] = ()) -> None:
        """Fetch this state next (None: nothing); what is under way ends first, and counts for nothing."""
        old = self.fetch
        if old.doing == "gradient":
            self._emit(io.CancelFetch())
        under_way = old.doing if old.doing in ("state", "install") else ""
        self.fetch = Fetch(doing=under_way, void=True, generation=old.generation, wanted=wanted, urls=urls)

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
        if event.misfit:
            self._stop(1, event.why)
        elif not fetch.void:
            self.fetch = Fetch()
            # A state of the last generation says nothing of this one, which begins from another.
            if self.newest is not None and fetch.generation == self.newest.generation:
                self._cannot_catch_up(event.why, event.unusable)

    def on_installed(self, event: io.Installed) -> None:
        self.waiting = True
        self.fetch.doing = ""
        self.state = MemberState(self.fetch.generation, event.step, event.digest)
        self.loaded = event.step
        if event.last and self.newest is not None and self.fetch.generation != self.newest.generation:
            self._stop(75, "the end of the loop was loaded from a generation that is over: it starts again")
            return
        if event.last:
            self.on_closing(io.Closing())
        self._emit(io.WriteJournal("installed", self._epoch(), event.step))

    def on_install_failed(self, event: io.InstallFailed) -> None:
        self._stop(1, event.why)

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
        lost = self.state.generation != self.newest.generation
        self._emit(io.SendLeader(m.RequestState(self.newest.fence, why, lost)))

    def _cannot_catch_up(self, why: str, unusable: bool = False) -> None:
        self._emit(io.WriteJournal("catch-up failed", self._epoch(), self.state.step, why))
        if self.mode is not Mode.OUTSIDE and self.newest is not None:
            self.contact.fallen = m.CannotContinue(self.newest.fence, why, unusable)
            self._emit(io.SendLeader(self.contact.fallen))

    def _is_behind(self) -> bool:
        """Whether my state must be brought up from what others hold."""
        if self.contact.finished:
            return False
        if self.mode in (Mode.OUTSIDE, Mode.JOINED):
            return self.newest is not None
        if self.mode is Mode.CATCH_UP:
            assert self.resume is not None
            # Of this generation: a state of the last one may have been on its way into memory.
            generation = self.resume.fence.generation
            return self.state.generation != generation or self.state.step < self.resume.step
        return self.mode is Mode.RUN and self.round is not None and self.round.step > self.state.step

    def _fetch_when_behind(self) -> None:
        fetch, newest = self.fetch, self.newest
        outdated = newest is not None and self.state.generation != newest.generation
        if fetch.doing == "gradient" and (outdated or not self._is_behind()):
            fetch.doing = ""
            self._emit(io.CancelFetch())
        if fetch.doing or fetch.state or fetch.gradient or newest is None or not self._is_behind():
            return
        if fetch.wanted is not None:
            fetch.doing, fetch.void, fetch.generation = "state", False, newest.generation
            self._emit(io.FetchState(fetch.wanted, fetch.urls))
        elif self._is_awaiting():
            return  # the leader says where the state is
        elif not self.config.replay and self.mode is Mode.OUTSIDE:
            if self.contact.connected:
                self._ask("I do not catch up by replay")
        elif self.state.generation == newest.generation:
            if not self.waiting:
                return  # the main thread may still read the buffer of the last one
            roster = [x.ckpt for x in newest.roster if x.replica != self.identity.replica]
            urls = tuple(dict.fromkeys([*self.fetch.urls, *roster]))
            fetch.doing = "gradient"
            self._emit(io.FetchGradient(newest.generation, self.state.step, urls))
        elif self.mode is Mode.OUTSIDE and self.contact.connected:
            self._ask("I hold no state of this generation")

    def _catch_up_main(self) -> None:
        fetch = self.fetch
        if fetch.state is not None:
            self._drop_kept()
            self._emit(io.Install(fetch.state.step, fetch.state.digest))
            self.fetch = Fetch(doing="install", generation=fetch.generation, urls=fetch.urls)
            self.waiting = False
        elif fetch.gradient is not None:
            self._drop_kept()
            self.state = MemberState(
                self.state.generation, self.state.step + 1, "", fetch.gradient.gradient_digest
            )
            self._emit(io.Apply(fetch.gradient.step, None, contributed=False, digest=True))
            fetch.gradient = None
            self.waiting = False

    def _leave(self, why: str) -> None:
        """Rule 6, not in the roster: what I kept for a round counts for nothing; my state may."""
        if self.round is not None and self.current is not None:
            self._emit(io.AbortExchange(self.current.epoch, why))
        me = self.current.member(self.identity.replica) if self.current is not None else None
        if me is not None and me.leaving:
            self._stop(0, "drained: the others go on without this replica")
            return
        self._enter_mode(Mode.OUTSIDE)
        self.contact.fallen = None
        self._leave_round()
        self.prepared, self.resume = None, None
        self.serving.clear()
        self.listeners.clear()
        self._drop_kept()
        self._want(None)
        if self.links.suspect or self.state.outvoted:
            self.state.generation = 0
            self.links.suspect = False
        self._emit(io.WriteJournal("outside", self._epoch(), self.state.step, why))
