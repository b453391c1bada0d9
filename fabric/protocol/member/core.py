"""The member core: one replica's part in epochs, rounds, recovery and joining. Pure.

``handle(event, now)`` returns the effects to perform, ``next_deadline()`` the time of the next Tick. Rule
numbers are those of docs/protocol.md. Three things change independently: the main thread (user code, then
waiting), the round (exchange and votes), and the epochs that the leader announces. After every event that can
start a stage ``_advance`` starts all that have become possible.

Each part of the core owns its fields and uses only parts before it in this order: ``memory``, ``epochs``,
``session``, ``serving``, ``rounds``, ``catch_up``, ``ending``, ``link_watch``, ``membership``.
"""

import math
from collections.abc import Callable
from typing import Any

from fabric.protocol.member.catch_up import CatchUp
from fabric.protocol.member.ending import Ending
from fabric.protocol.member.links import LinkWatch
from fabric.protocol.member.membership import Membership
from fabric.protocol.member.rounds import DataAgreement, Rounds
from fabric.protocol.member.serving import SnapshotServing
from fabric.protocol.member.session import LighthouseSession
from fabric.protocol.member.state import (
    CoreContext,
    KnownEpochs,
    MemberConfig,
    MemberMemory,
    Mode,
)
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.adaptive_timeout import AdaptiveTimeout


class MemberCore:
    """Takes events and returns effects. A core begins with the state and snapshots that ``identity`` names.

    A shell may read the parts and their fields, and writes none of them. Another thread that reads may see
    values that belong to different times.
    """

    def __init__(self, identity: m.OpenSession, config: MemberConfig, now: float) -> None:
        self.context = context = CoreContext(identity, config, now)
        self.memory = memory = MemberMemory(context)
        self.epochs = epochs = KnownEpochs(context, memory)
        self.session = session = LighthouseSession(context, memory, epochs)
        self.serving = serving = SnapshotServing(context, memory, epochs, session, identity.snapshots)
        self.rounds = rounds = Rounds(
            context,
            memory,
            epochs,
            session,
            serving,
            DataAgreement(context, memory),
            AdaptiveTimeout(config.exchange_s),
        )
        self.catch_up = catch_up = CatchUp(context, memory, epochs, session, rounds)
        self.ending = ending = Ending(context, memory, epochs, session, rounds, catch_up)
        self.link_watch = LinkWatch(context, memory, epochs, session, rounds, ending)
        self.membership = Membership(context, memory, epochs, session, serving, rounds, catch_up)
        self._handlers = self._event_handlers()
        # The part that takes each message of the leader.
        self._leader_handlers: dict[type, Callable[[Any], None]] = {
            m.Epoch: lambda message: self.membership.hear_of(message.record),
            m.RosterDelta: self.membership.on_change,
            m.Resume: self.membership.on_resume,
            m.TakeSnapshotFor: self.serving.on_serve,
            m.StopServing: self.serving.on_serve_end,
            m.StateSources: self.catch_up.on_sources,
            m.Complete: self.ending.on_complete,
            m.Rejected: self.session.on_rejected,
            m.HeartbeatAck: self.membership.on_beat_reply,
        }

    def _event_handlers(self) -> dict[type, Callable[[Any], None]]:
        """The part that takes each event."""
        return {
            io.Ready: self.rounds.on_ready,
            io.Digested: self.rounds.on_digested,
            io.Streaming: self.memory.on_streaming,
            io.Computed: self.rounds.on_computed,
            io.Installed: self.catch_up.on_installed,
            io.InstallFailed: self.catch_up.on_install_failed,
            io.Closing: self.session.on_closing,
            io.Busy: self.session.on_busy,
            io.Noticed: self.serving.on_noticed,
            io.Saved: self.serving.on_saved,
            io.LoopRaised: self.session.on_failed,
            io.Linked: self.link_watch.on_linked,
            io.LinkFailed: self.link_watch.on_link_failed,
            io.LinkLost: self.link_watch.on_link_lost,
            io.Probed: self.link_watch.on_probed,
            io.Exchanged: self.rounds.on_exchanged,
            io.ExchangeFailed: self.rounds.on_exchange_failed,
            io.FromPeer: self.on_peer,
            io.FromLeader: self.on_leader,
            io.LeaderConnected: self.on_connected,
            io.LeaderLost: self.session.on_lost,
            io.StateFetched: self.catch_up.on_state_fetched,
            io.FetchFailed: self.catch_up.on_fetch_failed,
            io.GradientFetched: self.catch_up.on_gradient,
            io.GradientGone: self.catch_up.on_gradient_gone,
            io.Snapshotted: self.serving.on_snapshotted,
            io.RingWaitsFor: self.rounds.on_ring_waits_for,
            io.Tick: lambda _: None,  # ``_advance`` looks at what is due after every event
        }

    # --- the contract ----------------------------------------------------------------------------------

    def handle(self, event: io.Event, now: float) -> list[io.Effect]:
        """Take one event at time ``now`` (monotonic seconds); return the effects to perform in order."""
        context = self.context
        context.begin(now)
        if not context.stopped:
            before = self.rounds.round
            self._handlers[type(event)](event)
            if not isinstance(event, io.RingWaitsFor) and not self.rounds.waits_on(event, before):
                self._advance()
                self.link_watch.probe_when_due()
                contact = self.session.contact
                if contact.connected and now >= contact.next_beat:  # first: listing the missing takes long
                    self.session.beat(self.rounds.missing(), self.serving.saves, self.serving.saved)
        return context.effects

    def next_deadline(self) -> float | None:
        """Return the latest time at which the shell must send a Tick."""
        next_beat = self.session.contact.next_beat if self.session.contact.connected else None
        next_probe = self.link_watch.next_probe if self.link_watch.may_probe() else None
        rounds = [self.rounds.stall_deadline(), self.rounds.tell_deadline(), self.link_watch.test_deadline()]
        ends = [self.ending.end_deadline(), self.serving.save_deadline()]
        dues = [*rounds, *ends, next_beat, next_probe]
        return None if self.context.stopped else min((d for d in dues if d is not None), default=None)

    def _advance(self) -> None:
        """Start every stage that the last event made possible; at most one of them is for the main thread."""
        if self.memory.waiting:
            self._advance_main()
        self.catch_up.fetch_when_behind()
        self.rounds.contribute_when_computed()
        self.rounds.tell_when_due()
        self.rounds.exchange_when_linked()
        self.rounds.prepare_when_reduced()
        self.rounds.commit_when_agreed()
        self.rounds.abort_when_stalled()
        self.link_watch.test_when_slow()
        self.ending.end_when_due()

    def _advance_main(self) -> None:
        """Give the waiting main thread its next work, if there is any."""
        epochs = self.epochs
        if self.memory.kept_gradient.stale:
            self.memory.drop_kept()
        self.serving.snapshot_when_due()
        if self.catch_up.is_behind():
            self.catch_up.advance_main()
        elif epochs.mode is Mode.CATCH_UP:
            assert epochs.resume is not None
            if epochs.is_at(epochs.resume.fence, epochs.resume.step):
                epochs.enter_mode(Mode.RUN)
        if not self.memory.waiting or self.rounds.round is not None:
            return
        if self.serving.is_to_save() and epochs.mode is not Mode.CATCH_UP:
            # A prepared round may be committed elsewhere: its decision comes first.
            if self.rounds.prepared is None and self.memory.state.generation:
                self.serving.save()
        elif epochs.mode is Mode.RUN:
            self.rounds.enter_round()

    # --- events that concern several parts -------------------------------------------------------------

    def on_peer(self, event: io.FromPeer) -> None:
        """Take another member's message, about its end or a round."""
        if isinstance(event.message, m.Finished):
            self.ending.on_finished(event, event.message)
            return
        if isinstance(event.message, m.Contribution) and event.message.padding:
            event = self.link_watch.on_test(event, event.message)
        if self.rounds.on_peer(event):
            self.membership.first_data()

    def on_leader(self, event: io.FromLeader) -> None:
        self._leader_handlers[type(event.message)](event.message)

    def on_connected(self, _: io.LeaderConnected) -> None:
        """Open the session; forget the request of the last session, which may never have arrived."""
        serves = tuple(name for name, last in self.serving.listeners.items() if last == math.inf)
        self.session.open(self.serving.snapshots, serves)
        self.catch_up.forget_request()
