"""The effects of one event, in order."""

from dataclasses import dataclass, field

from fabric.model import Record
from fabric.protocol.leader.state import JobState
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m


@dataclass(slots=True, eq=False)
class LeaderOutbox:
    """Collects effects; every part of the leader sends through it."""

    state: JobState
    effects: list[io.Effect] = field(default_factory=list)
    loss_incidents: dict[str, str] = field(default_factory=dict)  # by evicted replica, until it is back

    def emit(self, effect: io.Effect) -> None:
        self.effects.append(effect)

    def send(self, replica: str, message: m.LeaderMessage) -> None:
        peer = self.state.liveness.peers.get(replica)
        if peer is not None and peer.connected:
            self.emit(io.SendMember(replica, peer.incarnation, message))

    def record_event(self, kind: str, about: str, why: str, incident_id: str = "") -> None:
        """Write an event for operators. Without an incident id the event belongs to the loss of ``about``."""
        incident_id = incident_id or self.loss_incidents.get(about, "")
        epoch = self.state.record.epoch if self.state.record else 0
        self.emit(io.RecordEvent(kind, epoch, about, why, incident_id))

    def forget_losses(self, record: Record) -> None:
        """Forget the loss of each replica that takes part again: later events do not belong to that loss."""
        for member in record.roster:
            if not member.joining:
                self.loss_incidents.pop(member.replica, None)
