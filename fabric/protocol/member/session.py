"""The session with the lighthouse: it opens, sends heartbeats, and repeats messages that must arrive."""

import math
from collections import deque

from msgspec.structs import replace

from fabric.exit_codes import FAILED, RESTART
from fabric.model import EarlierStep, Fence, SnapshotRef, StepTimes
from fabric.protocol.member.state import Contact, CoreContext, KnownEpochs, MemberMemory, Mode
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m

# The most awaited members that a heartbeat names; later heartbeats name the remaining awaited members.
MAX_NAMED = 64
# The most steps in one heartbeat beside the newest: a heartbeat goes at least every quarter of a second.
MOST_EARLIER = 16
# Rule 11: seconds between two heartbeats for steps.
STEP_BEAT_S = 0.25
# The settings that the first message repeats.
_OF_CONFIG = ["stores", "adapt", "launched", "replay", "replay_steps"]
_OF_CONFIG += ["exchange_s", "user_code_s", "autonomy_s"]


class LighthouseSession:
    """Sends this member's messages to the leader when they are due."""

    def __init__(self, context: CoreContext, memory: MemberMemory, epochs: KnownEpochs) -> None:
        self._context = context
        self._memory = memory
        self._epochs = epochs
        self.contact = Contact(last=context.now, next_beat=context.now)
        self.busy = ""  # the long work that the user's code announced, for people
        self.busy_s = 0.0  # seconds that the announced work may last
        self.last_times: StepTimes | None = None  # times of the newest step, for the next heartbeat
        self._times_step = 0  # the step of ``last_times``
        # The steps before the newest, since the last heartbeat.
        self._earlier: deque[EarlierStep] = deque(maxlen=MOST_EARLIER)
        self._measure = 0  # number of the newest micro-benchmark that the leader asked for
        self.echo = ""  # the member that the newest micro-benchmark echoes; empty: it measures the device
        self._measured = 0  # number of the newest micro-benchmark that the main thread got

    def ask_measure(self, number: int, echo: str = "") -> None:
        """Let the main thread run a micro-benchmark before the next step, once for each number.

        ``echo``: the member that it echoes; empty: it measures the device.
        """
        if number > self._measure:
            self._measure, self.echo = number, echo

    def take_measure(self) -> int:
        """Return the number of the micro-benchmark to run now; 0: none."""
        number = self._measure if self._measure > self._measured else 0
        self._measured = max(self._measured, number)
        return number

    @property
    def phase(self) -> str:
        """Words for people: the mode, whether links are being made, and whether the main thread waits."""
        mode = self._epochs.mode
        if self.contact.finished:
            return f"{mode.value}, finished"
        linking = mode is Mode.RUN and self._epochs.epoch() not in self._epochs.links.up
        return f"{mode.value}{m.LINKING if linking else ''}{', waiting' if self._memory.waiting else ''}"

    def hurry(self) -> None:
        """Send the next heartbeat at once."""
        self.contact.next_beat = self._context.now

    def on_busy(self, event: io.Busy) -> None:
        """Announce long work at once, because it decides how long the other members wait for me."""
        self.busy, self.busy_s = event.reason, event.at_most_s
        self.hurry()

    def on_closing(self, _: io.Closing) -> None:
        self._memory.on_loop_left()
        self.contact.finished = True
        fence = Fence(
            self._epochs.fence().store_id, self._memory.state.generation, self._epochs.fence().epoch
        )
        self._context.emit(io.SendLeader(m.Finished(fence, self._memory.state.step)))

    def on_failed(self, event: io.LoopRaised) -> None:
        """Tell the leader until it answers that the user's loop has raised."""
        self._memory.on_loop_left()
        self.contact.failed = m.LoopFailed(self._epochs.fence(), self._memory.state.step, event.why)
        self._context.emit(io.SendLeader(self.contact.failed))

    def unreachable(self) -> tuple[str, ...]:
        """Members of the newest epoch that I cannot reach, as far as I know."""
        newest = self._epochs.newest
        if newest is None or not self._epochs.links.silent:
            return ()
        return tuple(n for n in newest.names if n in self._epochs.links.silent)[:MAX_NAMED]

    def send_aborted(self, message: m.Aborted) -> None:
        self.contact.aborted, self.contact.unsaid = message, not self.contact.connected
        self._context.emit(io.SendLeader(self.contact.aborted))

    def beat(self, waiting_for: tuple[str, ...], saves: bool, saved: bool) -> None:
        """Send a heartbeat; my round waits for a message of each member in ``waiting_for``."""
        contact = self.contact
        contact.number += 1
        contact.sent[contact.number] = self._context.now
        contact.next_beat = self._context.now + self._context.config.beat_s
        contact.beaten = self._context.now
        contact.beaten_epoch = self._epochs.newest.epoch if self._epochs.newest is not None else 0
        beat = m.Heartbeat(
            number=contact.number,
            epoch=contact.beaten_epoch,
            generation=self._memory.state.generation,
            step=self._memory.state.step,
            digest=self._memory.state.digest,
            phase=self.phase,
            waiting_for=waiting_for[:MAX_NAMED],
            busy=self.busy,
            times=self.last_times,
            earlier=tuple(self._earlier),
            busy_s=self.busy_s,
            empty=self._memory.empty,
            unreachable=self.unreachable() if self._epochs.mode is Mode.OUTSIDE else (),
            lost_bytes=self._epochs.links.lost_bytes,
            micro_batches=self._memory.plan.micro_batches,
            noticed=self._context.noticed_at < math.inf,
            saved=saved,
            saves=saves,
        )
        self._context.emit(io.SendLeader(beat))
        self.last_times = None
        self._earlier.clear()

    def note_step(self, event: io.Ready, is_news: bool) -> None:
        """Keep the times of a step for the next heartbeat, and the older ones in short.

        Rule 11: a step that the leader does not need at once goes with the next heartbeat.
        """
        before, self.last_times = self.last_times, event.times
        if before is not None and not self.busy:
            work = sum(before.work.values()), before.squares, before.samples, before.micro_batches
            self._earlier.append(EarlierStep(self._times_step, before.compute_s, *work))
        self._times_step = event.step
        due = self._context.now if is_news else self.contact.beaten + STEP_BEAT_S
        self.contact.next_beat = min(self.contact.next_beat, max(due, self._context.now))

    def answered(self, number: int) -> m.Resume | None:
        """Take the answer to a heartbeat; return a decision that waited for one and counts now."""
        contact = self.contact
        sent = contact.sent.pop(number, None)
        if sent is None:
            return None
        contact.last = max(contact.last, sent)
        contact.sent = {n: t for n, t in contact.sent.items() if n > number}
        unheeded, contact.unheeded = contact.unheeded, None
        return unheeded

    def postpone(self, decision: m.Resume) -> None:
        """Rule 10: a new generation may have begun. The next answered heartbeat shows that."""
        self.contact.unheeded = decision
        self.hurry()

    def follow_steps(self) -> None:
        """Tell the leader this step and each later one at once, because it knows only an older one."""
        self.contact.asked = self._context.now
        self.hurry()

    def cannot_continue(self, why: str, unusable: bool) -> None:
        """Tell the leader until it answers that I cannot go on in the newest epoch."""
        assert self._epochs.newest is not None
        self.contact.fallen = m.CannotContinue(self._epochs.newest.fence, why, unusable)
        self._context.emit(io.SendLeader(self.contact.fallen))

    def has_answer(self) -> None:
        self.contact.fallen = None

    def forget(self) -> None:
        self.contact.aborted, self.contact.unsaid = None, False

    def open(self, snapshots: tuple[SnapshotRef, ...], serves: tuple[str, ...]) -> None:
        """Begin a session; repeat the other messages that the leader must know."""
        self.contact.connected = True
        self.hurry()
        self._context.emit(io.SendLeader(self._first_message(snapshots, serves)))
        if self.contact.failed is not None:
            self._context.emit(io.SendLeader(self.contact.failed))
        if self.contact.unsaid:
            # The leader may have answered that abort already, without knowing that I was in the round.
            self.contact.unsaid = False
            self.repeat_aborted()

    def _first_message(self, snapshots: tuple[SnapshotRef, ...], serves: tuple[str, ...]) -> m.OpenSession:
        config, state, newest = self._context.config, self._memory.state, self._epochs.newest
        return replace(
            self._context.identity,
            **{name: getattr(config, name) for name in _OF_CONFIG},
            generation=state.generation,
            step=state.step,
            digest=state.digest,
            epoch=newest.epoch if newest is not None else 0,
            known_generation=newest.generation if newest is not None else 0,
            store_id=newest.store_id if newest is not None else "",
            began=self._memory.began,
            snapshots=snapshots,
            serves=serves[:MAX_NAMED],
            finished=self.contact.finished,
            roster=newest.roster_digest if newest is not None else "",
        )

    def on_lost(self, _: io.LeaderLost) -> None:
        self.contact.connected = False

    def on_rejected(self, message: m.Rejected) -> None:
        if message.retry:
            # A member that is outvoted loads another state when an epoch leaves it out.
            if message.outvoted:
                self._memory.outvote()
            self._epochs.journal("kept out", message.reason)
        elif message.above:
            self._context.emit(io.ClaimAbove(message.above))
            self._context.stop(RESTART, message.reason)
        else:
            self._context.stop(FAILED, message.reason, message.poison)

    def repeat_aborted(self) -> None:
        if self.contact.aborted is not None:
            self._context.emit(io.SendLeader(self.contact.aborted))
