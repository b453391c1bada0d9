"""Catch-up: a state from other servers, then published gradients.

One fetch runs at a time. The main thread installs a fetched state. The user's update code applies published
gradients one by one, until the member's state is at the step at which it goes on.
"""

from msgspec import Struct, field

from fabric.exit_codes import FAILED, RESTART
from fabric.model import SnapshotRef
from fabric.protocol.member.rounds import Rounds
from fabric.protocol.member.session import LighthouseSession
from fabric.protocol.member.state import (
    MAX_MISSES,
    CoreContext,
    Fetch,
    KnownEpochs,
    MemberMemory,
    Mode,
)
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m


class CatchUp(Struct, eq=False):
    """Brings a member that is behind to the step at which it goes on."""

    _context: CoreContext
    _memory: MemberMemory
    _epochs: KnownEpochs
    _session: LighthouseSession
    _rounds: Rounds
    fetch: Fetch = field(default_factory=Fetch)

    def on_sources(self, message: m.StateSources) -> None:
        newest = self._epochs.newest
        fence = message.fence
        if newest is None or (fence.store_id, fence.generation) != (newest.store_id, newest.generation):
            return
        own, theirs = self._memory.state, message.state
        if self._epochs.is_awaiting() or (message.again and self._epochs.mode is Mode.OUTSIDE):
            # Load this state in place of mine, unless I hold it or fetch it already.
            there = own.generation == newest.generation and own.step >= theirs.step
            if not there and theirs not in (self.fetch.wanted, self.fetch.state):
                self._memory.distrust()
                self.want(theirs, message.urls)
            return
        if self.fetch.doing != "asked" or self._epochs.mode not in (Mode.OUTSIDE, Mode.JOINED):
            return
        if own.digest and (own.step, own.digest) == (theirs.step, theirs.digest):
            # This member's state equals the other members' state, although it is of another generation.
            self._memory.adopt(newest.generation)
        # Another state at my step proves mine wrong: I may have been evicted for it without hearing why.
        is_wrong = own.step == theirs.step and own.digest not in ("", theirs.digest)
        if self._memory.state.generation != newest.generation or theirs.step > own.step or is_wrong:
            self._memory.distrust()
            self.want(theirs, message.urls)
        else:
            self.fetch = Fetch(urls=message.urls)

    def want(self, wanted: SnapshotRef | None, urls: tuple[str, ...] = ()) -> None:
        """Fetch this state next (None: nothing). The fetch under way ends first; its result is dropped."""
        old = self.fetch
        if old.doing == "gradient":
            self._context.emit(io.CancelFetch())
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
        if event.misfit or event.restart:
            self._context.stop(FAILED if event.misfit else RESTART, event.why)
        elif not fetch.void:
            self.fetch = Fetch()
            # Rule 8: a state of the last generation is useless: the new generation begins from another state.
            if self._epochs.newest is not None and fetch.generation == self._epochs.newest.generation:
                self.cannot_catch_up(event.why, event.unusable)

    def on_installed(self, event: io.Installed) -> None:
        self.fetch.doing = ""
        self._memory.on_installed(event, self.fetch.generation)
        if self._epochs.mode is Mode.OUTSIDE:
            self._session.hurry()  # the leader admits this member by the step that it has told
        newest = self._epochs.newest
        if event.last and newest is not None and self.fetch.generation != newest.generation:
            self._context.stop(
                RESTART,
                "the end of the loop was loaded from a generation that is over: this process starts again",
            )
            return
        if event.last:
            self._session.on_closing(io.Closing())
        self._context.emit(io.WriteJournal("installed", self._epochs.epoch(), event.step))

    def on_install_failed(self, event: io.InstallFailed) -> None:
        self._context.stop(FAILED, event.why)

    def on_gradient(self, event: io.GradientFetched) -> None:
        if self.fetch.doing != "gradient":
            return
        self.fetch.doing, self.fetch.misses = "", 0
        if event.step == self._memory.state.step and self.is_behind():
            self.fetch.gradient = event

    def on_gradient_gone(self, event: io.GradientGone) -> None:
        if self.fetch.doing != "gradient":
            return
        fetch, mode = self.fetch, self._epochs.mode
        fetch.doing, fetch.misses = "", fetch.misses + 1
        if event.step != self._memory.state.step or not self.is_behind():
            return
        if event.gone or (fetch.misses >= MAX_MISSES and mode in (Mode.RUN, Mode.CATCH_UP)):
            self._memory.distrust()
            self.cannot_catch_up(event.why)
        elif fetch.misses >= MAX_MISSES and mode is Mode.OUTSIDE and self._session.contact.connected:
            # Perhaps the job commits no steps; perhaps the checkpoint servers have other addresses now.
            self._request_state(f"no server delivers the gradient of step {event.step}")

    def forget_request(self) -> None:
        """Forget the request for a state: an epoch answers it, or it may never have arrived."""
        if self.fetch.doing == "asked":
            self.fetch.doing = ""

    def _request_state(self, why: str) -> None:
        assert self._epochs.newest is not None
        self.fetch.doing, self.fetch.misses = "asked", 0
        lost = self._memory.state.generation != self._epochs.newest.generation
        self._context.emit(io.SendLeader(m.RequestState(self._epochs.newest.fence, why, lost)))

    def cannot_catch_up(self, why: str, unusable: bool = False) -> None:
        epoch, newest = self._epochs.epoch(), self._epochs.newest
        self._context.emit(io.WriteJournal("catch-up failed", epoch, self._memory.state.step, why))
        if self._epochs.mode is not Mode.OUTSIDE and newest is not None:
            self._session.cannot_continue(why, unusable)

    def is_behind(self) -> bool:
        """Whether my state must catch up with the others'."""
        mode, state, round_ = self._epochs.mode, self._memory.state, self._rounds.round
        if self._session.contact.finished:
            return False
        if mode in (Mode.OUTSIDE, Mode.JOINED):
            return self._epochs.newest is not None
        if mode is Mode.CATCH_UP:
            resume = self._epochs.resume
            assert resume is not None
            # Rule 8: a state of the last generation may have been on its way into memory.
            return state.generation != resume.fence.generation or state.step < resume.step
        return mode is Mode.RUN and round_ is not None and round_.step > state.step

    def fetch_when_behind(self) -> None:
        fetch, newest = self.fetch, self._epochs.newest
        outdated = newest is not None and self._memory.state.generation != newest.generation
        if fetch.doing == "gradient" and (outdated or not self.is_behind()):
            fetch.doing = ""
            self._context.emit(io.CancelFetch())
        if fetch.doing or fetch.state or fetch.gradient or newest is None or not self.is_behind():
            return
        if fetch.wanted is not None:
            fetch.doing, fetch.void, fetch.generation = "state", False, newest.generation
            self._context.emit(io.FetchState(fetch.wanted, fetch.urls))
        elif self._epochs.is_awaiting():
            return  # the leader sends the state sources
        elif not self._context.config.replay and self._epochs.mode is Mode.OUTSIDE:
            if self._session.contact.connected:
                self._request_state("I do not catch up by replay")
        elif self._memory.state.generation == newest.generation:
            if not self._memory.waiting:
                return  # the main thread may still read the last gradient's buffer
            me = self._context.identity
            own = {me.ckpt, *(x.ckpt for x in me.ranks)}
            roster = [x.ckpt for x in newest.roster if x.replica != me.replica]
            urls = tuple(x for x in dict.fromkeys([*self.fetch.urls, *roster]) if x not in own)
            fetch.doing = "gradient"
            self._context.emit(io.FetchGradient(newest.generation, self._memory.state.step, urls))
        elif self._epochs.mode is Mode.OUTSIDE and self._session.contact.connected:
            self._request_state("I hold no state of this generation")

    def advance_main(self) -> None:
        fetch = self.fetch
        if fetch.state is not None:
            self._memory.drop_kept()
            self._memory.order(io.Install(fetch.state.step, fetch.state.digest))
            self.fetch = Fetch(doing="install", generation=fetch.generation, urls=fetch.urls)
        elif fetch.gradient is not None:
            self._memory.drop_kept()
            gradient, fetch.gradient = fetch.gradient, None
            apply = io.Apply(
                self._memory.state.generation, gradient.step, None, contributed=False, digest=True
            )
            self._memory.apply(apply, gradient.gradient_digest)
