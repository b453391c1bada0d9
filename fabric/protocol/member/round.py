"""One round (epoch, step): collects contributions and votes, and says when it is held and committed.

Held: my reduction is finished and every member's contribution is known, so the total weight and who
computed what are known too. Committed: every member of the roster says that it holds, with equal digests.
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
    """State of one round at one member. ``share`` is what it still has to compute for it."""

    record: Record
    step: int
    share: tuple[int, ...] = ()
    contributed: bool = False
    exchanging: bool = False
    begun: float = -1.0  # when everybody was in, and nobody had an excuse any more
    gradient_digest: str = ""
    nonfinite: str = ""
    mine: str = ""
    ready_record: Record | None = None
    contributions: dict[str, Contribution] = field(default_factory=dict)
    votes: dict[str, CommitVote] = field(default_factory=dict)

    def prepared(self) -> PreparedRound | None:
        """What I hold when the reduction is done and all contributions are known, else None."""
        names = self.record.names
        known = len(self.contributions) >= len(names) and all(n in self.contributions for n in names)
        if not self.gradient_digest or not known:
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
        """Whose contribution or vote this round waits for."""
        if self.gradient_digest and not any(n not in self.contributions for n in self.record.names):
            return tuple(n for n in self.record.names if n not in self.votes)
        return tuple(n for n in self.record.names if n not in self.contributions)

    def everybody_in(self) -> bool:
        """Whether I reduce and every contribution is known."""
        return self.exchanging and all(n in self.contributions for n in self.record.names)

    def complete(self) -> bool:
        """Whether every member of the roster has entered the barrier."""
        return len(self.votes) >= len(self.record.roster) and all(n in self.votes for n in self.record.names)

    def disagreement(self) -> str:
        """Why the votes forbid the commit, naming digests by member; empty when they agree."""
        for what, digests in (
            ("the reduced gradient", {n: b.gradient_digest for n, b in self.votes.items()}),
            ("the state", {n: b.state_digest for n, b in self.votes.items() if b.state_digest}),
        ):
            if len(set(digests.values())) > 1:
                parted = self.parted() if what == "the state" else ""
                found = f"digests of {what} at step {self.step} differ: {_by_member(digests)}"
                return f"{found}; {parted}" if parted else found
        return ""

    def parted(self) -> str:
        """Where the states under this round differ, as far as they say; empty where their digests agree."""
        said = {name: vote.entries for name, vote in self.votes.items() if vote.state_digest}
        digests = {self.votes[name].state_digest for name in said}
        return differences(said) if len(digests) > 1 else ""

    def is_disputed(self, name: str) -> bool:
        """Whether a vote names another result than the vote of ``name``, and at most half of the roster name
        that one. Then nobody has committed this round, nor will: a commit takes everybody's vote."""
        said = [vote.gradient_digest for vote in self.votes.values()]
        agree = said.count(self.votes[name].gradient_digest) if name in self.votes else len(said)
        return agree < len(said) and 2 * agree <= len(self.record.roster)

    def is_outvoted(self, digest: str) -> bool:
        """Whether more than half of the roster have said that the state under this round is one other than
        ``digest`` (empty: mine was not taken)."""
        others = Counter(b.state_digest for b in self.votes.values() if b.state_digest not in ("", digest))
        return bool(digest and others) and 2 * max(others.values()) > len(self.record.roster)

    def culprits(self) -> str:
        """Who put in what was not finite, as far as their votes are here; empty when nobody says so."""
        found = sorted((n, b.nonfinite) for n, b in self.votes.items() if b.nonfinite)
        return ", ".join(f"{name} (its {tensor})" for name, tensor in found)

    def next_epoch(self) -> int:
        """The epoch everybody is ready for, or this one."""
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
