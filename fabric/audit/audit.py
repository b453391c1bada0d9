"""Judges from the journals of all replicas whether a run kept the promises of the protocol.

Four checks, each on records that the replicas wrote independently:

- Agreement: all replicas that committed a step of a generation wrote the same gradient, contributions and
  metrics, and all states of a step have one digest.
- Plus one: the steps that a process commits rise by one (``walk``).
- Exactly once: each micro-batch of a step is in its gradient once, and its samples, as the contributors
  listed them, are those of the data order.
- Nothing lost: every member of a round committed it, no step is missing, and all end with the same state.

Where the supervisor kept a log, no journal may be shorter than the supervisor saw it, and a process that it
killed must have stopped.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from fabric.audit.journal import JournalLine, RecordedRun, ReplicaJournal, lines_of
from fabric.model import Value
from fabric.protocol.rules.spare import hosts_of

# Which samples belong to which micro-batch, recomputed from the documented rule alone.
#
# The data of a job is the concatenation of permutations of its dataset: pass k over it is
# ``numpy.random.Generator(numpy.random.PCG64([seed, k])).permutation(dataset_size)``. Step s takes the
# positions [s*G, (s+1)*G), and its micro-batch i takes the positions [i*m, (i+1)*m) of the step. The
# trainers have their own code for this rule; the audit verifies that both agree.
#
# Other kinds of data have other rules:
#
# - ``stream``: a sample is its position.
# - ``order`` (the digest of a sampler's order): the first replica that lists the samples of a micro-batch is
#   believed, and all others must list the same.
# - ``epoch_end``: a pass is a whole number of steps. Under "short" its last step has the samples that are
#   left, and a micro-batch may have fewer samples, or none. Under "drop" those samples are dropped.
# - ``shards``: the dataset and the micro-batches of a step are divided evenly among the shards. A micro-batch
#   draws only from its shard, in the shard's own order (``PCG64([seed, k, shard + 1])``).
# - ``sampler``: a pass is a whole number of steps.

# A run reads its passes in order, so two neighbouring passes are enough.
_CACHED_PASSES = 2


class DataOrder:
    """The data order of one job; ``data`` is the ``data`` field of a journal's ``start`` line."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.dataset_size = data["dataset_size"]
        self.global_batch_size = data["global_batch_size"]
        self.micro_batch_size = data["micro_batch_size"]
        self.micro_batches = data["micro_batches"]
        self.seed = data["seed"]
        self._passes: dict[int, NDArray[np.int64]] = {}
        self._learned: dict[tuple[int, int], list[int]] = {}

    def learn(self, step: int, micro_batch: int, samples: list[int]) -> None:
        """Believe the first list of a micro-batch's samples, where a sampler made the order."""
        if "order" in self.data:
            self._learned.setdefault((step - self.data.get("first_step", 0), micro_batch), samples)

    def samples(self, step: int, micro_batch: int) -> list[int]:
        """Return the dataset indices of micro-batch ``micro_batch`` of step ``step``, in order."""
        step -= self.data.get("first_step", 0)
        if "order" in self.data:
            return self._learned.get((step, micro_batch), [])
        if "shards" in self.data:
            return self._sharded(step, micro_batch)
        offset = micro_batch * self.micro_batch_size
        first, size = self._positions(step)
        return [self._at(first + i) for i in range(offset, min(offset + self.micro_batch_size, size))]

    def step_samples(self, step: int) -> list[int]:
        """Return the dataset indices of the whole global batch of step ``step``, in order."""
        return [i for number in range(self.micro_batches) for i in self.samples(step, number)]

    def _positions(self, step: int) -> tuple[int, int]:
        """Return the first position of a step, and how many it has."""
        if "epoch_end" not in self.data:
            return step * self.global_batch_size, self.global_batch_size
        steps, left = divmod(self.dataset_size, self.global_batch_size)
        is_short = left > 0 and self.data["epoch_end"] == "short"
        number, within = divmod(step, steps + is_short)
        first = number * self.dataset_size + within * self.global_batch_size
        return first, left if within == steps else self.global_batch_size

    def _sharded(self, step: int, micro_batch: int) -> list[int]:
        shards = self.data["shards"]
        size, larger = divmod(self.micro_batches, shards)
        counts = [size + (number < larger) for number in range(shards)]
        shard = next(n for n in range(shards) if micro_batch < sum(counts[: n + 1]))
        begin = shard * self.dataset_size // shards
        length = (shard + 1) * self.dataset_size // shards - begin
        number = step * counts[shard] + micro_batch - sum(counts[:shard])
        samples = []
        for position in range(number * self.micro_batch_size, (number + 1) * self.micro_batch_size):
            words = [self.seed, position // length, shard + 1]
            order = np.random.Generator(np.random.PCG64(words)).permutation(length)
            samples.append(begin + int(order[position % length]))
        return samples

    def _at(self, position: int) -> int:
        if "stream" in self.data:
            return position
        if "sampler" in self.data:
            step, within = divmod(position, self.global_batch_size)
            number, step = divmod(step, self.dataset_size // self.global_batch_size)
            offset = step * self.global_batch_size + within
        else:
            number, offset = divmod(position, self.dataset_size)
        if number not in self._passes:
            if len(self._passes) >= _CACHED_PASSES:
                del self._passes[min(self._passes)]
            generator = np.random.Generator(np.random.PCG64([self.seed, number]))
            self._passes[number] = generator.permutation(self.dataset_size)
        return int(self._passes[number][offset])


class StagedOrder:
    """The data order of a job whose loop changes its data: each stage begins at a step."""

    def __init__(self, first: Mapping[str, Any], later: Mapping[int, Mapping[str, Any]]) -> None:
        self._orders = [DataOrder(first), *(DataOrder(later[begin]) for begin in sorted(later))]
        self._begins = [0, *sorted(later)]

    def at(self, step: int) -> DataOrder:
        """Return the order of the stage that has ``step``."""
        return self._orders[bisect_right(self._begins, step) - 1]


# Two threads of a trainer write journal lines. The thread that reads the clock first may write second.
CLOCK_SLACK_S = 0.1


class ReplicaWalk(Struct):
    """The state of one incarnation after the lines read so far.

    ``next_step`` and ``generation`` are those of its state. ``due`` is the step whose state digest must come
    next, or None. ``epoch`` is the newest forced epoch, ``called`` the generation of that epoch, ``heard``
    the newest epoch of any kind. ``rounds`` holds the (generation, epoch, step) of its contributions.
    ``commits`` holds the (generation, step) of its commits, ``excused`` the steps that it need not have
    committed, because it ended or left just before. ``broken`` has a sentence for each broken rule.
    """

    next_step: int = 0
    due: int | None = None
    generation: int = 0
    epoch: int = 0
    called: int = 0
    heard: int = 0
    promised: int | None = None
    replayed: int = 0
    joining: bool = True  # whether it may replay steps: from its start, or from a leave, until it contributes
    decided: int = -1
    ended: bool = False
    rounds: set[tuple[int, int, int]] = field(default_factory=set)
    commits: set[tuple[int, int]] = field(default_factory=set)
    excused: set[int] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)


# Events whose lines may follow the end: a stop, and links of an epoch that connected just then. The network
# thread writes such lines, and the training state does not depend on them.
_AFTER_END = frozenset(("stop", "plane"))


def walk(lines: Sequence[JournalLine]) -> ReplicaWalk:
    """Judge the lines of one incarnation, which begin with its ``start``.

    The committed step rises by exactly one, from zero or from the step that a ``join`` fetched. The digest of
    the state follows every commit. A contribution is written once per round and before its commit. No line
    follows the end. A killed process may stop anywhere, a finished process may not. ``audit`` checks that
    replicas agree.
    """
    state = ReplicaWalk()
    broken = state.broken
    if lines[0].event != "start":
        broken.append(f"{lines[0].place} does not begin with a start line.")
    previous = lines[0]
    for line in lines:
        if line.incarnation != lines[0].incarnation:
            broken.append(f"{line.place} changes its incarnation without a start line.")
        if line.mono < previous.mono - CLOCK_SLACK_S:
            broken.append(f"{line.place} goes back in time by {previous.mono - line.mono:.3f} s.")
        if state.ended and line.event not in _AFTER_END:
            broken.append(f"{line.place} has a {line.event} line after its end.")
        rule = _RULES.get(line.event)
        if rule is not None:
            broken.extend(f"{line.place} {problem}." for problem in rule(state, line))
        previous = line
    # Other members may commit the last round of a process that was drained, as of one that was killed.
    if not lines_of(lines, "finish"):
        state.excused.add(state.next_step)
    return state


def _digested(state: ReplicaWalk) -> list[str]:
    """Report the digest that was due but is missing."""
    broken = [] if state.due is None else [f"has no digest of its state at step {state.due}"]
    state.due = None
    return broken


def _settled(state: ReplicaWalk) -> list[str]:
    """Report the digest or commit that was due but is missing."""
    broken = _digested(state)
    if state.promised is not None:
        broken.append(f"was to commit step {state.promised} and did not")
    state.promised = None
    return broken


def _ahead(state: ReplicaWalk, step: int) -> bool:
    """Whether ``step`` is one ahead: another thread has committed it, and its commit line must come next."""
    if step == state.next_step + 1:
        state.promised = state.next_step
        return True
    return False


def _contribute(state: ReplicaWalk, line: JournalLine) -> list[str]:
    broken = _settled(state)
    step = line.integer("step")
    if step != state.next_step:
        broken.append(f"contributes to step {step} while its state is at step {state.next_step}")
    state.joining = False
    key = (line.integer("generation"), line.integer("epoch"), step)
    if key in state.rounds:
        broken.append(f"contributes twice to the round of epoch {key[1]}, step {step}")
    state.rounds.add(key)
    ids = line.fields["micro_batches"]
    if len(set(ids)) != len(ids):
        broken.append(f"contributes a micro-batch of step {step} twice")
    return broken


def _commit(state: ReplicaWalk, line: JournalLine) -> list[str]:
    step, generation = line.integer("step"), line.integer("generation")
    decided = (state.decided, state.promised)  # committed before a later epoch came, its line written after
    if state.promised == step:
        state.promised = None
    broken = _settled(state)
    if step != state.next_step:
        broken.append(f"commits step {step} where step {state.next_step} had to follow")
    if generation < state.generation:
        broken.append(f"commits step {step} in generation {generation} after {state.generation}")
    if line.flag("replay") and line.flag("contributed"):
        broken.append(f"calls the commit of step {step} both contributed and a replay")
    if line.flag("replay"):
        state.replayed += 1
        if not state.joining:
            broken.append(f"replays step {step} without having been outside of the roster or behind")
    elif line.integer("epoch") < state.epoch and step not in decided:
        broken.append(f"commits step {step} in epoch {line.integer('epoch')} after {state.epoch}")
    # A new generation ended the round of this process, perhaps after another member's commit.
    if generation > state.generation:
        state.excused.add(state.next_step)
    state.commits.add((generation, step))
    state.generation = generation
    state.next_step = step + 1
    state.due = step + 1
    return broken


def _state(state: ReplicaWalk, line: JournalLine) -> list[str]:
    step = line.integer("step")
    if state.due == step:
        state.due = None
        return []
    # The state before a process begins or joins belongs to no generation: its script may have loaded it.
    if state.due is None and not line.integer("generation"):
        return []
    # A process may also record the state with which it starts or ends, or that it has fetched.
    if state.due is None and step == state.next_step:
        return []
    wanted = state.next_step if state.due is None else state.due
    return [f"records the state of step {step} where its state is at step {wanted}"]


def _join(state: ReplicaWalk, line: JournalLine) -> list[str]:
    broken, before = _settled(state), (state.next_step, state.generation)
    state.next_step, state.generation = line.integer("step"), line.integer("generation")
    if before != (state.next_step, state.generation):
        # The process left the roster and fetched another state instead of committing that round.
        state.excused.add(before[0])
    state.replayed = 0
    state.joining = True
    return broken


def _joined(state: ReplicaWalk, line: JournalLine) -> list[str]:
    broken = _digested(state)  # a promised commit comes next: the main thread writes both lines
    step, replayed = line.integer("step"), line.fields.get("replayed", state.replayed)
    if step != state.next_step:
        broken.append(f"joins at step {step} with the state of step {state.next_step}")
    if replayed != state.replayed:
        broken.append(f"says that it replayed {replayed} steps and recorded {state.replayed}")
    # A replica that is evicted again may return with its own state, without a fetch.
    state.replayed = 0
    state.joining = False
    return broken


def _epoch(state: ReplicaWalk, line: JournalLine) -> list[str]:
    epoch = line.integer("epoch")
    # Links of one epoch may connect more than once, and each connection writes a line.
    if epoch < state.heard:
        return [f"hears of epoch {epoch} after epoch {state.heard}"]
    state.heard = epoch
    # After a planned epoch is announced, rounds of the earlier epoch still commit; a forced epoch ends them.
    if line.flag("forced"):
        state.epoch, state.called = epoch, line.fields.get("generation", 0)
    return []


def _abort(state: ReplicaWalk, line: JournalLine) -> list[str]:
    step = line.integer("step")
    if step != state.next_step and not _ahead(state, step):
        return [f"aborts a round of step {step} with the state of step {state.next_step}"]
    return []


def _resume(state: ReplicaWalk, line: JournalLine) -> list[str]:
    step = line.integer("step")
    # One step ahead, the process commits the round that it has prepared. Further ahead, it catches up.
    if step > state.next_step:
        state.decided = state.next_step
        state.joining = True
    if step < state.next_step and state.called > state.generation:
        state.joining = True  # a cold start whose base differs from the state of this process
    elif step < state.next_step:
        return [f"is told to go on at step {step} with the state of step {state.next_step}"]
    return []


def _outside(state: ReplicaWalk, line: JournalLine) -> list[str]:
    """Take the eviction of a live process: its state is valid, so it replays missed steps and joins again."""
    _ahead(state, line.integer("step"))
    state.joining = True
    return []


def _finish(state: ReplicaWalk, line: JournalLine) -> list[str]:
    broken = _settled(state)
    if line.integer("step") != state.next_step:
        broken.append(f"finishes at step {line.integer('step')} with step {state.next_step}")
    state.ended = True
    return broken


def _stop(state: ReplicaWalk, line: JournalLine) -> list[str]:
    state.ended = True
    return []


_RULES: Mapping[str, Callable[[ReplicaWalk, JournalLine], list[str]]] = {
    "contribute": _contribute,
    "commit": _commit,
    "state": _state,
    "join": _join,
    "joined": _joined,
    "epoch": _epoch,
    "abort": _abort,
    "resume": _resume,
    "outside": _outside,
    "finish": _finish,
    "stop": _stop,
}


class SkippedSamples:
    """The reasons that the journals of one run give.

    There are two reasons. Poison: two processes died at a micro-batch, and the record excludes it. Data
    slots: under policy ``shrink`` a part of the batch belongs to one data slot, and data that only some
    replicas can read belongs to their slots. It is left out if no replica with such a slot contributed. The
    commit itself must list every skipped micro-batch.
    """

    def __init__(self, run: RecordedRun, order: StagedOrder) -> None:
        data = order.at(0).data
        self._poison: set[tuple[int, int]] = set()  # (step, micro-batch) of each poisoned micro-batch
        self._seats: dict[int, Mapping[str, int]] = {}  # epoch -> replica -> data slot
        self._policy = data.get("policy", "constant")
        self._readers = _integer(data, "redundancy")
        self._waits = data.get("on_loss", "shrink") != "shrink"
        self._count = _integer(data, "data_slots")
        self._order = order
        for journal in run.journals.values():
            for line in lines_of(journal.lines, "epoch"):
                self._seats[line.integer("epoch")] = line.fields.get("data_slots") or {}
            for line in lines_of(journal.lines, "poison"):
                step = line.integer("step")
                self._poison |= {(step, i) for i in line.fields["micro_batches"]}

    def unexplained(self, commit: JournalLine, missing: Iterable[int]) -> list[str]:
        """Return a sentence for every micro-batch of ``missing`` that ``commit`` omits without a reason."""
        step, recorded = commit.integer("step"), set(commit.fields.get("skipped", ()))
        broken = []
        for micro_batch in sorted(missing):
            if micro_batch not in recorded:
                broken.append(f"Micro-batch {micro_batch} of step {step} is counted 0 times.")
            elif (step, micro_batch) not in self._poison and not self._nobody_there(commit, micro_batch):
                broken.append(f"Micro-batch {micro_batch} of step {step} is skipped without a reason.")
        counted = {i for ids in commit.fields["contributions"].values() for i in ids}
        broken += [
            f"Micro-batch {i} of step {step} is counted and recorded as skipped."
            for i in sorted(recorded & counted)
        ]
        return broken

    def _nobody_there(self, commit: JournalLine, micro_batch: int) -> bool:
        """Whether no replica that may compute the micro-batch contributed to this commit."""
        if self._policy != "shrink" and (not self._readers or self._waits):
            return False
        data_slots = self._seats.get(commit.integer("epoch"), {})
        there = {data_slots.get(name, -1) for name, ids in commit.fields["contributions"].items() if ids}
        count = max(self._count, *(data_slot + 1 for data_slot in data_slots.values()), 1)
        # The micro-batches are divided into even parts, the larger parts first.
        size, larger = divmod(self._order.at(commit.integer("step")).micro_batches, count)
        after = micro_batch - larger * (size + 1)
        home = micro_batch // (size + 1) if after < 0 else larger + after // size
        hosts = hosts_of(home, count, self._readers) if self._policy == "constant" else (home,)
        return there.isdisjoint(hosts)


def _integer(data: Mapping[str, object], name: str) -> int:
    value = data.get(name, 0)
    return value if isinstance(value, int) else 0


# A state is (generation, step); a commit is (replica, generation, epoch, step).
StepKey = tuple[int, int]
RoundKey = tuple[str, int, int, int]

# The most sentences that the audit adds: one fault may show in many lines of a journal.
MAX_SENTENCES = 200
_WEIGHT_TOLERANCE = 1e-9
# For this many seconds after the recorded time of its kill, a killed process may still write lines.
_KILL_SLACK_S = 1.0


class Evidence(Value):
    """The journals of a run, indexed for the checks above."""

    run: RecordedRun
    commits: Mapping[StepKey, Sequence[JournalLine]]
    states: Mapping[StepKey, Sequence[JournalLine]]
    contributions: Mapping[RoundKey, Sequence[JournalLine]]

    def lineage(self) -> dict[int, JournalLine]:
        """For every step, one commit of its newest generation."""
        newest: dict[int, JournalLine] = {}
        for (_, step), lines in sorted(self.commits.items()):
            newest[step] = lines[0]
        return dict(sorted(newest.items()))

    def lives(self) -> Iterator[tuple[JournalLine, ...]]:
        for journal in self.run.journals.values():
            yield from journal.incarnations()

    def starts(self) -> list[JournalLine]:
        return [line for x in self.run.journals.values() for line in lines_of(x.lines, "start")]

    def order(self) -> StagedOrder | None:
        """Return the data order, from the first start line; None where there is none.

        A loop that reads its own data has an order that no journal knows.
        """
        journals, starts = self.run.journals.values(), self.starts()
        if not starts or "dataset_size" not in starts[0].fields["data"]:
            return None
        changes = (line for journal in journals for line in lines_of(journal.lines, "data"))
        order = StagedOrder(starts[0].fields["data"], {x.integer("step"): x.fields["data"] for x in changes})
        for lines in self.contributions.values():
            for listed in lines:
                step = listed.integer("step")
                for micro_batch, samples in listed.fields["samples"].items():
                    order.at(step).learn(step, int(micro_batch), samples)
        return order


def gather(run: RecordedRun) -> Evidence:
    commits: dict[StepKey, list[JournalLine]] = {}
    states: dict[StepKey, list[JournalLine]] = {}
    contributions: dict[RoundKey, list[JournalLine]] = {}
    for journal in run.journals.values():
        for line in lines_of(journal.lines, "commit", "state", "contribute"):
            generation, step = line.integer("generation"), line.integer("step")
            if line.event == "commit":
                commits.setdefault((generation, step), []).append(line)
            elif line.event == "state":
                states.setdefault((generation, step), []).append(line)
            else:
                key = (line.replica, generation, line.integer("epoch"), step)
                contributions.setdefault(key, []).append(line)
    return Evidence(run, commits, states, contributions)


def audit(evidence: Evidence, *, is_over: bool = True) -> list[str]:
    """Return a sentence for every broken promise; empty when the run kept all promises.

    ``is_over``: the job has ended, so every replica must have finished.
    """
    broken: list[str] = []
    walks: dict[str, list[ReplicaWalk]] = {}
    for name, journal in evidence.run.journals.items():
        walks[name] = [walk(group) for group in journal.incarnations()]
        broken.extend(journal.broken)
        broken.extend(_lives(journal))
        broken.extend(sentence for life in walks[name] for sentence in life.broken)
    broken.extend(_same_job(evidence))
    commits = evidence.commits.values()
    broken.extend(x for lines in commits for x in _differences(lines, _COMMIT_FIELDS))
    broken.extend(_unequal_states(evidence))
    broken.extend(_rosters(evidence))
    broken.extend(_exactly_once(evidence))
    broken.extend(_contributed(evidence))
    broken.extend(_nothing_lost(evidence, walks))
    if is_over:
        broken.extend(_ends(evidence))
    broken.extend(_supervised(evidence.run))
    return list(dict.fromkeys(broken))[:MAX_SENTENCES]


def finished(lines: Sequence[JournalLine]) -> bool:
    """Whether this incarnation ended normally, after the last step."""
    return any(
        line.event == "finish" or (line.event == "stop" and line.integer("code") == 0) for line in lines
    )


def count_samples(evidence: Evidence) -> tuple[int, int]:
    """Count the samples of the data order that the committed gradients lack, and those that repeat."""
    order = evidence.order()
    if order is None:
        return 0, 0
    skipped = repeated = 0
    lineage = evidence.lineage()
    for step in range(max(lineage, default=-1) + 1):
        expected = Counter(order.at(step).step_samples(step))
        counted: Counter[int] = Counter()
        if step in lineage:
            for replica, ids in lineage[step].fields["contributions"].items():
                samples = _samples_of(evidence, replica, lineage[step])
                for micro_batch in ids:
                    counted.update(samples.get(micro_batch, ()))
        skipped += (expected - counted).total()
        repeated += (counted - expected).total()
    return skipped, repeated


def digests_equal(evidence: Evidence) -> bool:
    """Whether all digests of one (generation, step) are equal, of gradients and of states."""
    commits = evidence.commits.values()
    gradients = next((x for lines in commits for x in _differences(lines, ("gradient_digest",))), "")
    return not gradients and next(_unequal_states(evidence), None) is None


def _unequal_states(evidence: Evidence) -> Iterator[str]:
    """Find states of one step with several digests: those of equal layouts of ranks are equal at rank 0."""
    for (generation, _), lines in evidence.states.items():
        alike: dict[object, list[JournalLine]] = {}
        # A process starts with generation 0, before the leader has chosen the base of all members.
        for line in lines if generation > 0 else ():
            alike.setdefault(line.fields.get("layout"), []).append(line)
        for same in alike.values():
            yield from _differences(same, ("digest",))


def _lives(journal: ReplicaJournal) -> list[str]:
    broken: list[str] = []
    groups = journal.incarnations()
    newest = -1
    for group in groups:
        first = group[0]
        # A host whose clock is behind may start a process that is refused before its first step.
        if first.incarnation == newest or (first.incarnation < newest and lines_of(group, "commit")):
            broken.append(f"{first.place} does not have a higher incarnation than before.")
        newest = max(newest, first.incarnation)
    for earlier, later in pairwise(groups):
        if later[0].mono < earlier[-1].mono:
            broken.append(f"{later[0].place} starts before the process before it ended.")
    return broken


def _same_job(evidence: Evidence) -> list[str]:
    seen: dict[str, JournalLine] = {}
    changes: dict[int, JournalLine] = {}
    broken: list[str] = []
    for journal in evidence.run.journals.values():
        for line in lines_of(journal.lines, "start"):
            for name in ("data", "layout", "job"):
                first = seen.setdefault(name, line)
                if first.fields.get(name) != line.fields.get(name):
                    broken.append(f"{line.place} has another {name} than {first.place}.")
        for line in lines_of(journal.lines, "data"):
            first = changes.setdefault(line.integer("step"), line)
            if first.fields["data"] != line.fields["data"]:
                broken.append(f"{line.place} changes to other data than {first.place}.")
    return broken


def _differences(lines: Sequence[JournalLine], names: Sequence[str]) -> list[str]:
    first = lines[0]
    return [
        f"{line.place} and {first.place} disagree on the {name.replace('_', ' ')} of "
        f"{line.event} step {line.integer('step')}."
        for line in lines[1:]
        for name in names
        if line.fields.get(name) != first.fields.get(name)
    ]


_COMMIT_FIELDS = ("epoch", "gradient_digest", "contributions", "weight", "metrics", "members", "skipped")


def _rosters(evidence: Evidence) -> list[str]:
    """Check that all journals have the same record of an epoch, and only its members took part in rounds."""
    broken: list[str] = []
    records: dict[tuple[int, int], list[JournalLine]] = {}
    decisions: dict[int, list[JournalLine]] = {}
    for journal in evidence.run.journals.values():
        for line in lines_of(journal.lines, "epoch", "resume"):
            if line.event == "resume":
                decisions.setdefault(line.integer("epoch"), []).append(line)
                continue
            key = (line.integer("generation"), line.integer("epoch"))
            records.setdefault(key, []).append(line)
    for lines in records.values():
        broken.extend(_differences(lines, ("roster", "forced")))
    for lines in decisions.values():
        broken.extend(_differences(lines, ("step",)))
    for (generation, step), committed in evidence.commits.items():
        line = committed[0]
        members = line.fields["members"]
        record = records.get((generation, line.integer("epoch")))
        if record is not None and set(members) != set(record[0].fields["roster"]):
            broken.append(f"{line.place} commits step {step} with others than its epoch lists.")
        broken.extend(
            f"{line.place} counts {replica} in step {step}, of which it is no member."
            for replica in sorted(set(line.fields["contributions"]) - set(members))
        )
    return broken


def _samples_of(evidence: Evidence, replica: str, commit: JournalLine) -> dict[int, list[int]]:
    """Return the samples that ``replica`` listed for the step of ``commit``, by micro-batch.

    All rounds of the step count, because a gradient kept from an aborted round was listed in that round.
    """
    generation, step = commit.integer("generation"), commit.integer("step")
    samples: dict[int, list[int]] = {}
    for epoch in range(commit.integer("epoch") + 1):
        for line in evidence.contributions.get((replica, generation, epoch, step), ()):
            samples.update({int(key): ids for key, ids in line.fields["samples"].items()})
    return samples


def _exactly_once(evidence: Evidence) -> list[str]:
    broken: list[str] = []
    order, starts = evidence.order(), evidence.starts()
    if not starts:
        return ["No journal has a start line that says what data the run was about."]
    skips = SkippedSamples(evidence.run, order) if order is not None else None
    for step, commit in evidence.lineage().items():
        counted = Counter(
            micro_batch for ids in commit.fields["contributions"].values() for micro_batch in ids
        )
        number = starts[0].fields["data"]["micro_batches"] if order is None else order.at(step).micro_batches
        broken.extend(
            f"Micro-batch {micro_batch} of step {step} is counted {times} times."
            for micro_batch, times in counted.items()
            if times > (0 <= micro_batch < number)
        )
        if order is None or skips is None:
            continue  # each replica reads its own data, so nothing says which samples are missing
        missing = [i for i in range(order.at(step).micro_batches) if not counted[i]]
        broken.extend(skips.unexplained(commit, missing))
    if order is not None:
        listed = (line for lines in evidence.contributions.values() for line in lines)
        broken.extend(x for line in listed for x in _prescribed(order.at(line.integer("step")), line))
    return broken


def _prescribed(order: DataOrder, line: JournalLine) -> list[str]:
    step = line.integer("step")
    listed = {int(key): ids for key, ids in line.fields["samples"].items()}
    outside = set(listed) - set(line.fields["micro_batches"])
    broken = [f"{line.place} lists samples of {i}, which it did not compute." for i in sorted(outside)]
    for micro_batch, ids in listed.items():
        if micro_batch >= order.micro_batches:
            broken.append(f"{line.place} names micro-batch {micro_batch}, which does not exist.")
        elif ids != order.samples(step, micro_batch):
            broken.append(
                f"{line.place} took other samples for micro-batch {micro_batch} of step {step} than "
                "the data order prescribes."
            )
    return broken


def _contributed(evidence: Evidence) -> list[str]:
    """Check that a commit counts for each replica exactly the contribution that the replica listed before."""
    broken: list[str] = []
    lists_samples = evidence.order() is not None
    for (generation, step), lines in evidence.commits.items():
        commit = lines[0]
        total = 0.0
        for replica, ids in commit.fields["contributions"].items():
            if not ids:
                continue
            epoch = commit.integer("epoch")
            written = evidence.contributions.get((replica, generation, epoch, step), ())
            if not written:
                broken.append(f"{replica} is counted in step {step} and did not record its part.")
                continue
            total += written[-1].number_of("weight")
            if sorted(written[-1].fields["micro_batches"]) != sorted(ids):
                broken.append(f"{replica} recorded other micro-batches of step {step} than counted.")
            if lists_samples and set(ids) - set(_samples_of(evidence, replica, commit)):
                broken.append(f"{replica} did not record all samples of its part of step {step}.")
        weight = commit.number_of("weight")
        if abs(total - weight) > _WEIGHT_TOLERANCE * max(abs(total), abs(weight)):
            broken.append(f"Step {step} weighs {weight}, its recorded contributions {total}.")
    return broken


def _nothing_lost(evidence: Evidence, walks: Mapping[str, Sequence[ReplicaWalk]]) -> list[str]:
    lineage = evidence.lineage()
    broken = [
        f"Step {step} was committed by no replica."
        for step in range(max(lineage, default=-1) + 1)
        if step not in lineage
    ]
    for (generation, step), lines in evidence.commits.items():
        contributions = lines[0].fields["contributions"]
        for replica in lines[0].fields["members"]:
            if replica not in walks:
                broken.append(f"{replica} is a member of step {step} and has no journal.")
            elif not contributions.get(replica):
                continue  # a newcomer's first round has no work of it: the others may commit without it
            elif not any((generation, step) in x.commits or step in x.excused for x in walks[replica]):
                broken.append(f"{replica} is a member of step {step} and did not commit it.")
    return broken


def _ends(evidence: Evidence) -> list[str]:
    broken: list[str] = []
    last: dict[str, JournalLine] = {}
    for replica, journal in evidence.run.journals.items():
        groups = journal.incarnations()
        if not groups or not finished(groups[-1]):
            broken.append(f"{replica} did not finish.")
            continue
        # A process that starts after the end of the job must end without further steps. A drained replica may
        # come back.
        ends = [i for i, group in enumerate(groups) if lines_of(group, "finish")]
        broken.extend(
            f"{replica} has a second process that trained after it finished."
            for end in ends[:1]
            for group in groups[end + 1 :]
            if lines_of(group, "commit")
        )
        for line in lines_of(groups[-1], "finish"):
            last[replica] = line
    lineage = evidence.lineage()
    end = max(lineage, default=-1) + 1
    # A replica that was catching up when the others finished may end at an earlier step.
    members = lineage[end - 1].fields["members"] if end else ()
    broken.extend(
        f"{replica} finished at step {line.integer('step')}, the run at step {end}."
        for replica, line in last.items()
        if line.integer("step") != end and (replica in members or line.integer("step") > end)
    )
    return broken


def absent(evidence: Evidence) -> list[str]:
    """Return the replicas of which no process held the final state."""
    end = max(evidence.lineage(), default=-1) + 1
    return sorted(
        replica
        for replica, journal in evidence.run.journals.items()
        if not any(line.integer("step") + 1 == end for line in lines_of(journal.lines, "commit"))
        and not any(line.integer("step") == end for line in lines_of(journal.lines, "state"))
    )


def _supervised(run: RecordedRun) -> list[str]:
    """Compare the journals with the supervisor's log of them."""
    broken: list[str] = []
    for event in run.supervisor:
        replica = str(event.get("replica", ""))
        journal = run.journals.get(replica)
        groups = journal.incarnations() if journal is not None else ()
        if event["event"] == "journal":
            wanted, lines = event.get("lines"), [len(group) for group in groups]
            if wanted != lines:
                broken.append(
                    f"The supervisor saw {wanted} lines from the processes of {replica}, its journal "
                    f"has {lines}."
                )
        elif event["event"] == "kill":
            broken.extend(_killed(replica, event.get("pid"), float(event["t"]), groups))
    return broken


def _killed(replica: str, pid: object, t: float, groups: Sequence[Sequence[JournalLine]]) -> list[str]:
    for group in groups:
        # The kernel may give the pid to a new process; the killed process had started before the kill.
        if group[0].fields.get("pid") != pid or group[0].t > t:
            continue
        if finished(group) or group[-1].t > t + _KILL_SLACK_S:
            return [f"{replica} was killed and its process {pid} went on."]
        return []
    return [f"{replica} was killed and its journal does not know process {pid}."]
