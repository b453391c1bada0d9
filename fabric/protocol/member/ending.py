"""The end of a member's loop: rule 12 of docs/protocol.md.

The first step at which a member has finished is the end of the job, because a further commit needs that
member's contribution. So members tell each other over their own links. A loop that asks for a step after the
end stops with an error. A loop that ends before its replica has caught up stops with an error at once. When
all members have finished, the job is over, with or without a lighthouse.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from fabric.exit_codes import FAILED, FINISHED, RESTART
from fabric.model import JobEnd, Member, Record, ReplicaProcess, first_of
from fabric.protocol.member.catch_up import CatchUp
from fabric.protocol.member.rounds import Rounds
from fabric.protocol.member.session import LighthouseSession
from fabric.protocol.member.state import CoreContext, KnownEpochs, MemberMemory, Mode
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m

# After all members have finished, each waits this many seconds for a leader to mark the job complete: with a
# session (its store may be away), and without one (a leader may come back).
LEADER_S = 30.0
NO_LEADER_S = 5.0
# The most finished processes that a member remembers; beyond it only processes in the newest roster.
MOST_HEARD = 4096
# Modes of a process whose state is, or was just before, the state of the job's step.
_THERE = (Mode.RUN, Mode.ABORTED, Mode.REPORTED)
_ADVICE = "let it count session.committed_step, so that all loops end at the same step"


class Ending(Struct, eq=False):
    """Knows when the job is over, and ends this member then."""

    _context: CoreContext
    _memory: MemberMemory
    _epochs: KnownEpochs
    _session: LighthouseSession
    _rounds: Rounds
    _catch_up: CatchUp
    # process -> its (generation, step)
    finished_peers: dict[ReplicaProcess, tuple[int, int]] = field(default_factory=dict)
    # The epochs whose members know from me that I finished.
    notified_epochs: set[int] = field(default_factory=set)
    all_finished_since: float = -1.0  # when I learned that all members have finished; negative before

    def on_finished(self, event: io.FromPeer, message: m.Finished) -> None:
        """Note that a process has finished. The note stays true in later epochs."""
        heard, newest = self.finished_peers, self._epochs.newest
        if message.why and self._session.contact.finished:
            why = f"{event.replica} had steps left when this loop ended, and the job ended with it"
            self._epochs.journal("loops differ", why, event.replica)
        heard[event.process] = (message.fence.generation, message.step)
        if len(heard) > MOST_HEARD:
            listed = {key: at for key, at in heard.items() if newest is not None and newest.lists(*key)}
            self.finished_peers = listed

    def on_complete(self, message: m.Complete) -> None:
        """End this process: without an error only if its loop has ended with the final state (rule 12).

        The shell ends a loop that still runs.
        """
        state, final = self._memory.state, (message.fence.generation, message.step)
        if not self._session.contact.finished or (state.generation, state.step) == final:
            self._context.end(io.Finish(message.step))
            return
        why = f"the job is complete at step {message.step}, and this loop ended at step {state.step}"
        if state.step == message.step:
            # My state is of a generation that was given up, or other members called it wrong.
            self._context.stop(
                FINISHED, f"{why} with another state: the final state is with the replicas that finished"
            )
        else:
            self._context.stop(FAILED, f"{why}: {_ADVICE}")

    def _has_finished(self, process: ReplicaProcess) -> bool:
        """Whether this process has told me that it finished, in the generation of my state."""
        heard = self.finished_peers.get(process)
        return heard is not None and heard[0] == self._memory.state.generation

    def has_said_all(self, process: ReplicaProcess) -> bool:
        """Whether no round needs this process any more (rule 5).

        It has finished, or it is drained and we both have prepared the last round: it may have received all
        votes before me.
        """
        if self._has_finished(process):
            return True
        round_, current = self._rounds.round, self._epochs.current
        member = current.member(process.replica) if current is not None else None
        if round_ is None or member is None or member.process != process or not member.leaving:
            return False
        return process.replica in round_.votes and self._context.replica in round_.votes

    def tell_again(self, epochs: Iterable[int]) -> None:
        """Tell the members of these epochs again, over new links, that I have finished."""
        self.notified_epochs -= set(epochs)

    def end_when_due(self) -> None:
        if self._context.stopped:
            return
        if not self._session.contact.finished:
            self._stop_when_others_have_finished()
            return
        resume = self._epochs.resume
        there = resume is not None and self._epochs.is_at(resume.fence, resume.step)
        if there and self._epochs.mode is Mode.CATCH_UP:
            self._epochs.enter_mode(Mode.RUN)
        self._stop_when_left_behind()
        if not self._context.stopped:
            self._tell_members()
            self._end_alone_when_due()

    def _records(self) -> Iterator[Record]:
        """The linked epochs that list me."""
        epochs, identity = self._epochs, self._context.identity
        if epochs.mode not in (Mode.RUN, Mode.JOINED):
            return
        # A newcomer that was evicted before has said in its report that it says nothing in that epoch.
        is_one = epochs.mode is Mode.JOINED or epochs.newest is epochs.current
        for record in (epochs.current, epochs.newest)[is_one:]:
            if record is None or record.epoch not in epochs.links.up:
                continue
            # A drained member still makes the links of the epoch without it, but sends nothing on them.
            if record.lists(identity.replica, identity.incarnation):
                yield record

    def _takes_part(self) -> bool:
        """Whether rounds wait for my state. They do not wait for a newcomer before its first commit."""
        if self._epochs.mode not in _THERE or self._epochs.current is None:
            return False
        me = self._epochs.current.member(self._context.replica)
        return me is not None and (not me.joining or self._rounds.committed_in >= max(me.since, 1))

    def _stop_when_others_have_finished(self) -> None:
        """Rule 12: stop if my loop asks for a round at the step at which others have finished."""
        record = self._epochs.newest if self._epochs.mode is Mode.JOINED else self._epochs.current
        round_, step = self._rounds.round, self._memory.state.step
        asks = self._memory.waiting or (round_ is not None and round_.step == step)
        if self._epochs.mode not in (Mode.RUN, Mode.JOINED) or record is None or not asks:
            return
        if not self.finished_peers or self._memory.state.generation != record.generation:
            return
        steps = {
            x.replica: self.finished_peers[x.process][1]
            for x in record.roster
            if self._has_finished(x.process)
        }
        first = min(steps.values(), default=step + 1)
        if step < first:
            return
        names = first_of([name for name, at in steps.items() if at == first])
        why = f"{names} finished at step {first}, and this loop has more steps to do"
        self._tell_members(why)
        # My state is the final state too, so no member has to wait for me.
        self._context.emit(io.SendLeader(m.Finished(record.fence, step, why)))
        self._context.stop(FAILED, f"{why}: {_ADVICE}")

    def _stop_when_left_behind(self) -> None:
        """Rule 12: stop if my loop has ended before I caught up, because only a running loop can replay."""
        if self._takes_part():
            return
        step, ahead = self._memory.state.step, self._step_of_the_others()
        if ahead is None:
            return
        why = f"its loop ended at step {step}, before it had caught up with the job, which is at step {ahead}"
        self._catch_up.cannot_catch_up(why)
        self._context.stop(FAILED, f"this replica cannot go on: {why}; {_ADVICE}")

    def _step_of_the_others(self) -> int | None:
        """The other members' step, if my state cannot get to it any more.

        A newcomer at the step of a round that others have entered is behind too: it does not end the job.
        """
        step, round_ = self._memory.state.step, self._rounds.round
        if self._epochs.mode is Mode.CATCH_UP:
            resume = self._epochs.resume if not self._catch_up.fetch.doing else None
            return resume.step if resume is not None else None
        if self._epochs.mode is Mode.RUN and self._epochs.current is not None:
            entered = [round_.step] if round_ is not None else []
            entered += [
                at
                for (epoch, at), events in self._epochs.links.early.items()
                if epoch == self._epochs.current.epoch
                and any(self._epochs.by_veteran(self._epochs.current, e) for e in events)
            ]
            if entered and max(entered) >= step:
                return max(entered)
        if self._epochs.mode in (Mode.RUN, Mode.JOINED):
            finished = [at for process, (_, at) in self.finished_peers.items() if self._has_finished(process)]
            if finished and max(finished) > step:
                return max(finished)
        return None

    def _tell_members(self, why: str = "") -> None:
        """Tell the members of each epoch once, when it is linked, that I have finished.

        A newcomer tells them only after another member has finished at the same step.
        """
        step = self._memory.state.step
        follows = any(at == step and self._has_finished(x) for x, (_, at) in self.finished_peers.items())
        if not (self._takes_part() or follows):
            return
        for record in self._records():
            if record.epoch not in self.notified_epochs:
                self.notified_epochs.add(record.epoch)
                self._context.to_members(record, m.Finished(record.fence, step, why))

    def end_deadline(self) -> float | None:
        """Rule 12: when I end alone, unless a leader marks the job complete first."""
        if not self._session.contact.finished:
            return None
        autonomy_end = self._session.contact.last + self._context.config.autonomy_s
        if self.all_finished_since < 0:
            return autonomy_end
        grace_s = LEADER_S if self._session.contact.connected else NO_LEADER_S
        return min(autonomy_end, self.all_finished_since + grace_s)

    def _end_alone_when_due(self) -> None:
        step, record = self._memory.state.step, self._epochs.current
        if self._epochs.mode is Mode.JOINED:
            record = self._epochs.newest  # a newcomer that enters no round can still reach the end
        everybody = record is not None and self._have_all_finished(record)
        if not everybody:
            self.all_finished_since = -1.0
        elif self.all_finished_since < 0:
            self.all_finished_since = self._context.now
        deadline = self.end_deadline()
        if deadline is None or self._context.now < deadline:
            return
        if record is not None and (everybody or self._takes_part()):
            why = (
                f"no lighthouse answered for {self._context.config.autonomy_s:g} s, and not all members have "
                f"said that they finished: this replica ends with its state of step {step}"
            )
            if everybody:
                names = ", ".join(x.replica for x in self._with_state(record))
                why = (
                    f"no lighthouse has marked the job complete; all members ({names}) "
                    f"have finished at step {step}, so it is, and the next lighthouse that is reached will "
                    "be told"
                )
            ended = JobEnd(record.fence, step, self._context.identity.incarnation)
            self._context.end(io.Finish(step, why, ended))
        else:
            why = "no lighthouse answered for autonomy_s, and the final state may be another than this one"
            self._context.stop(RESTART, why)

    def _have_all_finished(self, record: Record) -> bool:
        """Whether all members have finished with my state: no round needs the epoch that may be under way."""
        step, is_newcomer = self._memory.state.step, self._epochs.mode is Mode.JOINED
        if is_newcomer and self._memory.state.generation != record.generation:
            return False
        return (is_newcomer or self._takes_part()) and all(
            x.replica == self._context.replica
            or self.finished_peers.get(x.process) == (record.generation, step)
            for x in self._with_state(record)
        )

    def _with_state(self, record: Record) -> list[Member]:
        """The members that have a state: a newcomer in a blocking join has none before its first commit."""
        if self._rounds.committed_in >= record.epoch:
            return list(record.roster)
        return [x for x in record.roster if not x.blocking_join]
