"""One finding about recorded collectives: a verdict, the processes that it is about, a sentence, evidence."""

from dataclasses import dataclass
from typing import Any

DEADLOCK = "deadlock"
ABSENT = "absent rank"
OPERATION = "mismatched operation"
SIZES = "mismatched sizes"
DTYPE = "mismatched dtype"
STUCK = "stuck transfer"
STRAGGLER = "straggler"
NOTHING = "nothing found"
# The kinds of conclusion, the most urgent first.
VERDICTS = (OPERATION, SIZES, DTYPE, DEADLOCK, ABSENT, STUCK, STRAGGLER, NOTHING)

_MOST_EVIDENCE = 12


@dataclass(frozen=True, slots=True)
class Conclusion:
    """``verdict`` is one of VERDICTS. ``about``: names of processes. ``why`` is one sentence."""

    verdict: str
    about: tuple[str, ...]
    why: str
    evidence: tuple[str, ...] = ()
    has_ended: bool = False  # all calls in this mismatch have ended, so they hold no process up

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "about": list(self.about),
            "why": self.why,
            "evidence": list(self.evidence),
        }


def bounded(evidence: list[str]) -> tuple[str, ...]:
    """The first lines of the evidence, and a line that counts the omitted ones."""
    more = len(evidence) - _MOST_EVIDENCE
    return tuple(evidence[:_MOST_EVIDENCE]) + ((f"and {more} more",) if more > 0 else ())
