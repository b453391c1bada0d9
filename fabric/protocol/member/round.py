"""One round (epoch, step): collects contributions and votes until it is prepared, then committed.

Prepared: my reduction is finished, and every member's contribution is here. Committed: every member of the
roster has voted, and the digests of all votes are equal. Rules 1 to 3 of a member.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fabric.model import Record
from fabric.protocol.messages.member_events import PreparedRound
from fabric.protocol.messages.network import CommitVote, Contribution
from fabric.protocol.rules.divergence import differences


@dataclass(slots=True)
class Round:
    """State of one round at one member."""

    record: Record
    step: int
    share: tuple[int, ...] = ()  # the micro-batches that this member still has to compute
    contributed: bool = False
    exchanging: bool = False
    begun: float = -1.0  # the time when every member had contributed, and no member was catching up
    tested_at: float = math.inf  # when this member tested its links with a message of LARGE_BYTES
    gradient_digest: str = ""
    nonfinite: str = ""  # as ``nonfinite`` in Exchanged
    nonfinite_input: str = ""
    ready_record: Record | None = None
    contributions: dict[str, Contribution] = field(default_factory=dict)
    votes: dict[str, CommitVote] = field(default_factory=dict)

    def prepared(self) -> PreparedRound | None:
        """The prepared round, or None before the reduction is done and all contributions are here."""
        names = self.record.names
        complete = len(self.contributions) >= len(names) and all(n in self.contributions for n in names)
        if not self.gradient_digest or not complete:
            return None
        parts = [self.contributions[n] for n in names]
        return PreparedRound(
            epoch=self.record.epoch,
            step=self.step,
            gradient_digest=self.gradient_digest,
            weight=sum(p.weight for p in parts),
            contributions=tuple((n, p.micro_batches) for n, p in zip(names, parts, strict=True)),
            metrics=_sum_metrics([p.metrics for p in parts]),
            nonfinite=self.nonfinite,
        )

    def missing(self) -> tuple[str, ...]:
        """The members whose contribution this round lacks; once all are here, those whose vote it lacks."""
        late = tuple(n for n in self.record.names if n not in self.contributions)
        if late or not self.gradient_digest:
            return late
        return tuple(n for n in self.record.names if n not in self.votes)

    def everybody_in(self) -> bool:
        """Whether my reduction has begun, and every contribution is here."""
        return self.exchanging and all(n in self.contributions for n in self.record.names)

    def complete(self) -> bool:
        """Whether every member of the roster has voted."""
        return len(self.votes) >= len(self.record.roster) and all(n in self.votes for n in self.record.names)

    def disagreement(self) -> str:
        """Say why the votes forbid the commit, with digests by member; empty when they agree."""
        gradients = {n: b.gradient_digest for n, b in self.votes.items()}
        if len(set(gradients.values())) > 1:
            return f"digests of the reduced gradient at step {self.step} differ: {_by_member(gradients)}"
        for alike in self._states():
            if len(set(alike.values())) > 1:
                parted = self.parted()
                why = f"digests of the state at step {self.step} differ: {_by_member(alike)}"
                return f"{why}; {parted}" if parted else why
        return ""

    def _states(self) -> list[dict[str, str]]:
        """The digests of the states under this round, one group per layout of ranks.

        Two layouts may round the same update differently, so their states are not compared.
        """
        layouts: dict[str, dict[str, str]] = {}
        for member in self.record.roster:
            vote = self.votes.get(member.replica)
            if vote is not None and vote.state_digest:
                layouts.setdefault(member.cuts, {})[member.replica] = vote.state_digest
        return list(layouts.values())

    def parted(self) -> str:
        """Say where the members' states before this round differ, by their votes; empty if they agree."""
        for alike in self._states():
            if len(set(alike.values())) > 1:
                return differences({name: self.votes[name].entries for name in alike})
        return ""

    def is_disputed(self, name: str) -> bool:
        """Whether a vote differs from the vote of ``name``, with which at most half of the roster agree.

        Then no member has committed or will commit this round, because a commit takes every vote (rule 3).
        """
        digests = [vote.gradient_digest for vote in self.votes.values()]
        agree = digests.count(self.votes[name].gradient_digest) if name in self.votes else len(digests)
        return agree < len(digests) and 2 * agree <= len(self.record.roster)

    def is_outvoted(self, name: str, digest: str) -> bool:
        """Whether most members with the layout of ``name`` voted for one other state digest than ``digest``.

        Empty digests do not count.
        """
        own = self.record.member(name)
        alike = [x.replica for x in self.record.roster if own is not None and x.cuts == own.cuts]
        votes = [self.votes[x].state_digest for x in alike if x in self.votes]
        others = Counter(vote for vote in votes if vote not in ("", digest))
        return bool(digest and others) and 2 * max(others.values()) > len(alike)

    def culprits(self) -> str:
        """Name the members that voted that their own contribution was not finite; empty if there are none."""
        tensors = sorted((n, b.nonfinite) for n, b in self.votes.items() if b.nonfinite)
        return ", ".join(f"{name} (its {tensor})" for name, tensor in tensors)

    def next_epoch(self) -> int:
        """The next epoch if every vote is ready for it, otherwise the epoch of this round."""
        ready = {b.ready for b in self.votes.values()}
        return ready.pop() if len(ready) == 1 else self.record.epoch


def _by_member(digests: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {digest[:8]}" for name, digest in sorted(digests.items()))


def _sum_metrics(parts: list[tuple[tuple[str, float], ...]]) -> tuple[tuple[str, float], ...]:
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part:
            totals[name] = totals.get(name, 0.0) + value
    return tuple(sorted(totals.items()))
