"""How a job ends: complete, or failed for good (a user's loop that raised, a micro-batch that kills); and
what outlives that.

A failed job says why in its record, so that it is told to every process that comes, whichever lighthouse
leads: those that run, and those that a launcher starts again, however often it does. Launchers restart what
ends with exit code 1, and the same mistake comes again. So the job begins again, from what memory still
holds, by an operator's word alone.
"""

from dataclasses import replace

from fabric.model import JobEnd, Record
from fabric.protocol.leader.base import MAX_REASON_CHARACTERS
from fabric.protocol.leader.liveness import Peer
from fabric.protocol.leader.orders import Admission
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules import poison
from fabric.protocol.rules.assignment import lost_parts


class Failures(Admission):
    """A leader that knows when a job is over."""

    def on_operator(self, event: io.Operator) -> None:
        if event.action == "retry":
            self._retry(event)
        else:
            super().on_operator(event)

    # --- complete --------------------------------------------------------------------------------------

    def on_finished(self, peer: Peer, message: m.Finished) -> None:
        if self.record is not None and message.fence.generation == self.record.generation:
            self.finished[peer.session.replica] = message.step
            if message.why:
                self._record_event("finished", peer.session.replica, message.why)

    def note_ended(self, replica: str, ended: JobEnd | None) -> None:
        """A member finished, and I did not hear of it. Nobody has gone on without it since, as far as I know:
        then that was the end of this generation's job, whatever epochs were written since."""
        record = self.record
        if ended is None or record is None or record.failed:
            return
        of_mine = (ended.fence.store_id, ended.fence.generation) == (record.store_id, record.generation)
        if of_mine and record.lists(replica, ended.incarnation) and ended.step >= (self.highest_step or 0):
            self.end_step = ended.step

    def _refuse_early_ends(self, record: Record) -> None:
        """Whose loop has ended outside, and the job has gone on: it would wait for an end that is not its
        own. It is told so, and goes."""
        if not self.finished:
            return
        for name in [n for n in self.finished if not self._lists(n)]:
            peer, step, top = self.liveness.peers.get(name), self.finished[name], self.top_step()
            if peer is None or not peer.connected or step >= top or not self._is_of_generation(peer):
                continue
            del self.finished[name]
            why = (
                f"this loop ended at step {step}, before it had caught up with the job, which is at step "
                f"{top}: let it count session.committed_step, so that all loops end at the same step"
            )
            self._record_event("finished outside", name, why)
            self._send(name, m.Rejected(why))

    def _complete(self, record: Record) -> bool:
        """Rule 10: all that stay have finished; where nobody stays, all. A newcomer that has entered no round
        gets into none any more, for nobody contributes: published gradients take it to the end, if any."""
        if self.end_step is not None:
            self._write_complete(record, self.end_step)
            return True
        self._refuse_early_ends(record)
        if not self.finished:
            return False
        left = [x for x in record.roster if not x.leaving] or list(record.roster)
        missing = [x for x in left if x.replica not in self.finished]
        if len(missing) == len(left) or any(
            not x.joining or x.replica in self.epoch.running for x in missing
        ):
            return False
        if self.epoch.ended_at is None:
            self.epoch.ended_at = self._now
        waited_s = self._now - self.epoch.ended_at
        if any(waited_s < self._join_stall_s(x.replica) for x in missing):
            return False
        self._write_complete(record, max(self.finished[x.replica] for x in left if x not in missing))
        return True

    # --- failed ----------------------------------------------------------------------------------------

    def on_failed(self, peer: Peer, message: m.LoopFailed) -> None:
        """A member's loop has raised. Whoever took over would compute the same."""
        name, record = peer.session.replica, self.record
        why = f"{name} failed at step {message.step}: {message.why}"
        if record is None or record.complete or record.failed or not self._in_force(peer):
            # The others know nothing of what this one does: its mistake is its own.
            self._record_event("failed outside", name, message.why)
            self._send(name, m.Rejected(why))
        elif not self.failure and message.fence.generation == record.generation:
            # By its own word: its last beat may be from before this generation began.
            self.failure = why

    def _fail(self, record: Record) -> bool:
        """Whether the job has failed, or is failing now."""
        if record.failed:
            return True
        found = poison.proven(self._deaths(), self.forgiven_deaths)
        known = poison.merged(record.poison, found)
        lost = lost_parts(record.sharing, record.roster) if record.sharing.on_loss == "stop" else []
        if found and record.sharing.on_poison == "stop":
            self.failure = self.failure or poison.sentence(found)
        elif lost and record.roster:
            self.failure = self.failure or (
                f"no member can read shard {lost[0]}: bring back one of the replicas that can, and start"
                f" the job "
                'again, or let it wait for one with on_loss="wait"'
            )
        elif poison.size(known) > poison.MOST:
            self.failure = (
                f"more than {poison.MOST} micro-batches killed {poison.ENOUGH} processes each: that is no "
                "bad sample any more, look at the ends of those processes"
            )
        if not self.failure:
            return False
        failed = self.failure[:MAX_REASON_CHARACTERS]
        reason = f"failed: {failed}"
        self._write(replace(record, failed=failed, reason=reason, incident_id=self._pending(), poison=known))
        return True

    @property
    def refused_for(self) -> str:
        """Why every new process of a failed job is refused, or empty."""
        return self.record.failed if self.record is not None and not self.restart_after_failure else ""

    def _refused_as_failed(self, session: m.OpenSession) -> m.Rejected | None:
        """Every replica of a failed job is told so once."""
        record = self.record
        if record is None or not record.failed:
            return None
        name, incarnation = session.replica, session.incarnation
        is_new = incarnation > self.notified_incarnation.get(name, 0) and not record.lists(name, incarnation)
        if self.restart_after_failure and is_new:
            return None
        self.notified_incarnation[name] = max(incarnation, self.notified_incarnation.get(name, 0))
        command = f"`fabric retry --job {self.job} --why ...`"
        why = f"{record.failed}; when that is mended say {command} and start the replicas again"
        return m.Rejected(why, poison=record.poison)

    def _retry(self, event: io.Operator) -> None:
        """From now on new processes are let in, and begin the job again when enough of them are there."""
        if self.record is not None and self.record.failed and not self.restart_after_failure:
            self.restart_after_failure = True
            why = f"by {event.who}: {event.why}; it had failed: {self.record.failed}"
            self._record_event("retried", "", why[:MAX_REASON_CHARACTERS])

    def _forgive_deaths(self) -> None:
        """Somebody has looked at it and starts again: what killed before counts no more."""
        self.unusable.clear()
        self.mistrusted.clear()
        self.forgiven_deaths = {(replica, death) for replica, deaths in self._deaths() for death in deaths}
