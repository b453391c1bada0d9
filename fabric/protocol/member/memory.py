"""A member's memory: its training state, the gradient that it keeps, and what its main thread does."""

from fabric.protocol.member.context import CoreContext
from fabric.protocol.member.state import KeptGradient, MemberState
from fabric.protocol.messages import member_events as io


class MemberMemory:
    """What the trainer process holds. Only its main thread changes it, while that has an order."""

    def __init__(self, context: CoreContext, state: MemberState) -> None:
        self._context = context
        self.state = state
        self.kept_gradient = KeptGradient()
        self.waiting = False  # whether the main thread waits for a Compute, Apply, Install, ...
        self.loaded = -1  # the step of the state that was loaded last: its digest says nothing of my updates
        self.empty = -1  # the newest step that was committed with total weight 0
        self.agreed = 0  # the newest epoch in which a later state of mine had another member's digest

    def drop_kept(self) -> None:
        """Forget the kept gradient, at once or when the main thread has finished adding to it."""
        if not self.waiting and self.kept_gradient.computing:
            self.kept_gradient.stale = True
            return
        if self.kept_gradient.have:
            self._context.emit(io.DropGradient())
        self.kept_gradient = KeptGradient()

    def lacks_digest(self) -> bool:
        """Whether my state's digest is to be compared and not taken to its end. Others count the time of a
        round from when everybody is in it, so I am not before that is done."""
        state = self.state
        if state.later and not state.asked:
            state.asked = True
            self._context.emit(io.TellDigest(state.step))
        return state.later
