"""Judges from the journals of all replicas whether a run kept the promises of the protocol.

Four checks, each on records that the replicas wrote independently:

- Agreement: all replicas that committed a step of a generation wrote the same gradient, contributions and
  metrics, and all states of a step have one digest.
- Plus one: the steps that a process commits rise by one (``walk``).
- Exactly once: each micro-batch of a step is in its gradient once, and its samples, as the contributors
listed
  them, are those of the data order.
- Nothing lost: every member of a round committed it, no step is missing, and all end with the same state.

Where the supervisor kept a log, no journal may be shorter than the supervisor saw it, and a process that it
killed must have stopped.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fabric.audit.journal import JournalLine, RecordedRun, ReplicaJournal, lines_of
from fabric.audit.replica_walk import walk
from fabric.audit.sample_order import DataOrder, StagedOrder
from fabric.audit.skips import SkippedSamples

# A state is (generation, step); a commit is (replica, generation, epoch, step).
StepKey = tuple[int, int]
RoundKey = tuple[str, int, int, int]

# The most sentences that the audit adds: one fault may show in many lines of a journal.
MAX_SENTENCES = 200
_WEIGHT_TOLERANCE = 1e-9
# For this many seconds after the recorded time of its kill, a killed process may still write lines.
_KILL_SLACK_S = 1.0


@dataclass(frozen=True, slots=True)
class SampleCount:
    """How the samples in the committed gradients differ from those of the data order."""

    skipped: int
    repeated: int


@dataclass(frozen=True, slots=True)
class Evidence:
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
        """Yield the lines of each process."""
        for journal in self.run.journals.values():
            yield from journal.incarnations()

    def starts(self) -> list[JournalLine]:
        """Return the start lines of all processes."""
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
    """Index the journals of ``run``."""
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
    for journal in evidence.run.journals.values():
        broken.extend(journal.broken)
        broken.extend(_lives(journal))
    broken.extend(_same_job(evidence))
    broken.extend(_agreement(evidence))
    broken.extend(_rosters(evidence))
    broken.extend(_exactly_once(evidence))
    broken.extend(_contributed(evidence))
    broken.extend(_nothing_lost(evidence))
    if is_over:
        broken.extend(_ends(evidence))
    broken.extend(_supervised(evidence.run))
    return list(dict.fromkeys(broken))[:MAX_SENTENCES]


def finished(lines: Sequence[JournalLine]) -> bool:
    """Whether this incarnation ended normally, after the last step."""
    return any(
        line.event == "finish" or (line.event == "stop" and line.integer("code") == 0) for line in lines
    )


def count_samples(evidence: Evidence) -> SampleCount:
    """Compare, step by step, the samples in the committed gradients with the data order."""
    order = evidence.order()
    if order is None:
        return SampleCount(0, 0)
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
    return SampleCount(skipped, repeated)


def digests_equal(evidence: Evidence) -> bool:
    """Whether all digests of one (generation, step) are equal, of gradients and of states."""
    for lines in evidence.commits.values():
        if len({line.text("gradient_digest") for line in lines}) > 1:
            return False
    # A process starts with generation 0, before the leader has chosen the base of all members.
    return all(
        generation == 0 or len({line.text("digest") for line in alike}) == 1
        for (generation, _), lines in evidence.states.items()
        for alike in _by_layout(lines)
    )


def _by_layout(lines: Sequence[JournalLine]) -> list[list[JournalLine]]:
    """The state lines by layout of ranks: only replicas of equal layouts have equal digests at rank 0."""
    alike: dict[object, list[JournalLine]] = {}
    for line in lines:
        alike.setdefault(line.fields.get("layout"), []).append(line)
    return list(alike.values())


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
    for group in groups:
        broken.extend(walk(group))
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


def _agreement(evidence: Evidence) -> list[str]:
    broken: list[str] = []
    for lines in evidence.commits.values():
        broken.extend(_differences(lines, _COMMIT_FIELDS))
    for (generation, _), lines in evidence.states.items():
        for alike in _by_layout(lines) if generation > 0 else ():
            broken.extend(_differences(alike, ("digest",)))
    return broken


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


def _nothing_lost(evidence: Evidence) -> list[str]:
    lineage = evidence.lineage()
    broken = [
        f"Step {step} was committed by no replica."
        for step in range(max(lineage, default=-1) + 1)
        if step not in lineage
    ]
    claims = {name: _claims(journal) for name, journal in evidence.run.journals.items()}
    for (generation, step), lines in evidence.commits.items():
        contributions = lines[0].fields["contributions"]
        for replica in lines[0].fields["members"]:
            claim = claims.get(replica)
            if claim is None:
                broken.append(f"{replica} is a member of step {step} and has no journal.")
            elif not contributions.get(replica):
                continue  # a newcomer's first round has no work of it: the others may commit without it
            elif (generation, step) not in claim.commits and step not in claim.excused:
                broken.append(f"{replica} is a member of step {step} and did not commit it.")
    return broken


@dataclass(frozen=True, slots=True)
class _JournalClaims:
    """The steps that a journal committed, and the steps that its processes need not have committed."""

    commits: frozenset[StepKey]
    excused: frozenset[int]


def _claims(journal: ReplicaJournal) -> _JournalClaims:
    """Read a journal once. A step is excused where a process ended or left just before its commit."""
    commits: set[StepKey] = set()
    excused: set[int] = set()
    for lines in journal.incarnations():
        position, generation = 0, 0
        for line in lines:
            if line.event == "join":
                # The process left the roster and fetched another state instead of committing that round.
                if line.integer("step") != position:
                    excused.add(position)
                position = line.integer("step")
            elif line.event == "commit":
                # A new generation ended the round of this process, perhaps after another member's commit.
                if line.integer("generation") > generation:
                    excused.add(position)
                generation = line.integer("generation")
                commits.add((generation, line.integer("step")))
                position = line.integer("step") + 1
        # Other members may commit the last round of a process that was drained, as of one that was killed.
        if not lines_of(lines, "finish"):
            excused.add(position)
    return _JournalClaims(frozenset(commits), frozenset(excused))


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
