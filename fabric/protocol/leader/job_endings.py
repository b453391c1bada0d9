"""How a job ends: complete, or failed for good (a user's loop that raised, a micro-batch that kills).

The record of a failed job says why it failed, so every leader sends that reason to every process that comes.
A restarted process would make the same mistake again. So only an operator's ``retry`` begins the job again,
from the states that are still in memory.
"""

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.model import JobEnd, Record
from fabric.protocol.leader.evidence import FailureEvidence
from fabric.protocol.leader.liveness import Peer
from fabric.protocol.leader.record_writer import RecordWriter
from fabric.protocol.leader.state import MAX_REASON_CHARACTERS, JobState, LeaderOutbox
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules import poison
from fabric.protocol.rules.assignment import lost_parts


class Endings(Struct, eq=False):
    """Rules 10 and 11: decides when a job is over, and tells it to every process that comes."""

    state: JobState
    outbox: LeaderOutbox
    evidence: FailureEvidence
    writer: RecordWriter
    finished: dict[str, int] = field(default_factory=dict)  # replica -> the step at which its loop ended
    end_step: int | None = None  # the step at which the job ended while no lighthouse led
    ended_by: str = ""  # the operator who ends the job without its replicas, and why
    failure: str = ""  # why the job must stop, until the record holds the reason
    # Replica -> the incarnation to which the leader has sent the failure.
    notified_incarnation: dict[str, int] = field(default_factory=dict)
    restart_after_failure: bool = False  # an operator wants the failed job to begin again

    def on_finished(self, peer: Peer, message: m.Finished) -> None:
        if self.state.record is not None and message.fence.generation == self.state.record.generation:
            self.finished[peer.session.replica] = message.step
            if message.why:
                self.outbox.record_event("finished", peer.session.replica, message.why)

    def note_finished(self, replica: str, step: int) -> None:
        self.finished[replica] = step

    def forget(self, replica: str) -> None:
        self.finished.pop(replica, None)

    def give_up(self, why: str) -> None:
        self.failure = why

    def note_ended(self, replica: str, ended: JobEnd | None) -> None:
        """Note that a member finished while this leader could not hear it.

        If no member has committed a later step, this generation's job ended there, in spite of later epochs.
        """
        record = self.state.record
        if ended is None or record is None or record.failed:
            return
        if (ended.fence.store_id, ended.fence.generation) != (record.store_id, record.generation):
            return
        if record.lists(replica, ended.incarnation) and ended.step >= (self.state.highest_step or 0):
            self.end_step = ended.step

    def known_ends(self, record: Record) -> list[int]:
        """The steps at which loops have ended, except of a process that is gone and that the job outlived."""
        there = {name for name, peer in self.state.liveness.peers.items() if peer.connected}
        return [
            step for name, step in self.finished.items() if name in there or record.member(name) is not None
        ]

    def refuse_early_ends(self, record: Record) -> None:
        """Refuse replicas outside the roster whose loop ended before the job's: they would wait for ever."""
        if not self.finished:
            return
        for name in [n for n in self.finished if not self.state.lists(n)]:
            peer, step, top = self.state.liveness.peers.get(name), self.finished[name], self.state.top_step()
            if peer is None or not peer.connected or step >= top or not self.state.is_of_generation(peer):
                continue
            del self.finished[name]
            why = (
                f"this loop ended at step {step}, before it had caught up with the job, which is at step "
                f"{top}: let it count session.committed_step, so that all loops end at the same step"
            )
            self.outbox.record_event("finished outside", name, why)
            self.outbox.send(name, m.Rejected(why))

    def complete(self, record: Record) -> bool:
        """Rule 10: complete the job when all members that stay have finished; if none stays, when all have.

        A newcomer that has entered no round cannot enter one any more, because no member contributes. It can
        reach the end only by published gradients, so no member waits for one in a blocking join.
        """
        if self.ended_by:
            self.writer.write_complete(record, self.state.top_step(), self.ended_by)
            return True
        if self.end_step is not None:
            self.writer.write_complete(record, self.end_step)
            return True
        self.refuse_early_ends(record)
        if not self.finished:
            return False
        left = [x for x in record.roster if not x.leaving] or list(record.roster)
        missing = [x for x in left if x.replica not in self.finished]
        if len(missing) == len(left) or any(
            not x.joining or x.replica in self.state.epoch.running for x in missing
        ):
            return False
        waited_s = self.state.epoch.finished_for_s(self.state.now)
        if any(waited_s < self.state.join_stall_s(x.replica) for x in missing if not x.blocking_join):
            return False
        self.writer.write_complete(record, max(self.finished[x.replica] for x in left if x not in missing))
        return True

    def begin_epoch(self, record: Record, is_new_generation: bool) -> None:
        """Forget the end of the epoch before."""
        if is_new_generation:
            self.end_step = None
        if is_new_generation or record.failed:
            self.finished.clear()
        self.failure, self.restart_after_failure, self.notified_incarnation = "", False, {}

    def reject_all(self, record: Record) -> None:
        """Tell every present process that the job has failed. Later processes may begin the job again."""
        rejected = m.Rejected(record.failed, poison=record.poison)
        for replica, peer in self.state.liveness.peers.items():
            if peer.connected and not self.state.suspicion(peer):
                self.notified_incarnation[replica] = peer.incarnation
            self.outbox.send(replica, rejected)

    def on_failed(self, peer: Peer, message: m.LoopFailed) -> None:
        """Fail the job, because a member's loop has raised: any other replica would compute the same."""
        name, record = peer.session.replica, self.state.record
        why = f"{name} failed at step {message.step}: {message.why}"
        if record is None or record.complete or record.failed or not self.state.in_force(peer):
            # No member computes the work of this process outside the roster, so the job goes on.
            self.outbox.record_event("failed outside", name, message.why)
            self.outbox.send(name, m.Rejected(why))
        elif not self.failure and message.fence.generation == record.generation:
            # The message names its generation, because the last heartbeat may be from an earlier generation.
            self.failure = why

    def fail(self, record: Record) -> bool:
        """Return whether the job has failed; write the failed record where a failure is new."""
        if record.failed:
            return True
        deaths = poison.proven(self.state.deaths(), self.evidence.forgiven_deaths)
        poisoned = poison.merged(record.poison, deaths)
        lost = lost_parts(record.sharing, record.roster) if record.sharing.on_loss == "stop" else []
        if deaths and record.sharing.on_poison == "stop":
            self.failure = self.failure or poison.sentence(deaths)
        elif lost and record.roster:
            self.failure = self.failure or (
                f"no member can read shard {lost[0]}: bring back one of the replicas that can, and start the "
                'job again, or let it wait for one with on_loss="wait"'
            )
        elif sum(len(x.micro_batches) for x in poisoned) > poison.MOST:
            self.failure = (
                f"more than {poison.MOST} micro-batches killed {poison.ENOUGH} processes each: that is no "
                "bad sample any more, look at the ends of those processes"
            )
        if not self.failure:
            return False
        failed = self.failure[:MAX_REASON_CHARACTERS]
        reason, incident_id = f"failed: {failed}", self.state.next_incident_id()
        self.writer.write(
            replace(record, failed=failed, reason=reason, incident_id=incident_id, poison=poisoned)
        )
        return True

    @property
    def refused_for(self) -> str:
        """Why every new process of a failed job is refused, or empty."""
        record = self.state.record
        return record.failed if record is not None and not self.restart_after_failure else ""

    def refusal_as_failed(self, session: m.OpenSession) -> m.Rejected | None:
        """Tell each replica of a failed job once that it has failed."""
        record = self.state.record
        if record is None or not record.failed:
            return None
        name, incarnation = session.replica, session.incarnation
        is_new = incarnation > self.notified_incarnation.get(name, 0) and not record.lists(name, incarnation)
        if self.restart_after_failure and is_new:
            return None
        self.notified_incarnation[name] = max(incarnation, self.notified_incarnation.get(name, 0))
        command = f"`fabric retry --job {self.state.job} --why ...`"
        why = f"{record.failed}; when that is mended say {command} and start the replicas again"
        return m.Rejected(why, poison=record.poison)

    def end(self, event: io.Operator) -> None:
        """End a job whose processes are all gone; its record says so to every later process."""
        why = f"ended by {event.who} at step {self.state.top_step()}: {event.why}"
        self.ended_by = why[:MAX_REASON_CHARACTERS]

    def retry(self, event: io.Operator) -> None:
        """Let new processes in. They begin the job again when enough of them are there."""
        if self.state.record is not None and self.state.record.failed and not self.restart_after_failure:
            self.restart_after_failure = True
            why = f"by {event.who}: {event.why}; it had failed: {self.state.record.failed}"
            self.outbox.record_event("retried", "", why[:MAX_REASON_CHARACTERS])
