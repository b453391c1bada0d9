"""Which faults and which rare paths a hunt has met: a simulator that never meets one proves nothing of it."""

from collections import Counter
from typing import TYPE_CHECKING

from sim.faults import KINDS, TRIGGERS

from fabric.protocol import leader_io as io
from fabric.protocol.member_state import Mode

if TYPE_CHECKING:
    from sim.world import World

REASONS = {
    "is redone": "path: a round is redone",
    "hold step": "path: committed by Resume",
    "first start": "path: first start",
    "cold start from": "path: cold start",
    "formed again": "path: formed again",
    " joins": "path: join",
    " leaves": "path: drain",
    "finished at": "path: complete",
    "has been stopped": "path: eviction of a stopped process",
    "evicted by operator": "path: eviction of a living member",
    "has been silent": "path: eviction of a silent host",
    "it cannot go on": "path: eviction of a fallen member",
}

REQUIRED = (
    *sorted({f"fault: {kind}" for kind in KINDS}),
    *sorted({f"during {trigger}" for trigger in TRIGGERS}),
    *sorted(set(REASONS.values())),
    "path: replay",
    "path: parked",
    "path: admitted while parked",
    "path: fault during a join",
    "path: fault during a cold start",
    "path: lighthouse lost during a recovery",
    "path: stopped by itself without a lighthouse",
    "path: all lighthouses down, steps go on",
    "path: gradient gone",
    "path: state not delivered",
    "path: heard again",
    "store: write lost",
    "store: answer lost",
    "store: late write landed",
    "store: late write refused",
    "store: deposed writer refused",
    "step down",
    "finish",
)


def told(counts: Counter[str], effect: io.Tell) -> None:
    """Count what the leader's own words say has happened."""
    counts[f"leader: {effect.kind}"] += 1
    for words, name in REASONS.items():
        if words in effect.why and effect.kind in ("epoch", "resume", "complete"):
            counts[name] += 1
    if effect.kind == "heard again":
        counts["path: heard again"] += 1


def struck(world: "World", kind: str) -> None:
    """Count what a fault met when it struck."""
    counts = world.clockwork.counts
    counts[f"fault: {kind}"] += 1
    modes = [t.core.mode for t in world.living()]
    if Mode.JOINED in modes:
        counts["path: fault during a join"] += 1
    if any(t.core.mode is Mode.CATCH_UP and t.core.state.generation == 0 for t in world.living()):
        counts["path: fault during a cold start"] += 1
    if kind.startswith("lighthouse") and (Mode.ABORTED in modes or Mode.REPORTED in modes):
        counts["path: lighthouse lost during a recovery"] += 1


def missing(counts: Counter[str]) -> list[str]:
    """What a hunt should have met and has not."""
    return [name for name in REQUIRED if not counts[name]]
