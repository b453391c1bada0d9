"""The context that all parts of a member core share: identity, settings, time, the effects of this event."""

from fabric.exit_codes import FINISHED, RESTART
from fabric.model import Member, Poison
from fabric.protocol.member.state import MemberConfig, MemberIdentity
from fabric.protocol.messages import member_events as io


class CoreContext:
    """The context of one core, in each of its parts. Times are monotonic seconds."""

    def __init__(self, identity: MemberIdentity, config: MemberConfig, now: float) -> None:
        self.identity = identity
        self.config = config
        self.now = now  # the time of the present event
        self.effects: list[io.Effect] = []  # the effects of the present event so far, in order
        self.stopped = False  # whether the core has stopped: it handles no further event
        self.noticed = False  # whether this process has notice that it will be killed soon

    @property
    def replica(self) -> str:
        return self.identity.replica

    def stop(self, code: int, reason: str, poison: tuple[Poison, ...] = ()) -> None:
        self.emit(io.Stop(code, reason, poison))
        self.stopped = True

    def leave(self, entry: Member | None) -> None:
        """Stop as a leaving member. ``entry``: this member's entry in the last roster that lists it."""
        if entry is None or not entry.returns:
            self.stop(RESTART if self.noticed else FINISHED, "drained: the others go on without this replica")
            return
        reason = f"comes back in the layout {entry.returns}: the others go on meanwhile"
        self.emit(io.Stop(RESTART, reason, layout=entry.returns))
        self.stopped = True

    def emit(self, effect: io.Effect) -> None:
        self.effects.append(effect)
