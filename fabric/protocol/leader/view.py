"""The read-only view of a leader core: everything that a lighthouse may read.

A shell gives events to ``LeaderCore.handle`` and reads here; it writes nothing of what it gets. The view has
no state of its own: every property reads the core.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fabric.model import Member, OperatorOverrides, Policy, Record
from fabric.protocol.leader.admission import Backoff
from fabric.protocol.leader.evidence import Penalty
from fabric.protocol.leader.joins import Serving
from fabric.protocol.leader.liveness import Liveness, Peer
from fabric.protocol.leader.state import EpochState
from fabric.protocol.messages import leader_events as io

if TYPE_CHECKING:
    from fabric.protocol.leader.core import LeaderCore


class LeaderView:
    """One job's leader core as a shell may see it."""

    __slots__ = ("_core",)

    def __init__(self, core: "LeaderCore") -> None:
        self._core = core

    @property
    def job(self) -> str:
        return self._core.state.job

    @property
    def liveness(self) -> Liveness:
        """Sessions, checkpoint servers, and what both say of a process."""
        return self._core.state.liveness

    @property
    def peers(self) -> Mapping[str, Peer]:
        """Replica -> the session of the process that counts for it."""
        return self._core.state.liveness.peers

    @property
    def epoch(self) -> EpochState:
        """Reports, aborts and decision of the epoch in force. They stay as they are when that epoch ends."""
        return self._core.state.epoch

    # --- the record ------------------------------------------------------------------------------------

    @property
    def record(self) -> Record | None:
        """The record that the store has committed."""
        return self._core.state.record

    @property
    def record_in_flight(self) -> Record | None:
        """The record whose write the store has not answered yet."""
        return self._core.writer.writing

    @property
    def is_reading(self) -> bool:
        """Whether the core waits for the record to be read again."""
        return self._core.writer.reading

    @property
    def is_changing(self) -> bool:
        """Whether a record is being written, or an eviction is pending."""
        return self._core.writer.is_changing

    @property
    def is_complete(self) -> bool:
        return self._core.state.record is not None and self._core.state.record.complete

    @property
    def failed_reason(self) -> str:
        """Why a failed job refuses new processes, or empty."""
        return self._core.endings.refused_for

    @property
    def restarts_after_failure(self) -> bool:
        """Whether an operator wants the failed job to begin again."""
        return self._core.endings.restart_after_failure

    # --- steps -----------------------------------------------------------------------------------------

    def top_step(self) -> int:
        """The highest step of any member. The call looks at every peer."""
        return self._core.state.top_step()

    @property
    def highest_step(self) -> int | None:
        """The highest step of this generation that this leader has heard of."""
        return self._core.progress.highest_step

    @property
    def steps_lost(self) -> int | None:
        """Steps that the newest cold start lost, where the leader knows."""
        return self._core.bases.steps_lost

    @property
    def last_step_at(self) -> float:
        """When a member last reported a further step."""
        return self._core.progress.last_step_at

    @property
    def finished(self) -> Mapping[str, int]:
        """Replica -> the step at which it finished."""
        return self._core.endings.finished

    @property
    def awaited_in_step(self) -> Mapping[str, tuple[int, float]]:
        """Replica that the others wait for in the exchange -> the step, and since when."""
        return self._core.evictions.stragglers.since

    def patience_s(self, peer: Peer) -> float:
        """How long the others wait for this member's user code."""
        return self._core.state.patience_s(peer)

    @property
    def ring_rebuild_at(self) -> float:
        """When the same members rebuild their ring after an abort."""
        return self._core.rebuilds.rebuild_due

    # --- who takes part --------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        return self._core.state.config.policy

    @property
    def coalesce_s(self) -> float:
        """Deaths that the leader notices within this many seconds share one epoch."""
        return self._core.state.config.coalesce_s

    @property
    def min_members(self) -> int:
        """How many members the job needs to step, from the next epoch on."""
        return self._core.limits.least

    @property
    def max_members(self) -> int:
        return self._core.limits.most

    @property
    def start_wait_s(self) -> float:
        """How long a start waits for all replicas."""
        return self._core.starts.start_wait_s

    @property
    def start_waits_since(self) -> float | None:
        """Since when a start waits for more replicas."""
        return self._core.starts.waiting_since

    @property
    def awaited_own_state(self) -> tuple[Peer, float] | None:
        """The replica whose own checkpoint the first start waits for, and until when; or None."""
        starts = self._core.starts
        peer = starts.awaited_own_state(starts.candidates()) if self.record is None else None
        return (peer, starts.own_state_until(peer)) if peer is not None else None

    def startable(self) -> int:
        """How many replicas could begin a generation now."""
        return self._core.starts.startable()

    @property
    def out_of_contact_limit_s(self) -> float:
        """After this many seconds out of contact a process commits nothing any more."""
        return self._core.state.out_of_sight_s

    @property
    def serving(self) -> Mapping[str, Serving]:
        """Joiner -> the snapshot that the members take for it."""
        return self._core.joins.serving

    @property
    def notified_refusals(self) -> Mapping[str, str]:
        """Joiner -> the reason last sent to it why the leader does not admit it."""
        return self._core.admission.waiting_outside

    def admission_refusal(self, peer: Peer) -> str:
        """Why the leader does not admit this joiner now, or empty."""
        return self._core.admission.kept_out(peer)

    def readmission_backoff(self, peer: Peer) -> Backoff:
        """How often this process was evicted, and until when it waits."""
        return self._core.admission.readmission_backoff.get(peer.process, Backoff())

    def was_evicted_in_user_code(self, peer: Peer) -> bool:
        """Whether this process was evicted because of long user code, and is still in it."""
        return peer.process in self._core.admission.evicted_in_user_code

    # --- operators and hosts ---------------------------------------------------------------------------

    @property
    def overrides(self) -> OperatorOverrides:
        """The operators' overrides, which the next write puts into the record."""
        return self._core.limits.overrides

    @property
    def has_unwritten_overrides(self) -> bool:
        """Whether the next leader would not know the newest overrides."""
        return self._core.writer.has_unwritten_overrides

    @property
    def adapt_mode(self) -> str:
        """The job's mode against slow replicas; empty: this leader does not know it yet."""
        return self._core.adaptations.mode

    @property
    def share_actions(self) -> int:
        """How often leaders have lowered shares in the last hour."""
        return len(self._core.adaptations.recent_actions(self.record)) if self.record is not None else 0

    def knows_every_step(self, member: Member) -> bool:
        """Whether this member has joined completely, although the record may still list it as joining."""
        return self._core.state.knows(member)

    @property
    def shares_held(self) -> str:
        """Why the leader does not follow the newest advice about shares, in a sentence, or empty."""
        return self._core.adaptations.held

    @property
    def layout_held(self) -> str:
        """Why the leader does not follow the newest advice about a layout, in a sentence, or empty."""
        return self._core.adaptations.layouts.held

    def objection(self, asked: io.Operator) -> str:
        """Why the leader refuses this order, in a sentence, or empty."""
        return self._core.orders.objection(asked)

    def knows_of(self, about: str) -> bool:
        """Whether the leader has heard of a replica or a host of this name."""
        return self._core.evidence.knows_of(about)

    def penalties(self) -> list[Penalty]:
        """Replicas and hosts that are kept out because they failed too often."""
        return self._core.evidence.penalties()

    def hosts_that_failed(self) -> list[dict[str, Any]]:
        """Each host with failures in its history, the most suspect first."""
        return self._core.evidence.hosts_that_failed()
