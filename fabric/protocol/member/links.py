"""Links of epochs: made, failed, lost, and probed from outside the roster."""

import math

from msgspec import Struct
from msgspec.structs import replace

from fabric.protocol.member.ending import Ending
from fabric.protocol.member.rounds import Rounds
from fabric.protocol.member.session import LighthouseSession
from fabric.protocol.member.state import CoreContext, KnownEpochs, MemberMemory, Mode
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m

# Seconds between two probes of the members: while the member reaches all of them; while a link flaps.
PROBE_S = 5.0
PROBE_AGAIN_S = 0.5
# When all members have been in a round for this many seconds, they test their links.
TEST_S = 1.0
# Seconds between two tests while members wait for a newcomer's state. A lost one ends its link before.
TEST_AGAIN_S = 4.0
# In rosters larger than this a newcomer probes only members that it could not reach before.
MAX_PROBED = 64


class LinkWatch(Struct, eq=False):
    """Acts on changes of the links. ``KnownEpochs`` holds their state."""

    _context: CoreContext
    _memory: MemberMemory
    _epochs: KnownEpochs
    _session: LighthouseSession
    _rounds: Rounds
    _ending: Ending
    probing: bool = False  # a probe from outside the roster is under way
    flaps: bool = False  # whether a member was out of reach since this member was last linked
    next_probe: float = -math.inf

    def on_linked(self, event: io.Linked) -> None:
        records = (x for x in (self._epochs.current, self._epochs.newest) if x is not None)
        names = [name for record in records if record.epoch == event.epoch for name in record.names]
        self._epochs.links.came_up(event.epoch, names)
        self.flaps = False

    def on_link_failed(self, event: io.LinkFailed) -> None:
        self._epochs.links.lose((), event.unreachable)
        if self._epochs.runs(event.epoch):
            self._rounds.abort(event.why, event.about)
        elif self._epochs.newest is not None and event.epoch == self._epochs.newest.epoch:
            self._complain(event.why, event.about)

    def _complain(self, why: str, about: str) -> None:
        """Tell the leader that the newest epoch cannot be linked."""
        assert self._epochs.newest is not None
        fence, step = self._epochs.newest.fence, self._memory.state.step
        self._session.send_aborted(
            m.Aborted(fence, step, why, about, unreachable=self._session.unreachable())
        )

    def on_link_lost(self, event: io.LinkLost) -> None:
        if self._ending.has_said_all(event.process):
            return  # rule 5: the other member leaves, and no round needs it any more
        records = (x for x in (self._epochs.current, self._epochs.newest) if x is not None)
        listed = [x.epoch for x in records if x.lists(event.replica, event.incarnation)]
        self._epochs.links.lose(listed, (event.replica,) if event.silent else ())
        self._ending.tell_again(listed)
        current = self._epochs.current if self._epochs.mode in (Mode.RUN, Mode.CATCH_UP) else None
        if current is not None and current.lists(event.replica, event.incarnation):
            if not self._session.contact.finished:  # a member that has finished is in no round
                self._rounds.abort(f"the link to {event.replica} ended: {event.why}", event.replica)
            return
        newest = self._epochs.newest if self._epochs.mode is not Mode.OUTSIDE else None
        if newest is None or not newest.lists(event.replica, event.incarnation):
            return
        if event.silent:
            # Complain before the next try, because the leader collects all complaints about a cut link.
            self._complain(f"the link to {event.replica} ended: {event.why}", event.replica)
        self._context.emit(io.LinkUp(newest))

    def test_deadline(self) -> float | None:
        """When to test the links of a round that takes long; None while no test is due.

        A member that waits for a newcomer's state tests them at once, and again: the state consists of large
        packets.
        """
        round_ = self._rounds.round
        if round_ is None or round_.gradient_digest:
            return None
        if round_.contributed and round_.record.has_blocking_join:
            return self._context.now if round_.tested_at == math.inf else round_.tested_at + TEST_AGAIN_S
        if round_.begun < 0 or round_.tested_at < math.inf:
            return None
        return round_.begun + TEST_S if len(round_.record.roster) > 1 else None

    def test_when_slow(self) -> None:
        """Test the links once in a round that takes long: they may lose large packets and pass small ones."""
        due = self.test_deadline()
        if due is not None and self._context.now >= due:
            self._rounds.test_links(again=True)

    def on_test(self, event: io.FromPeer, message: m.Contribution) -> io.FromPeer:
        """Test my links too, so that the leader gets all complaints together; return the event unpadded."""
        round_ = self._rounds.round
        if round_ is not None and (round_.record.epoch, round_.step) == (message.fence.epoch, message.step):
            self._rounds.test_links()
        return replace(event, message=replace(message, padding=""))

    def may_probe(self) -> bool:
        links, newest = self._epochs.links, self._epochs.newest
        there = newest is not None and (len(newest.roster) <= MAX_PROBED or bool(links.silent))
        is_free = self._session.contact.connected and not self.probing
        return self._epochs.mode is Mode.OUTSIDE and there and is_free

    def probe_when_due(self) -> None:
        """Probe the members from outside: a replica that cannot reach a member would be left out again."""
        links, newest = self._epochs.links, self._epochs.newest
        if newest is None or self._context.now < self.next_probe or not self.may_probe():
            return
        self.probing = True
        many = len(newest.roster) > MAX_PROBED
        self._context.emit(io.Probe(tuple(x for x in newest.roster if not many or x.replica in links.silent)))

    def on_probed(self, event: io.Probed) -> None:
        links, newest = self._epochs.links, self._epochs.newest
        self.probing = False
        missed = newest is not None and not links.silent.isdisjoint(newest.names)
        # A link that was cut may be cut again: probe often until all links of an epoch are up.
        self.flaps = self.flaps or missed or bool(event.unreachable)
        self.next_probe = self._context.now + (PROBE_AGAIN_S if self.flaps else PROBE_S)
        if self._epochs.mode is Mode.OUTSIDE and links.probed(set(event.unreachable), event.lost_bytes):
            self._session.hurry()
