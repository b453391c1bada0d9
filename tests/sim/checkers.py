"""Checks the invariants of the protocol from outside: by what members apply, send and promise, and by the
store's records. The checkers never look into the cores to decide what is right.
"""

from collections import Counter
from typing import TYPE_CHECKING

from msgspec.structs import replace
from sim.server import FLIPPED

from fabric.model import EVERYTHING, Member, Record, Sharing
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages.rank_messages import addresses_by_rank, with_own
from fabric.protocol.messages.roster_delta import for_members
from fabric.protocol.rules.assignment import readers_of, waits_for_data

if TYPE_CHECKING:
    from sim.cold_checks import ColdStarts
    from sim.penalties import Penalties
    from sim.server import Gradient
    from sim.share_checks import ShareChecks
    from sim.trainer import Trainer


# A world of all faults needs far fewer epochs; a leader that wrote epochs without end would play for minutes.
MOST_EPOCHS = 1000


class Violation(AssertionError):
    """An invariant was broken; the message names the invariant and the process."""


def demand(condition: bool, broken: str) -> None:
    """Checks the effects of a core against facts that the core may rely on."""
    if not condition:
        raise Violation(broken)


class Checks:
    """The checks of a world, called by its parts; raises Violation at once."""

    has_equal_layouts = True  # whether rank k of each replica exchanges with rank k of the others

    def __init__(self, micro_batches: int, min_replicas: int, sharing: Sharing = EVERYTHING) -> None:
        self.sharing = sharing
        self.rank = 0  # the rank of the checked lane, in worlds of ranks
        self.skipped: Counter[tuple[int, int]] = (
            Counter()
        )  # (step, micro-batch) -> generations that left it out
        self.micro_batches = micro_batches
        self.min_replicas = min_replicas
        self.records: list[Record] = []
        self.by_epoch: dict[int, Record] = {}
        # The record of each epoch in which a process acts: a restored store gives a number to two rosters.
        self.told: dict[tuple[str, int], Record] = {}
        self.is_restored = False  # whether the store was put back, and no epoch leads above all others yet
        self.lost_generations: set[int] = set()  # those that a store was put back over
        # (generation, step) -> digest of the applied gradient
        self.gradients: dict[tuple[int, int], str] = {}
        self.states: dict[tuple[int, int], str] = {}
        self.commits: Counter[int] = Counter()  # generation -> distinct steps committed
        self.promises: dict[str, int] = {}  # process -> the newest epoch it reported for
        self.votes: dict[tuple[str, int, int], str] = {}
        self.entered: dict[tuple[str, int], int] = {}  # process -> the round that it reported as entered
        self.steps: dict[tuple[str, int], int] = {}
        self.newest = (0, 0)  # the (generation, step) of the newest commit
        self.leader = 0  # number of the newest election
        self.penalties: Penalties | None = None  # the checker of penalties, in worlds with penalties
        self.cold_starts: ColdStarts | None = None
        self.shares: ShareChecks | None = None  # the checker of shares, where shares follow speeds
        self.late: set[str] = set()  # processes that committed in an old generation
        self.decisions: dict[int, m.Resume] = {}
        # (generation, step) -> digest of the state to which the commit was applied
        self.grounds: dict[tuple[object, ...], str] = {}
        self.prepared_rounds: dict[str, tuple[int, int]] = {}  # process -> the newest round it voted in
        # process -> (epoch, step) -> the digest of each replica's state, by its vote
        self.heard: dict[str, dict[tuple[int, int], dict[str, str]]] = {}
        self.ends: dict[str, tuple[int, int]] = {}  # process -> (generation, step) at which its loop ended
        # whether a process has ended before the record said that the job is complete
        self.ended_alone = False
        # process -> the generation in which most members named another state
        self.outvoted: dict[str, int] = {}

    def micro_batches_at(self, step: int) -> int:
        """Return the number of micro-batches of ``step``."""
        return self.micro_batches

    # --- the store ---------------------------------------------------------------------------------

    def elected(self, revision: int) -> None:
        self.leader = revision

    def written(self, before: Record | None, after: Record, revision: int) -> None:
        """Check that a record follows from the record that it replaces, and that a deposed lighthouse changes
        nothing.
        """
        if revision != self.leader:
            raise Violation(
                f"epoch {after.epoch} was written by leader {revision} after {self.leader} was elected"
            )
        if after.complete and (after.generation, after.base.step) < self.newest:
            raise Violation(f"complete at step {after.base.step}, but {self.newest} was committed")
        # The leader writes the end of the job, and overrides for newcomers, without a new epoch.
        within = after.complete or bool(after.failed) or (before is not None and after.names == before.names)
        if self.is_restored and before is not None and after.epoch != before.epoch:
            before = self._above_a_restored_store(before, after)
        if before is not None and after.epoch not in (before.epoch + 1, before.epoch + (0 if within else 1)):
            raise Violation(f"epoch {after.epoch} was written over {before.epoch}")
        if after.epoch > MOST_EPOCHS:
            raise Violation(f"liveness: epochs follow each other without end ({after.reason})")
        if before is not None and before.complete:
            raise Violation("a record was written after the job was complete")
        if before is not None and after.generation != before.generation:
            self._begins_again(before, after, revision)
        self._is_a_roster(after)
        if before is not None and after.generation == before.generation:
            self._follows(before, after)
            self._let_in(before, after)
        if self.penalties is not None and before and (wrong := self.penalties.written(before, after)):
            raise Violation(wrong)
        if self.shares is not None and (wrong := self.shares.written(before, after)):
            raise Violation(wrong)
        if before is not None:
            self._forget_rounds(before, after)
        self.records.append(after)
        self.by_epoch[after.epoch] = after

    def restored(self, copy: Record) -> None:
        """The store holds an older ``copy`` of itself: the next epochs follow no record that it holds."""
        self.is_restored = True
        self.lost_generations.update(x.generation for x in self.records if x.generation > copy.generation)
        if self.penalties is not None:
            self.penalties.restored(copy)

    def _above_a_restored_store(self, before: Record, after: Record) -> Record | None:
        """Return ``before``, or None for the epoch that leads above all epochs that members know."""
        lost = self.by_epoch.get(after.epoch)  # an epoch of this number that the store has lost
        if lost is None or lost.roster != after.roster:  # else the same reports lead to the same decision
            self.decisions.pop(after.epoch, None)
        if after.epoch <= max(self.by_epoch):
            return before  # the leader has not heard yet of any member that knows more
        self.is_restored = False
        return None

    def _is_a_roster(self, record: Record) -> None:
        if not record.roster or len(set(record.names)) != len(record.names):
            raise Violation(f"epoch {record.epoch} has the roster {record.names}")
        if not any(not x.joining for x in record.roster):
            raise Violation(f"nobody in epoch {record.epoch} knows the job's state")

    def _forget_rounds(self, before: Record, after: Record) -> None:
        """Forget the rounds of evicted replicas, because an evicted replica comes back as a newcomer."""
        for x in before.roster:
            if not after.lists(x.replica, x.incarnation):
                self.entered.pop((x.replica, x.incarnation), None)

    def closed(self, trainer: "Trainer", generation: int) -> None:
        """Note that the user's loop of this trainer has ended."""
        self.ends[trainer.name] = (generation, trainer.main.step)

    def _begins_again(self, before: Record, after: Record, revision: int) -> None:
        begins = after.generation == before.generation + 1 and after.cold == after.epoch
        if not begins or not after.is_forced:
            raise Violation(f"generation {after.generation} does not begin with a cold forced epoch")
        if self.cold_starts is not None:
            self.cold_starts.began(before, after, revision)

    def over(self, trainer: "Trainer", order: io.Finish) -> None:
        """Check that a process ends as finished only when the job is complete, and with the final state if it
        was a member to the end.
        """
        record, step = self.records[-1], trainer.main.step
        if not record.complete:
            self._is_over_without_record(trainer, order)
            return
        if trainer.main.closing and self.ends[trainer.name] != (record.generation, record.base.step):
            at = self.ends[trainer.name]
            raise Violation(
                f"{trainer.name} ends as if all were well: its loop ended at {at}, the job elsewhere"
            )
        entry = record.member(trainer.host)
        took_part = entry is not None and entry.incarnation == trainer.incarnation and not entry.leaving
        if entry is None or not took_part or (entry.joining and not self._took_part(entry)):
            return
        if self.ended_alone and not trainer.main.closing:
            return  # the job ended while this member waited for a leader, so its loop ends too
        if step != record.base.step:
            raise Violation(
                f"the job is complete at step {record.base.step}, its {trainer.name} is at {step}"
            )

    def _said_finished(self, trainer: "Trainer", message: m.Finished) -> None:
        """Check that only a trainer whose loop has ended, or that gives up further steps, sends Finished."""
        at = (message.fence.generation, message.step)
        if self.ends.setdefault(trainer.name, at) != at or message.step != trainer.main.step:
            raise Violation(
                f"{trainer.name} says that it finished at {at}, with its state at {trainer.main.step}"
            )
        if not (message.why or trainer.main.closing):
            raise Violation(f"{trainer.name} says that it finished at {at}, and its loop has not ended")

    def _is_over_without_record(self, trainer: "Trainer", order: io.Finish) -> None:
        """Check an end without a complete record: all loops have ended at this step, or no lighthouse has
        answered for ``autonomy_s``.
        """
        self.ended_alone = True
        if self.rank:
            return  # rank 0 reports the end of the loop for all ranks
        mine, ended, core = self.ends.get(trainer.name), order.ended, trainer.core
        if ended is None or not order.alone:
            raise Violation(f"{trainer.name} ends at step {order.step}, and the job is not complete")
        if core.session.contact.last <= trainer.clock() - core.context.config.autonomy_s:
            return
        roster = [x for x in self.told[trainer.name, ended.fence.epoch].roster if not x.blocking_join]
        others = {f"{x.replica}.{x.incarnation}" for x in roster}
        wrong = sorted(name for name in others if self.ends.get(name) != mine)
        if wrong or mine != (ended.fence.generation, ended.step):
            raise Violation(f"{trainer.name} ends alone at {mine}, where the loops of {wrong} have not ended")

    def _needed(self, record: Record) -> int:
        return record.min_replicas or self.min_replicas

    def _let_in(self, before: Record, after: Record) -> None:
        """Check that no replica joins while joins are paused, or above the operator's maximum."""
        came = [x.replica for x in after.roster if not before.lists(x.replica, x.incarnation)]
        if came and after.overrides.paused:
            raise Violation(f"{came} joined in epoch {after.epoch} while joins were paused")
        if came and len(after.roster) > (after.overrides.max_replicas or len(after.roster)):
            raise Violation(
                f"{came} joined in epoch {after.epoch} above {after.overrides.max_replicas} replicas"
            )

    def paths(self, before: Record | None, after: Record) -> list[str]:
        """Return the rare paths to which this change of the record belongs."""
        found = []
        if len(after.roster) < self._needed(after) and not after.complete:
            found.append("path: parked")
        if waits_for_data(after.sharing, after.roster) and not after.complete:
            found.append("path: waits for data")
        if before is not None and after.fence == before.fence and not (after.complete or after.failed):
            found.append("orders: written within an epoch")
        if before is not None and after.is_forced and after.generation == before.generation:
            grows = len(after.roster) > len(before.roster)
            found += ["path: admitted while parked"] * (grows and len(before.roster) < self._needed(before))
            gone = [x for x in before.roster if after.member(x.replica) is None]
            found += ["path: two deaths share an epoch"] * (len(gone) > 1)
        return found

    def _follows(self, before: Record, after: Record) -> None:
        kept = [x for x in after.roster if before.lists(x.replica, x.incarnation)]
        if after.cold != before.cold:
            raise Violation("the epoch of the cold start changed within a generation")
        veterans = {x.replica for x in before.roster if not x.joining}
        if not any(x.replica in veterans or self._took_part(x) for x in kept):
            raise Violation(f"no member of epoch {before.epoch} that knows the state is in {after.epoch}")
        for x in after.roster:
            if not before.lists(x.replica, x.incarnation) and not x.joining:
                raise Violation(f"{x.replica} enters in epoch {after.epoch} without being fresh")
        if not after.is_forced:
            gone = [x for x in before.roster if not x.leaving and not after.lists(x.replica, x.incarnation)]
            if gone:
                raise Violation(
                    f"planned epoch {after.epoch} removes {gone[0].replica}, which was not leaving"
                )

    def _took_part(self, member: Member) -> bool:
        """Return whether the member entered a round, and had the round's state then or has it now."""
        key = (member.replica, member.incarnation)
        return self.steps.get(key, -1) >= self.entered.get(key, 10**9)

    def announced(self, record: Record) -> None:
        """Rule 1: check that the store has committed the announced record."""
        if for_members(record) not in map(for_members, self.records):
            raise Violation(f"epoch {record.epoch} was announced before the store had it")

    def announced_change(self, told: m.RosterDelta) -> None:
        """Rule 1: check that the store has committed the record to which an announced change leads."""
        ends_in = (told.record, told.after)
        if ends_in not in [(replace(for_members(r), roster=()), r.roster_digest) for r in self.records]:
            raise Violation(f"epoch {told.record.epoch} was announced before the store had it")

    def believed(self, trainer: "Trainer", record: Record) -> None:
        """Check that a member's epoch equals the store's record, whichever message brought it."""
        committed = [for_members(r) for r in self.records]
        if self.rank and self.has_equal_layouts:
            committed = [
                with_own(io.Switch(r), addresses_by_rank(r, self.rank + 1)[self.rank]).record
                for r in committed
            ]
        if for_members(record) not in committed:
            raise Violation(f"{trainer.name} believes in a roster {record.names} that nobody committed")
        self.told[trainer.name, record.epoch] = record

    def decided(self, resume: m.Resume) -> None:
        """Check that every leader decides the same, and that no committed step is lost."""
        epoch = resume.fence.epoch
        known = self.decisions.get(epoch)
        if known is not None and known != resume:
            raise Violation(f"epoch {epoch} was decided twice: {known}, then {resume}")
        if known is not None or self.records[-1].epoch != epoch:
            return  # a repeated decision, or one of a deposed leader that does not know of its deposition
        self.decisions[epoch] = resume
        generation, step = self.newest
        if resume.fence.generation == generation and resume.step < step:
            raise Violation(f"epoch {resume.fence.epoch} goes on at {resume.step}, but {step} was committed")
        reached = self.records[-1].base.step
        while (resume.fence.generation, reached) in self.gradients:
            reached += 1
        if resume.step > reached + 1:
            raise Violation(f"epoch {epoch} goes on at {resume.step}, but nobody came further than {reached}")

    # --- rounds ------------------------------------------------------------------------------------

    def said_to_peer(self, trainer: "Trainer", message: m.PeerMessage) -> None:
        """Fencing: check that only members of an epoch send messages in it, and none against its promise."""
        epoch, who = message.fence.epoch, trainer.name
        record = self.told.get((who, epoch))
        if record is None or not record.lists(trainer.host, trainer.incarnation):
            raise Violation(f"{who} speaks in epoch {epoch}, which does not list it")
        if epoch < self.promises.get(who, 0):
            raise Violation(f"{who} speaks in epoch {epoch} after its report for {self.promises[who]}")
        if isinstance(message, m.Finished):
            self._said_finished(trainer, message)
            return
        if len(record.roster) < self._needed(record):
            raise Violation(f"{who} works in epoch {epoch}, which needs {self._needed(record)} members")
        if isinstance(message, m.CommitVote):
            first = self.votes.setdefault((who, epoch, message.step), message.gradient_digest)
            if first != message.gradient_digest:
                raise Violation(f"{who} voted for two results of round {(epoch, message.step)}")
            self.prepared_rounds[who] = (epoch, message.step)
            self.heard_vote(trainer, trainer.host, message)

    def heard_vote(self, trainer: "Trainer", replica: str, vote: m.CommitVote) -> None:
        if vote.state_digest:
            rounds = self.heard.setdefault(trainer.name, {})
            rounds.setdefault((vote.fence.epoch, vote.step), {})[replica] = vote.state_digest

    def aborted(self, trainer: "Trainer", epoch: int, step: int) -> None:
        """Note whether the trainer leaves the round with the knowledge that most members have another
        state.
        """
        digests = self.heard.pop(trainer.name, {}).get((epoch, step), {})
        # Take the digest from the member's own vote, which covers all ranks of the replica.
        own, record = digests.get(trainer.host, ""), self.told[trainer.name, epoch]
        others = Counter(x for name, x in digests.items() if name != trainer.host and x != own)
        if own and others and 2 * max(others.values()) > len(record.roster):
            self.outvoted[trainer.name] = record.generation

    def healed(self, trainer: "Trainer") -> None:
        """Note that the trainer has loaded another state."""
        self.outvoted.pop(trainer.name, None)

    def running(self, trainer: "Trainer", message: m.Running) -> None:
        key = (trainer.host, trainer.incarnation)
        self.entered[key] = message.step
        self.steps[key] = trainer.main.step

    def reported(self, trainer: "Trainer", report: m.Report) -> None:
        """Note the promise of a report: its sender stays out of older epochs. Check that the report names the
        member's vote, which stands until a decision or an eviction.
        """
        who = trainer.name
        self.promises[who] = max(self.promises.get(who, 0), report.fence.epoch)
        voted = self.prepared_rounds.get(who)
        if (
            voted == (report.round_epoch, report.round_step)
            and report.step == voted[1]
            and not report.prepared
        ):
            raise Violation(f"{who} voted in round {voted}, and reports that it has not prepared it")

    def released(self, trainer: "Trainer") -> None:
        """Note that the trainer's prepared round is void, after a decision or an eviction."""
        self.prepared_rounds.pop(trainer.name, None)

    def gathered(self, trainer: "Trainer", order: io.StartExchange, content: tuple[int, ...]) -> None:
        """Check that the ring gets the gradient of the contribution.

        A stopped core sends no contribution, so its round cannot be committed.
        """
        if len(content) != order.weight and not trainer.main.will_stop:
            raise Violation(
                f"{trainer.name} contributes {content} to step {order.step} with weight {order.weight}"
            )

    # --- commits -----------------------------------------------------------------------------------

    def published(self, trainer: "Trainer", effect: io.Publish, gradient: "Gradient") -> None:
        if gradient.digest != effect.prepared.gradient_digest:
            raise Violation(f"{trainer.name} publishes another gradient than it prepared at {gradient.step}")
        self._is_committed(trainer, effect.prepared)
        if self.records[-1].generation != effect.generation:
            self._is_the_last_of_its_own(trainer, effect.prepared, effect.generation)

    def _is_committed(self, trainer: "Trainer", prepared: io.PreparedRound) -> None:
        """Return whether all members of the round have voted, or a decision resumes after it."""
        voters = {who for who, epoch, step in self.votes if (epoch, step) == (prepared.epoch, prepared.step)}
        named = any(x.step == prepared.step + 1 and x.commit_digest for x in self.decisions.values())
        if not voters or named:
            # the member was alone in its round, or in a lane without votes, or committed by a decision
            return
        roster = {f"{x.replica}.{x.incarnation}" for x in self.told[trainer.name, prepared.epoch].roster}
        missing = roster - voters - {trainer.name}
        if missing:
            raise Violation(f"{trainer.name} publishes step {prepared.step} before {sorted(missing)} voted")

    def applied(self, trainer: "Trainer", order: io.Apply, gradient: "Gradient", generation: int) -> None:
        """Check an applied step: agreement, plus one, exactly once, one generation at a time, nothing after
        the end.
        """
        who = trainer.name
        self._is_before_the_end(who, generation, order.step)
        if order.step != trainer.main.step or gradient.step != order.step:
            raise Violation(
                f"{who} applies step {gradient.step} as {order.step} with the state at {trainer.main.step}"
            )
        if order.prepared is not None:
            if self.outvoted.get(who) == generation:
                raise Violation(
                    f"{who} commits step {order.step} on a state that most members said was wrong"
                )
            if order.prepared.gradient_digest != gradient.digest:
                raise Violation(f"{who} held {order.prepared.gradient_digest}, but applies {gradient.digest}")
            self._is_of_one_roster(who, order, gradient)
            ground = self._ground(trainer, generation, order.step)
            said = self.grounds.setdefault(ground, trainer.main.said)
            if said and trainer.main.said and said != trainer.main.said:
                raise Violation(
                    f"{who} commits step {order.step} on state {trainer.main.said}, others on {said}"
                )
        counted = Counter(i for _, ids in gradient.parts for i in ids)
        micro_batches = self.micro_batches_at(order.step)
        wrong = [i for i in range(micro_batches) if counted[i] > 1]
        missing = [i for i in range(micro_batches) if not counted[i]]
        if order.prepared is not None:
            record = self.told[who, order.prepared.epoch]
            wrong += self._unexplained(record, order.step, gradient, missing)
        if wrong or set(counted) - set(range(micro_batches)):
            raise Violation(f"{who} applies step {order.step} made of {gradient.parts}: wrong for {wrong}")
        parts = tuple((name, tuple(sorted(ids))) for name, ids in gradient.parts)
        if order.prepared is not None and order.prepared.contributions != parts:
            raise Violation(f"{who} believes {order.prepared.contributions}, applies {gradient.parts}")
        known = self.gradients.setdefault((generation, order.step), gradient.digest)
        if known != gradient.digest:
            raise Violation(
                f"{who} applies {gradient.digest} at step {order.step} of generation {generation}, "
                f"others {known}"
            )
        if (generation, order.step + 1) > self.newest:
            self.newest = (generation, order.step + 1)
            self.commits[generation] += 1

    def _ground(self, trainer: "Trainer", generation: int, step: int) -> tuple[object, ...]:
        """Members whose states have equal digests at this step."""
        return generation, step

    def _is_before_the_end(self, who: str, generation: int, step: int) -> None:
        last = self.records[-1]
        if last.complete and (generation, step) >= (last.generation, last.base.step):
            raise Violation(f"{who} applies step {step} after the job was complete")
        if self.ends.get(who, (generation, step + 1)) <= (generation, step):
            raise Violation(f"{who} applies step {step} after it said that it had finished")

    def _is_the_last_of_its_own(
        self, trainer: "Trainer", prepared: io.PreparedRound, generation: int
    ) -> None:
        """A cold start waits for all processes that may still commit.

        A cold start does not wait for a process that was left out before, or was joining. Such a process may
        commit one past round for which its whole roster voted, and no further round.
        """
        who, key = trainer.name, (trainer.host, trainer.incarnation)
        last = next(r for r in reversed(self.records) if r.generation == generation)
        is_forgotten = last.store_id != self.records[-1].store_id or last.generation in self.lost_generations
        if is_forgotten and self.promises.get(who, 0) <= last.epoch:
            # This process does not know that the store was wiped, or put back to an older generation. Such a
            # store names no process to wait for.
            return
        awaited = any((x.replica, x.incarnation) == key and not x.joining for x in last.roster)
        roster = {f"{x.replica}.{x.incarnation}" for x in self.told[trainer.name, prepared.epoch].roster}
        voters = {
            name for name, epoch, step in self.votes if (epoch, step) == (prepared.epoch, prepared.step)
        }
        if awaited or who in self.late or (roster - voters - {who} and not self.rank):
            raise Violation(f"{who} commits in generation {generation} after a cold start without it")
        self.late.add(who)

    def _unexplained(self, record: Record, step: int, gradient: "Gradient", missing: list[int]) -> list[int]:
        """Return the part of ``missing`` that no record explains by poison or by an absent member."""
        poisoned = record.poisoned(step)
        self.skipped.update((step, i) for i in missing)
        left = [i for i in missing if i not in poisoned]
        sharing, data_slots = (
            self.sharing,
            max(self.sharing.data_slots, *(x.data_slot + 1 for x in record.roster)),
        )
        if sharing.policy == "constant" and (not sharing.readers or sharing.on_loss != "shrink"):
            return left
        contributing = {name for name, ids in gradient.parts if ids}
        there = {x.data_slot for x in record.roster if x.replica in contributing}
        total = self.micro_batches_at(step)
        sizes = [total // data_slots + (n < total % data_slots) for n in range(data_slots)]
        bounds = [sum(sizes[:n]) for n in range(data_slots + 1)]
        parts = {i: n for n in range(data_slots) for i in range(bounds[n], bounds[n + 1])}
        hosts = [{n} for n in range(data_slots)]
        if sharing.policy == "constant":
            # A part goes also to a member that must catch up first, if no other member can read it.
            there = {x.data_slot for x in record.roster}
            hosts = [set(readers_of(n, sharing)) for n in range(data_slots)]
        return [i for i in left if hosts[parts[i]] & there]

    def _is_of_one_roster(self, who: str, order: io.Apply, gradient: "Gradient") -> None:
        """Fencing: check that a round has exactly the members of its epoch's roster."""
        assert order.prepared is not None
        made_by = tuple(name for name, _ in gradient.parts)
        if made_by != self.told[who, order.prepared.epoch].names:
            raise Violation(
                f"{who} applies step {order.step} of epoch {order.prepared.epoch}, made by {made_by}"
            )

    def state(self, trainer: "Trainer", generation: int, step: int, digest: str) -> None:
        """Check that the members' states agree after every step."""
        self.steps[trainer.host, trainer.incarnation] = step
        if generation == 0 or FLIPPED in digest:
            return
        known = self.states.setdefault((generation, step), digest)
        if known != digest:
            raise Violation(
                f"{trainer.name} has state {digest} at step {step} of generation {generation}, others {known}"
            )
