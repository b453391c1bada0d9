"""The decision of a forced epoch: a pure function of its members' reports. Rule 5 of the leader.

Given the record of a forced epoch and the frozen report of every member, decide the step T at which they
resume, and each member's work. Every leader that sees the same reports decides the same.

The members commit the newest round only if *all* members that report it have prepared it. A prepared round is
a promise. So if one member has not prepared the round, no member, dead or alive, has committed it, and it is
redone. If all have prepared it, some member may have committed it, and committing is allowed. A disputed
round is an exception: no member can have committed it, and the result that is left may be wrong.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from fabric.model import Member, Record, Value
from fabric.protocol.messages.network import Assignment, Report, Resume
from fabric.protocol.rules.assignment import Work, hand_round, widened

# A reason names at most this many members, and counts the others.
_NAMED = 16


class Evict(Value):
    """The members to evict: reports of one step carry different digests, and these are the minority."""

    replicas: tuple[str, ...]
    reason: str
    state: bool = False  # whether the members' state is wrong too, not only the prepared gradient


class Undecidable(Value):
    """Members disagree, and no majority shows which result is right: the job stops rather than guess."""

    reason: str


Decision = Resume | Evict | Undecidable


def decide(record: Record, reports: Mapping[str, Report]) -> Decision:
    """Decide forced epoch ``record.epoch`` from the reports of all its members.

    Raise KeyError when a member's report is missing.
    """
    by_name = {m.replica: reports[m.replica] for m in record.roster}
    # The report of a newcomer that never held a state of this generation does not count.
    valid = {r: x for r, x in by_name.items() if x.state_generation == record.generation}
    if record.cold == record.epoch or not valid:
        # No member has begun this generation yet, so none can have committed a step in it. Each drops what
        # it has kept.
        return _undivided(record, record.base.step, record.roster, reason="cold start")
    split = _outvoted(record, valid) or _digest_split(record, valid)
    if split is not None:
        return split
    newest = max(max(x.step, x.round_step) if _counts(x, record) else x.step for x in valid.values())
    witnesses = _witnesses(record, valid, newest)
    if witnesses and all(_prepared(w, record, newest) for w in witnesses.values()):
        digests = {name: w.gradient_digest for name, w in witnesses.items()}
        split = _minority(record, valid, digests, f"the reduced gradient of step {newest}")
        if split is not None or not any(w.disputed for w in witnesses.values()):
            return split or _commit(record, witnesses, newest)
    return _redo(record, valid, newest)


def _undivided(
    record: Record, step: int, able: Sequence[Member], digest: str = "", reason: str = ""
) -> Resume:
    """Let the ``able`` divide ``step``, which no member has begun, when their loops come to it."""
    able = widened(record.sharing, record.roster, able) if able else ()
    names = {member.replica for member in able}
    idle = tuple(member.replica for member in record.roster if member.replica not in names)
    return Resume(record.fence, step, (), digest, reason, undivided=True, idle=idle)


def micro_batches_of(reports: Mapping[str, Report], step: int) -> int | None:
    """The number of micro-batches of ``step``; None where no member knows it, so that none has begun it."""
    return next((x.plan.micro_batches for x in reports.values() if x.plan.covers(step)), None)


def _counts(report: Report, record: Record) -> bool:
    """Whether the report's round is of this generation. Rounds of older generations do not count."""
    return report.round_epoch >= max(record.cold, 1)


def _prepared(report: Report, record: Record, step: int) -> bool:
    return report.prepared and _counts(report, record) and report.round_step == step


def _witnesses(record: Record, reports: Mapping[str, Report], step: int) -> dict[str, Report]:
    """The reporters in the roster of the newest epoch that had a round at ``step``.

    A report about an older round counts as not prepared.
    """
    entered = [x for x in reports.values() if _counts(x, record) and x.round_step == step]
    if not entered:
        return {}
    newest = max(entered, key=lambda x: x.round_epoch)
    return {
        name: x if x.round_epoch == newest.round_epoch else replace(x, prepared=False)
        for name, x in reports.items()
        if name not in newest.round_lacked
    }


def _commit(record: Record, witnesses: Mapping[str, Report], step: int) -> Resume:
    """Commit the newest round, which all its members have prepared, and go on with the next step."""
    names = sorted(witnesses)
    who = ", ".join(names) if len(names) <= _NAMED else f"{len(names)} members"
    able = [m for m in record.roster if m.replica in witnesses]
    digest = witnesses[names[0]].gradient_digest
    return _undivided(record, step + 1, able, digest, f"all of {who} have prepared step {step}")


def _redo(record: Record, reports: Mapping[str, Report], step: int) -> Resume:
    """Redo round ``step``. Members that can compute get the micro-batches that are in no kept gradient of it.

    No member gets poison.
    """
    digest = next((x.committed_digest for x in reports.values() if x.step == step), "")
    load: dict[str, int] = {}
    dropped: set[str] = set()
    taken: set[int] = set()
    for member in record.roster:
        report = reports.get(member.replica)
        if report is None:
            continue
        # A member can compute if its state is at ``step``, or will be at once.
        behind = report.step == step - 1 and _prepared(report, record, step - 1)
        if report.step != step and not (behind and digest and report.gradient_digest == digest):
            continue
        kept = set(report.have) if report.step == step else set()
        if kept & taken:
            # Two members computed this micro-batch, because one of them missed a table: the later member in
            # roster order drops its gradient.
            dropped.add(member.replica)
            kept = set()
        taken |= kept
        load[member.replica] = len(kept)
    able = [m for m in record.roster if m.replica in load]
    count = micro_batches_of(reports, step)
    if count is None:
        return _undivided(record, step, able, digest, f"step {step} is redone, and no member has begun it")
    missing = set(range(count)) - taken - record.poisoned(step)
    work = Work(count, record.sharing)
    extra = hand_round(work, record.roster, able, missing, load) if able else {}
    changed = sum(len(ids) for ids in extra.values())
    table = tuple(
        Assignment(m.replica, extra.get(m.replica, ()), drop=m.replica in dropped) for m in record.roster
    )
    reason = f"step {step} is redone, {changed} micro-batches change hands"
    return Resume(record.fence, step, table, digest, reason)


def _outvoted(record: Record, reports: Mapping[str, Report]) -> Evict | None:
    """Evict members whose state most members of a round called wrong, also if that majority has ended."""
    names = tuple(x.replica for x in record.roster if x.replica in reports and reports[x.replica].outvoted)
    if not names:
        return None
    step = reports[names[0]].step
    parted = _parted(reports, step)
    why = _disagrees(names, f"the state at step {step}")
    return Evict(names, f"{why}; {parted}" if parted else why, state=True)


def _digest_split(record: Record, reports: Mapping[str, Report]) -> Evict | Undecidable | None:
    cuts = {x.replica: x.cuts for x in record.roster}
    alike: dict[tuple[int, str], dict[str, str]] = {}  # (step, layout of ranks) -> digest -> its members
    for name, report in reports.items():
        if report.digest:
            alike.setdefault((report.step, cuts[name]), {})[name] = report.digest
    for (step, _), digests in sorted(alike.items()):
        parted = _parted(reports, step)
        # Where the members know what differs, they say what to do.
        advice = {"and_check": ""} if parted else {}
        split = _minority(record, reports, digests, f"the state at step {step}", **advice)
        if split is not None:
            split = replace(split, reason=f"{split.reason}; {parted}") if parted else split
            return replace(split, state=True) if isinstance(split, Evict) else split
    return None


def _parted(reports: Mapping[str, Report], step: int) -> str:
    """Return where the members' states differ at ``step``, if a member knows it."""
    return next((x.parted for x in reports.values() if x.parted and x.step == step), "")


def _minority(
    record: Record,
    reports: Mapping[str, Report],
    digests: Mapping[str, str],
    what: str,
    and_check: str = " and check these hosts' memory",
) -> Evict | Undecidable | None:
    """Evict the members that disagree with the majority.

    In a tie of more than two members the side with the shorter tenure goes. If the tenures are equal too, no
    member can tell which side is right. Of two members the newer one goes, unless a later state of it agreed
    with another member: then the fault came after its join, and may be on either side. ``and_check``: what to
    do beside a restart where no side is right.
    """
    counts = Counter(digests.values())
    if len(counts) <= 1:
        return None
    best, entered = max(counts.values()), {member.replica: member.since for member in record.roster}
    # Digest -> the epochs that admitted its members, the latest first; lower means longer tenure.
    tenures = {
        d: sorted((entered[name] for name, other in digests.items() if other == d), reverse=True)
        for d, count in counts.items()
        if count == best
    }
    longest = min(tenures.values())
    winners = [d for d, tenure in tenures.items() if tenure == longest]
    newest = _newest_of_two(record, digests)
    if newest and reports[newest].unconfirmed:
        (other,) = digests.keys() - {newest}
        since = f"was let in last, in epoch {entered[newest]}"
        why = (
            f"{newest} disagrees with {other} about {what}, and {since}, and has agreed with no member since"
        )
        return Evict((newest,), why)
    if len(digests) == 2 or len(winners) > 1:
        names = " and ".join(f"{name} ({digest[:8]})" for name, digest in sorted(digests.items()))
        return Undecidable(
            f"{names} disagree about {what} and no other member can tell which is right: "
            f"restart the job from a checkpoint{and_check}"
        )
    losers = tuple(name for name, digest in digests.items() if digest != winners[0])
    return Evict(losers, _disagrees(losers, what))


def _newest_of_two(record: Record, digests: Mapping[str, str]) -> str:
    """Of two members, the one that was admitted later; empty for more members, or for equal tenures."""
    entered = sorted((x.since, x.replica) for x in record.roster if x.replica in digests)
    return entered[1][1] if len(entered) == 2 and entered[0][0] < entered[1][0] else ""


def _disagrees(names: tuple[str, ...], what: str) -> str:
    verb = "disagrees" if len(names) == 1 else "disagree"
    return f"{', '.join(names)} {verb} with the majority about {what}"
