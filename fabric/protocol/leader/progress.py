"""The progress of the job, by its members' heartbeats."""

from dataclasses import dataclass

from fabric.protocol.leader.liveness import Peer
from fabric.protocol.leader.outbox import LeaderOutbox
from fabric.protocol.leader.state import JobState
from fabric.protocol.messages import network as m

# Seconds between two log events about steps without data.
EMPTY_S = 1.0


@dataclass(slots=True, eq=False)
class Progress:
    """The newest step, and steps without data."""

    state: JobState
    outbox: LeaderOutbox
    last_step_at: float  # when a member last reported a step higher than all before
    highest_step: int | None = None  # highest step of this generation; None: not known to this leader
    empty: tuple[int, int] = (0, -1)  # generation and number of the newest step without data in an event
    empty_due: float = 0.0  # the time from which another event about a step without data may follow

    def note_step(self, peer: Peer) -> None:
        if self.state.in_force(peer) and self.state.is_of_generation(peer):
            self.highest_step = max(self.highest_step or 0, peer.step)

    def record_empty_step(self, peer: Peer, beat: m.Heartbeat) -> None:
        """Write an event about a step without data: once per step, and at most once a second."""
        newest = (beat.generation, beat.empty)
        if not 0 <= beat.empty <= beat.step or newest <= self.empty or self.state.now < self.empty_due:
            return
        if self.state.in_force(peer) and self.state.is_of_generation(peer):
            self.empty, self.empty_due = newest, self.state.now + EMPTY_S
            why = f"step {beat.empty} was committed with total weight 0: no member had data for it"
            self.outbox.record_event("empty step", "", why)
