"""A member's memory: its training state, the gradient that it keeps, and what its main thread does."""

from fabric.model import DataPlan
from fabric.protocol.member.context import CoreContext
from fabric.protocol.member.state import KeptGradient, MemberState
from fabric.protocol.messages import member_events as io


class MemberMemory:
    """The memory of the trainer process. Only its main thread changes state and gradient, by effects."""

    def __init__(self, context: CoreContext, state: MemberState) -> None:
        self._context = context
        self.state = state
        self.kept_gradient = KeptGradient()
        self.waiting = False  # whether the main thread waits for a Compute, Apply, Install, ...
        self.began = state.step  # the step at which this process began
        self.loaded = -1  # the step of the last loaded state: its digest does not prove my own updates
        self.empty = -1  # the newest step that was committed with total weight 0
        # The data of the loop's steps now.
        self.plan = context.config.plan or DataPlan(context.identity.micro_batches)
        self.agreed = 0  # the newest epoch in which a state that I updated had another member's digest

    def order(self, effect: io.Compute | io.Apply | io.Install) -> None:
        """Give the main thread its next work."""
        self.waiting = False
        self._context.emit(effect)

    def take_back(self, plan: DataPlan | None) -> None:
        """The main thread waits again; ``plan``: the data of the loop's steps from now on, if it changed."""
        self.waiting = True
        self.plan = plan or self.plan

    def distrust(self) -> None:
        """No other member confirms my state any more: it belongs to no generation."""
        self.state.generation = 0

    def drop_kept(self) -> None:
        """Forget the kept gradient: at once, or when the main thread has finished adding to it."""
        if not self.waiting and self.kept_gradient.computing:
            self.kept_gradient.stale = True
            return
        if self.kept_gradient.have:
            self._context.emit(io.DropGradient())
        self.kept_gradient = KeptGradient()

    def lacks_digest(self) -> bool:
        """Rule 1: return whether my state's digest is due and still being taken; if so, ask for it."""
        state = self.state
        if state.later and not state.asked:
            state.asked = True
            self._context.emit(io.TellDigest(state.step))
        return state.later
