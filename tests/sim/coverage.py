"""Counts the faults and rare paths of a run, because a simulator proves nothing about a path that it never
meets.
"""

from collections import Counter
from typing import TYPE_CHECKING

from sim.faults import KINDS, TRIGGERS

from fabric.protocol.member.state import Mode
from fabric.protocol.messages import leader_events as io

if TYPE_CHECKING:
    from sim.world import World

REASONS = {
    "is redone": "path: a round is redone",
    "have prepared step": "path: committed by Resume",
    "first start": "path: first start",
    "cold start from": "path: cold start",
    "ring rebuilt": "path: ring rebuilt",
    " joins": "path: join",
    " leaves": "path: drain",
    "finished at": "path: complete",
    "has been stopped": "path: eviction of a stopped process",
    "evicted by operator": "path: eviction of a living member",
    "has been silent": "path: eviction of a silent host",
    "it cannot go on": "path: eviction of a fallen member",
    "with the majority about the reduced gradient": "path: a wrong result stops the round",
    "with the majority about the state": "path: eviction of a wrong state",
}

# These reasons occur only in worlds with slow newcomers (``late_worlds``).
LATE_REASONS = {
    "joins while the others wait for its state": "late: joined while the others waited",
    "its settings turn replay off": "late: replay is off",
    "its catch-up failed twice": "late: fell off twice",
    "has not shrunk": "late: gap did not shrink",
    "for its state, which did not arrive": "late: given up",
}

MOMENTS = ("a join", "a drain", "a recovery", "a cold start", "the end")

# These reasons occur only in worlds where a member delays the others (``stall_worlds``).
STALL_REASONS = {
    "all others waited for it": "stall: evicted a root waiter",
    "while the others waited for": "stall: evicted for user code",
    "it lives, but did not answer": "stall: evicted for no answer",
    "for its state, which did not arrive": "stall: evicted while awaited",
}

REQUIRED = (
    *sorted({f"fault: {kind}" for kind in KINDS}),
    *sorted({f"during {trigger}" for trigger in TRIGGERS}),
    *sorted(set(REASONS.values())),
    "path: replay",
    "path: a digest told later",
    "path: streamed",
    "path: aborted while streaming",
    "path: a streamed gradient was changed",
    "path: a gradient is given away",
    "path: what was given away is computed again",
    "path: parked",
    "path: admitted while parked",
    "fault: wrong clocks",
    *(f"path: fault during {x}" for x in MOMENTS),
    *(f"path: lighthouse lost during {x}" for x in MOMENTS),
    "path: two deaths share an epoch",
    "path: weight zero in the first round",
    "path: corrupted chunk refused",
    "path: stopped rather than guess",
    "path: incarnation of a host whose time is behind",
    "path: started again above a number",
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
    "store: operations lost in a crash",
    "step down",
    "finish",
)


def told(counts: Counter[str], effect: io.RecordEvent) -> None:
    """Count the paths that the leader's event log shows."""
    counts[f"leader: {effect.kind}"] += 1
    for words, name in REASONS.items():
        if words in effect.why and effect.kind in ("epoch", "resume", "complete"):
            counts[name] += 1
    for words, name in (*LATE_REASONS.items(), *STALL_REASONS.items()):
        if words in effect.why and effect.kind == "epoch":
            counts[name] += 1
    if effect.kind == "aborted" and " stalled: all members are in it" in effect.why:
        counts["stall: round given up"] += 1
    if effect.kind == "heard again":
        counts["path: heard again"] += 1


def struck(world: "World", kind: str) -> None:
    """Count the circumstances in which a fault struck."""
    counts = world.clockwork.counts
    counts[f"fault: {kind}"] += 1
    modes = [t.core.epochs.mode for t in world.living()]
    record = world.store.record
    drains = record is not None and any(x.leaving for x in record.roster)
    recovers = Mode.ABORTED in modes or Mode.REPORTED in modes
    starts = any(
        t.core.epochs.mode is Mode.CATCH_UP and t.core.memory.state.generation == 0 for t in world.living()
    )
    during = {
        "a join": Mode.JOINED in modes,
        "a drain": drains,
        "a recovery": recovers,
        "a cold start": starts,
        "the end": any(t.main.closing for t in world.living()),
    }
    for what, happens in during.items():
        if happens:
            counts[f"path: fault during {what}"] += 1
            if kind.startswith("lighthouse"):
                counts[f"path: lighthouse lost during {what}"] += 1


def missing(counts: Counter[str]) -> list[str]:
    """Return the faults and paths that the run should have met and has not met."""
    return [name for name in REQUIRED if not counts[name]]
