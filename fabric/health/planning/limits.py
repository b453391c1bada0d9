"""Limits on acting: a budget of actions per hour and the operator's veto."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fabric.health.planning.remedies import ActionRules, Remedy, RemedyKind

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Veto:
    """Remedies that the operator forbids."""

    kinds: frozenset[RemedyKind] = frozenset()
    replicas: frozenset[str] = frozenset()  # replicas that no remedy may touch

    def forbids(self, remedy: Remedy) -> str:
        """Why the operator forbids this remedy, in one sentence; empty where the remedy is allowed."""
        if remedy.kind in self.kinds:
            return f"an operator's veto forbids every {remedy.kind} remedy"
        for name in sorted({remedy.replica, *_restarted(remedy)} & self.replicas):
            return f"an operator's veto forbids every remedy for replica {name}"
        return ""


def _restarted(remedy: Remedy) -> Iterable[str]:
    return (entry.replica for entry in remedy.plan.replicas if entry.rejoins)


def hold(
    remedies: Sequence[Remedy], rules: ActionRules, veto: Veto, acted_s: Iterable[float], now_s: float
) -> tuple[Remedy, ...]:
    """Set ``held`` of each remedy that may not be done now.

    ``acted_s``: the times of earlier actions, on the clock of ``now_s``. A time in the future counts, because
    the clock of an earlier leader may be ahead.
    """
    recent = sum(now_s - at_s < _HOUR_S for at_s in acted_s)
    spent = (
        f"the budget of {rules.actions_per_hour} actions per hour is spent"
        if recent >= rules.actions_per_hour
        else ""
    )
    return tuple(replace(remedy, held=veto.forbids(remedy) or spent) for remedy in remedies)


def next_action(remedies: Sequence[Remedy]) -> Remedy | None:
    """The cheapest remedy that may be done now, None where all are held."""
    return next((remedy for remedy in remedies if not remedy.held), None)
