"""What a forced epoch goes on with: a pure function of its members' reports.

Given the record of a forced epoch and the frozen report of every member, answer at which step T they
resume and what each must still compute. Every leader that sees the same reports decides the same.

Why T = C + 1 needs *all* reporters of the newest round to hold: holding is a promise (who loses it exits),
so if one member of that round reports without holding, nobody can have left its commit barrier, dead or
alive, and the round is redone. If all of them hold, somebody may have committed, and committing is allowed.
Not so where one of them was told of another result before the round ended: then nobody can have committed it,
those who said so may be gone, and what is left may be the wrong one.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fabric.model import Record
from fabric.protocol.messages.network import Assignment, Report, Resume
from fabric.protocol.rules.assignment import Work, hand_round, share_out

# So many members are named in a reason, more are counted.
_NAMED = 16


@dataclass(frozen=True, slots=True)
class Evict:
    """Reports of the same step carry different digests: these members are the minority. ``state``: their
    state is wrong, not only what they were about to commit."""

    replicas: tuple[str, ...]
    reason: str
    state: bool = False


@dataclass(frozen=True, slots=True)
class Undecidable:
    """Two members disagree and no third can tell who is right: the job stops rather than guess."""

    reason: str


Decision = Resume | Evict | Undecidable


def decide(record: Record, reports: Mapping[str, Report], micro_batches: int) -> Decision:
    """The decision of forced epoch ``record.epoch`` from the reports of all its members.

    ``micro_batches`` is how many make a step. Raises KeyError when a member's report is missing.
    """
    work = Work(micro_batches, record.sharing)
    if record.cold == record.epoch:
        return _cold(record, work)
    by_name = {m.replica: reports[m.replica] for m in record.roster}
    # A newcomer that never held a state of this generation says nothing about it.
    valid = {r: x for r, x in by_name.items() if x.state_generation == record.generation}
    if not valid:
        # Nobody began this generation yet, so nobody can have committed in it.
        return _cold(record, work)
    split = _outvoted(record, valid) or _digest_split(record, valid)
    if split is not None:
        return split
    newest = max(_newest_step(x, record) for x in valid.values())
    witnesses = _witnesses(record, valid, newest)
    if witnesses and all(_holds(w, record, newest) for w in witnesses.values()):
        digests = {name: w.gradient_digest for name, w in witnesses.items()}
        split = _minority(record, valid, digests, f"the reduced gradient of step {newest}")
        if split is not None or not any(w.disputed for w in witnesses.values()):
            return split or _commit(record, witnesses, newest, work)
    return _redo(record, valid, newest, work)


def _cold(record: Record, work: Work) -> Resume:
    shares = share_out(work, record.roster, record.roster, record.poisoned(record.base.step))
    table = tuple(Assignment(name, ids, drop=True) for name, ids in shares.items())
    return Resume(record.fence, record.base.step, table, reason="cold start")


def _newest_step(report: Report, record: Record) -> int:
    return max(report.step, report.round_step) if _counts(report, record) else report.step


def _counts(report: Report, record: Record) -> bool:
    """Whether the report's round is of this generation: older rounds are void."""
    return report.round_epoch >= max(record.cold, 1)


def _holds(report: Report, record: Record, step: int) -> bool:
    return report.prepared and _counts(report, record) and report.round_step == step


def _witnesses(record: Record, reports: Mapping[str, Report], step: int) -> dict[str, Report]:
    """The reporters that belong to the roster of the newest epoch that had a round at ``step``.

    A report that stands for an older round than that one does not hold it, whatever else it holds.
    """
    entered = [x for x in reports.values() if _counts(x, record) and x.round_step == step]
    if not entered:
        return {}
    newest = max(entered, key=lambda x: x.round_epoch)
    names = _in_round(newest, record)
    return {
        name: x if x.round_epoch == newest.round_epoch else replace(x, prepared=False)
        for name, x in reports.items()
        if name in names
    }


def _in_round(report: Report, record: Record) -> frozenset[str]:
    """Which members of this epoch were in the round that the report stands for."""
    if report.round_lacked is None:
        return frozenset(report.round_roster)
    return frozenset(record.names) - frozenset(report.round_lacked)


def _commit(record: Record, witnesses: Mapping[str, Report], step: int, work: Work) -> Resume:
    """Everybody of the newest round holds it: they commit it and go on with the next step."""
    able = [m for m in record.roster if m.replica in witnesses]
    shares = share_out(work, record.roster, able, record.poisoned(step + 1))
    table = tuple(Assignment(m.replica, shares.get(m.replica, ())) for m in record.roster)
    digest = next(iter(witnesses.values())).gradient_digest
    names = sorted(witnesses)
    who = ", ".join(names) if len(names) <= _NAMED else f"{len(names)} members"
    reason = f"all of {who} hold step {step}"
    return Resume(record.fence, step + 1, table, digest, reason)


def _redo(record: Record, reports: Mapping[str, Report], step: int, work: Work) -> Resume:
    """Redo round ``step``: what nobody at that step has goes to those who can compute it, as the policy
    has it; a micro-batch that killed two goes to nobody."""
    digest = next((x.committed_digest for x in reports.values() if x.step == step), "")
    load: dict[str, int] = {}
    dropped: set[str] = set()
    taken: set[int] = set()
    for member in record.roster:
        report = reports.get(member.replica)
        if report is None or not _able(report, record, step, digest):
            continue
        mine = set(report.have) if report.step == step else set()
        if mine & taken:
            # Two members computed the same micro-batch (a table that one of them missed): the later in
            # roster order starts afresh.
            dropped.add(member.replica)
            mine = set()
        taken |= mine
        load[member.replica] = len(mine)
    able = [m for m in record.roster if m.replica in load]
    missing = set(range(work.micro_batches)) - taken - record.poisoned(step)
    extra = hand_round(work, record.roster, able, missing, load) if able else {}
    changed = sum(len(ids) for ids in extra.values())
    table = tuple(
        Assignment(m.replica, extra.get(m.replica, ()), drop=m.replica in dropped) for m in record.roster
    )
    reason = f"step {step} is redone, {changed} micro-batches change hands"
    return Resume(record.fence, step, table, digest, reason)


def _able(report: Report, record: Record, step: int, digest: str) -> bool:
    """Whether this member computes in the redone round: it is at ``step``, or gets there at once."""
    behind = report.step == step - 1 and _holds(report, record, step - 1)
    return report.step == step or (behind and bool(digest) and report.gradient_digest == digest)


def _outvoted(record: Record, reports: Mapping[str, Report]) -> Evict | None:
    """Whose state most members of a round have called wrong, whether these are still there or not."""
    names = tuple(x.replica for x in record.roster if x.replica in reports and reports[x.replica].outvoted)
    if not names:
        return None
    step = reports[names[0]].step
    return Evict(names, _disagrees(names, f"the state at step {step}"), state=True)


def _digest_split(record: Record, reports: Mapping[str, Report]) -> Evict | Undecidable | None:
    by_step: dict[int, dict[str, str]] = {}
    for name, report in reports.items():
        if report.digest:
            by_step.setdefault(report.step, {})[name] = report.digest
    for step, digests in sorted(by_step.items()):
        split = _minority(record, reports, digests, f"the state at step {step}")
        if split is not None:
            parted = next((x.parted for x in reports.values() if x.parted and x.step == step), "")
            split = replace(split, reason=f"{split.reason}; {parted}") if parted else split
            return replace(split, state=True) if isinstance(split, Evict) else split
    return None


def _minority(
    record: Record, reports: Mapping[str, Report], digests: Mapping[str, str], what: str
) -> Evict | Undecidable | None:
    """Who disagrees with the majority. A tie of more than two goes against the shorter tenure; where that
    is equal too, nobody can tell who is right. Of two the one goes that came last, unless it has agreed with
    another member since: then what parted them came later, and may be either's."""
    counts = Counter(digests.values())
    if len(counts) <= 1:
        return None
    best = max(counts.values())
    tenures = {d: _tenure(record, digests, d) for d, count in counts.items() if count == best}
    longest = min(tenures.values())
    winners = [d for d, tenure in tenures.items() if tenure == longest]
    newest = _newest_of_two(record, digests)
    if newest and reports[newest].unconfirmed:
        (other,) = digests.keys() - {newest}
        why = f"{newest} disagrees with {other} about {what}, and {_joined(record, newest)}"
        return Evict((newest,), why)
    if len(digests) == 2 or len(winners) > 1:
        names = " and ".join(f"{name} ({digest[:8]})" for name, digest in sorted(digests.items()))
        return Undecidable(
            f"{names} disagree about {what} and nobody else can tell who is right: "
            "restart the job from a checkpoint and check these hosts' memory"
        )
    losers = tuple(name for name, digest in digests.items() if digest != winners[0])
    return Evict(losers, _disagrees(losers, what))


def _newest_of_two(record: Record, digests: Mapping[str, str]) -> str:
    """Which of two members was let in after the other; empty where there are more, or both came at once."""
    entered = sorted((x.since, x.replica) for x in record.roster if x.replica in digests)
    return entered[1][1] if len(entered) == 2 and entered[0][0] < entered[1][0] else ""


def _joined(record: Record, name: str) -> str:
    since = next(x.since for x in record.roster if x.replica == name)
    return f"was let in last, in epoch {since}, and has not agreed with anybody since"


def _disagrees(names: tuple[str, ...], what: str) -> str:
    verb = "disagrees" if len(names) == 1 else "disagree"
    return f"{', '.join(names)} {verb} with the majority about {what}"


def _tenure(record: Record, digests: Mapping[str, str], digest: str) -> tuple[int, ...]:
    """When those with this digest were let in, the latest first: the lower, the longer they are here."""
    entered = {member.replica: member.since for member in record.roster}
    return tuple(sorted((entered[name] for name, found in digests.items() if found == digest), reverse=True))
