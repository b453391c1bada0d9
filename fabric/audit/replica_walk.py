"""Checks the life of one trainer process, line by line, against the rules of the protocol.

The committed step rises by exactly one, from zero or from the step that a ``join`` fetched. The digest of the
state follows every commit. A contribution is written once per round and before its commit. No line follows
the end. A killed process may stop anywhere, a finished process may not. ``audit`` checks that replicas agree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fabric.audit.journal import JournalLine

# Two threads of a trainer write journal lines. The thread that reads the clock first may write second.
CLOCK_SLACK_S = 0.1


@dataclass(slots=True)
class ReplicaWalk:
    """The state of one incarnation after the lines read so far.

    ``next_step`` and ``generation`` are those of its state. ``due`` is the step whose state digest must come
    next, or None. ``epoch`` is the newest forced epoch, ``called`` the generation of that epoch, ``heard``
    the newest epoch of any kind. ``rounds`` holds the (generation, epoch, step) of its contributions.
    """

    next_step: int = 0
    due: int | None = None
    generation: int = 0
    epoch: int = 0
    called: int = 0
    heard: int = 0
    promised: int | None = None
    replayed: int = 0
    joining: bool = True  # whether it may replay steps: from its start, or from a leave, until it contributes
    decided: int = -1
    ended: bool = False
    rounds: set[tuple[int, int, int]] = field(default_factory=set)


# Events whose lines may follow the end: a stop, and links of an epoch that connected just then. The network
# thread writes such lines, and the training state does not depend on them.
_AFTER_END = frozenset(("stop", "plane"))


def walk(lines: Sequence[JournalLine]) -> list[str]:
    """Return the broken rules of one incarnation, one sentence each; ``lines`` begin with its ``start``."""
    broken: list[str] = []
    if lines[0].event != "start":
        broken.append(f"{lines[0].place} does not begin with a start line.")
    state = ReplicaWalk()
    previous = lines[0]
    for line in lines:
        if line.incarnation != lines[0].incarnation:
            broken.append(f"{line.place} changes its incarnation without a start line.")
        if line.mono < previous.mono - CLOCK_SLACK_S:
            broken.append(f"{line.place} goes back in time by {previous.mono - line.mono:.3f} s.")
        if state.ended and line.event not in _AFTER_END:
            broken.append(f"{line.place} has a {line.event} line after its end.")
        rule = _RULES.get(line.event)
        if rule is not None:
            broken.extend(f"{line.place} {problem}." for problem in rule(state, line))
        previous = line
    return broken


def _digested(state: ReplicaWalk) -> list[str]:
    """Report the digest that was due but is missing."""
    broken = [] if state.due is None else [f"has no digest of its state at step {state.due}"]
    state.due = None
    return broken


def _settled(state: ReplicaWalk) -> list[str]:
    """Report the digest or commit that was due but is missing."""
    broken = _digested(state)
    if state.promised is not None:
        broken.append(f"was to commit step {state.promised} and did not")
    state.promised = None
    return broken


def _ahead(state: ReplicaWalk, step: int) -> bool:
    """Whether ``step`` is one ahead: another thread has committed it, and its commit line must come next."""
    if step == state.next_step + 1:
        state.promised = state.next_step
        return True
    return False


def _contribute(state: ReplicaWalk, line: JournalLine) -> list[str]:
    broken = _settled(state)
    step = line.integer("step")
    if step != state.next_step:
        broken.append(f"contributes to step {step} while its state is at step {state.next_step}")
    state.joining = False
    key = (line.integer("generation"), line.integer("epoch"), step)
    if key in state.rounds:
        broken.append(f"contributes twice to the round of epoch {key[1]}, step {step}")
    state.rounds.add(key)
    ids = line.fields["micro_batches"]
    if len(set(ids)) != len(ids):
        broken.append(f"contributes a micro-batch of step {step} twice")
    return broken


def _commit(state: ReplicaWalk, line: JournalLine) -> list[str]:
    step, generation = line.integer("step"), line.integer("generation")
    decided = (state.decided, state.promised)  # committed before a later epoch came, its line written after
    if state.promised == step:
        state.promised = None
    broken = _settled(state)
    if step != state.next_step:
        broken.append(f"commits step {step} where step {state.next_step} had to follow")
    if generation < state.generation:
        broken.append(f"commits step {step} in generation {generation} after {state.generation}")
    if line.flag("replay") and line.flag("contributed"):
        broken.append(f"calls the commit of step {step} both contributed and a replay")
    if line.flag("replay"):
        state.replayed += 1
        if not state.joining:
            broken.append(f"replays step {step} without having been outside of the roster or behind")
    elif line.integer("epoch") < state.epoch and step not in decided:
        broken.append(f"commits step {step} in epoch {line.integer('epoch')} after {state.epoch}")
    state.generation = generation
    state.next_step = step + 1
    state.due = step + 1
    return broken


def _state(state: ReplicaWalk, line: JournalLine) -> list[str]:
    step = line.integer("step")
    if state.due == step:
        state.due = None
        return []
    # The state before a process begins or joins belongs to no generation: its script may have loaded it.
    if state.due is None and not line.integer("generation"):
        return []
    # A process may also record the state with which it starts or ends, or that it has fetched.
    if state.due is None and step == state.next_step:
        return []
    wanted = state.next_step if state.due is None else state.due
    return [f"records the state of step {step} where its state is at step {wanted}"]


def _join(state: ReplicaWalk, line: JournalLine) -> list[str]:
    broken = _settled(state)
    state.next_step = line.integer("step")
    state.generation = line.integer("generation")
    state.replayed = 0
    state.joining = True
    return broken


def _joined(state: ReplicaWalk, line: JournalLine) -> list[str]:
    broken = _digested(state)  # a promised commit comes next: the main thread writes both lines
    step, replayed = line.integer("step"), line.fields.get("replayed", state.replayed)
    if step != state.next_step:
        broken.append(f"joins at step {step} with the state of step {state.next_step}")
    if replayed != state.replayed:
        broken.append(f"says that it replayed {replayed} steps and recorded {state.replayed}")
    # A replica that is evicted again may return with its own state, without a fetch.
    state.replayed = 0
    state.joining = False
    return broken


def _epoch(state: ReplicaWalk, line: JournalLine) -> list[str]:
    epoch = line.integer("epoch")
    # Links of one epoch may connect more than once, and each connection writes a line.
    if epoch < state.heard:
        return [f"hears of epoch {epoch} after epoch {state.heard}"]
    state.heard = epoch
    # After a planned epoch is announced, rounds of the earlier epoch still commit; a forced epoch ends them.
    if line.flag("forced"):
        state.epoch, state.called = epoch, line.fields.get("generation", 0)
    return []


def _abort(state: ReplicaWalk, line: JournalLine) -> list[str]:
    step = line.integer("step")
    if step != state.next_step and not _ahead(state, step):
        return [f"aborts a round of step {step} with the state of step {state.next_step}"]
    return []


def _resume(state: ReplicaWalk, line: JournalLine) -> list[str]:
    step = line.integer("step")
    # One step ahead, the process commits the round that it has prepared. Further ahead, it catches up.
    if step > state.next_step:
        state.decided = state.next_step
        state.joining = True
    if step < state.next_step and state.called > state.generation:
        state.joining = True  # a cold start whose base differs from the state of this process
    elif step < state.next_step:
        return [f"is told to go on at step {step} with the state of step {state.next_step}"]
    return []


def _outside(state: ReplicaWalk, line: JournalLine) -> list[str]:
    """Take the eviction of a live process: its state is valid, so it replays missed steps and joins again."""
    _ahead(state, line.integer("step"))
    state.joining = True
    return []


def _finish(state: ReplicaWalk, line: JournalLine) -> list[str]:
    broken = _settled(state)
    if line.integer("step") != state.next_step:
        broken.append(f"finishes at step {line.integer('step')} with step {state.next_step}")
    state.ended = True
    return broken


def _stop(state: ReplicaWalk, line: JournalLine) -> list[str]:
    state.ended = True
    return []


_RULES: Mapping[str, Callable[[ReplicaWalk, JournalLine], list[str]]] = {
    "contribute": _contribute,
    "commit": _commit,
    "state": _state,
    "join": _join,
    "joined": _joined,
    "epoch": _epoch,
    "abort": _abort,
    "resume": _resume,
    "outside": _outside,
    "finish": _finish,
    "stop": _stop,
}
