"""What the parts of a member core share: who it is, its settings, the time, and the effects of this turn."""

from fabric.model import Poison
from fabric.protocol.member.state import MemberConfig, MemberIdentity
from fabric.protocol.messages import member_events as io


class CoreContext:
    """One for a core; every part has it. Times are monotonic seconds."""

    def __init__(self, identity: MemberIdentity, config: MemberConfig, now: float) -> None:
        self.identity = identity
        self.config = config
        self.now = now  # of the event that is being handled
        self.effects: list[io.Effect] = []  # what that event has led to so far, in order
        self.stopped = False  # nothing is handled any more

    @property
    def replica(self) -> str:
        """This member's name."""
        return self.identity.replica

    def stop(self, code: int, reason: str, poison: tuple[Poison, ...] = ()) -> None:
        self.emit(io.Stop(code, reason, poison))
        self.stopped = True

    def emit(self, effect: io.Effect) -> None:
        self.effects.append(effect)
