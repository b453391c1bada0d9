"""The read-only view of a member core. Another thread may read values that belong to different times."""

from collections.abc import Mapping, Set

from fabric.model import Record, SnapshotRef
from fabric.protocol.member.catch_up import CatchUp
from fabric.protocol.member.context import CoreContext
from fabric.protocol.member.epochs import KnownEpochs
from fabric.protocol.member.memory import MemberMemory
from fabric.protocol.member.round import Round
from fabric.protocol.member.rounds import Rounds
from fabric.protocol.member.serving import SnapshotServing
from fabric.protocol.member.session import LighthouseSession
from fabric.protocol.member.state import MemberConfig, MemberIdentity, Mode
from fabric.protocol.messages import network as m


class MemberView:
    """Read-only: each property names one fact of the core."""

    def __init__(
        self,
        context: CoreContext,
        memory: MemberMemory,
        epochs: KnownEpochs,
        session: LighthouseSession,
        serving: SnapshotServing,
        rounds: Rounds,
        catch_up: CatchUp,
    ) -> None:
        self._context = context
        self._memory = memory
        self._epochs = epochs
        self._session = session
        self._serving = serving
        self._rounds = rounds
        self._catch_up = catch_up

    # --- who it is, and its memory -----------------------------------------------------------------

    @property
    def identity(self) -> MemberIdentity:
        return self._context.identity

    @property
    def config(self) -> MemberConfig:
        return self._context.config

    @property
    def generation(self) -> int:
        """The generation of the state in memory; 0: no other member confirms this state."""
        return self._memory.state.generation

    @property
    def step(self) -> int:
        """The step of the state in memory."""
        return self._memory.state.step

    @property
    def digest(self) -> str:
        """The digest of the state in memory; empty: it was not taken."""
        return self._memory.state.digest

    # --- epochs and rounds -------------------------------------------------------------------------

    @property
    def mode(self) -> Mode:
        """Where this member is among the epochs."""
        return self._epochs.mode

    @property
    def phase(self) -> str:
        """The mode in words for people, with what the main thread does."""
        return self._session.phase

    @property
    def current(self) -> Record | None:
        """The epoch in force here."""
        return self._epochs.current

    @property
    def newest(self) -> Record | None:
        """The newest epoch that was announced."""
        return self._epochs.newest

    @property
    def first_step(self) -> int:
        """The first step of the epoch in force."""
        return self._epochs.links.first_step

    @property
    def round(self) -> Round | None:
        """The round that is under way."""
        return self._rounds.round

    @property
    def own_contribution(self) -> m.Contribution | None:
        """The contribution that this member has sent for the round under way."""
        round_ = self._rounds.round
        return round_.contributions.get(self._context.replica) if round_ is not None else None

    # --- the session, and joins --------------------------------------------------------------------

    @property
    def last_answered(self) -> float:
        """When this member sent the newest heartbeat that the leader answered."""
        return self._session.contact.last

    @property
    def busy(self) -> str:
        """The long work that the user's code announced; empty: none."""
        return self._session.busy

    @property
    def saving(self) -> int:
        """The step at which this member has stopped to save its state after a notice; negative: none."""
        return self._serving.saving

    @property
    def fetching(self) -> str:
        """The catch-up under way: ``asked``, ``state``, ``install``, ``gradient`` or nothing."""
        return self._catch_up.fetch.doing

    @property
    def fetched_generation(self) -> int:
        """The generation to which the state being loaded will belong."""
        return self._catch_up.fetch.generation

    @property
    def promised_snapshots(self) -> Mapping[str, int]:
        """Joining member -> the step at which a snapshot is promised to it."""
        return self._serving.promised

    @property
    def listeners(self) -> Set[str]:
        """The joining members that replay published gradients."""
        return self._serving.listeners

    @property
    def snapshots(self) -> tuple[SnapshotRef, ...]:
        """The snapshots that the checkpoint server holds."""
        return self._serving.snapshots
