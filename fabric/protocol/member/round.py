"""One round (epoch, step): collects contributions and votes until it is prepared, then committed.

Prepared: my reduction is finished, and every member's contribution is here. Committed: every member of the
roster has voted, and the digests of all votes are equal. Rules 1 to 3 of a member.
"""

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
    begun: float = -1.0  # when every member was in, and none had an excuse any more
    gradient_digest: str = ""
    nonfinite: str = ""  # as in Exchanged
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
        """The members whose contribution, or else vote, this round waits for."""
        late = tuple(n for n in self.record.names if n not in self.contributions)
        if late or not self.gradient_digest:
            return late
        return tuple(n for n in self.record.names if n not in self.votes)

    def everybody_in(self) -> bool:
        """Whether I reduce, and every contribution is here."""
        return self.exchanging and all(n in self.contributions for n in self.record.names)

    def complete(self) -> bool:
        """Whether every member of the roster has voted."""
        return len(self.votes) >= len(self.record.roster) and all(n in self.votes for n in self.record.names)

    def disagreement(self) -> str:
        """Say why the votes forbid the commit, with digests by member; empty when they agree."""
        for what, digests in (
            ("the reduced gradient", {n: b.gradient_digest for n, b in self.votes.items()}),
            ("the state", {n: b.state_digest for n, b in self.votes.items() if b.state_digest}),
        ):
            if len(set(digests.values())) > 1:
                parted = self.parted() if what == "the state" else ""
                why = f"digests of {what} at step {self.step} differ: {_by_member(digests)}"
                return f"{why}; {parted}" if parted else why
        return ""

    def parted(self) -> str:
        """Say where the states under this round differ, by these votes; empty where the digests agree."""
        entries = {name: vote.entries for name, vote in self.votes.items() if vote.state_digest}
        digests = {self.votes[name].state_digest for name in entries}
        return differences(entries) if len(digests) > 1 else ""

    def is_disputed(self, name: str) -> bool:
        """Whether a vote differs from that of ``name``, with which at most half of the roster agree.

        Then no member has committed this round or will, because a commit takes every vote (rule 3).
        """
        digests = [vote.gradient_digest for vote in self.votes.values()]
        agree = digests.count(self.votes[name].gradient_digest) if name in self.votes else len(digests)
        return agree < len(digests) and 2 * agree <= len(self.record.roster)

    def is_outvoted(self, digest: str) -> bool:
        """Whether most of the roster voted for one state other than ``digest`` (empty: no)."""
        others = Counter(b.state_digest for b in self.votes.values() if b.state_digest not in ("", digest))
        return bool(digest and others) and 2 * max(others.values()) > len(self.record.roster)

    def culprits(self) -> str:
        """Name the members whose votes say that their contribution was not finite; empty if none does."""
        tensors = sorted((n, b.nonfinite) for n, b in self.votes.items() if b.nonfinite)
        return ", ".join(f"{name} (its {tensor})" for name, tensor in tensors)

    def next_epoch(self) -> int:
        """The epoch that every vote is ready for, or this one."""
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
