"""Every fault of the drill: its action, its needs, its evidence and its end."""

from collections.abc import Collection, Mapping
from enum import StrEnum

from fabric.errors import ConfigError
from fabric.model import Value


class FaultScope(StrEnum):
    """The processes that a fault hits."""

    REPLICA = "a replica"
    ALL = "all replicas"
    TWO = "two replicas"
    LIGHTHOUSE = "a lighthouse"
    STORE = "a store member"
    HOST = "this host"
    REPLICA_HOST = "the host of a replica"


class FaultNeed(StrEnum):
    """A condition without which a fault is impossible; the text completes "it needs"."""

    TRAINERS = "trainers with FABRIC_DRILL=1"
    OWN_JOB = "a job that the drill starts"
    TWO_REPLICAS = "a job of three replicas or more"
    ONE_LIGHTHOUSE = "a drill with one lighthouse, because a second one is reached without the relay"
    TWO_LIGHTHOUSES = "two lighthouses that the drill starts (--lighthouses 2)"
    THREE_MEMBERS = "three etcd members that the drill starts (--store-members 3)"
    MAY_LOSE = 'a loader with on_poison="skip", or else the job ends: give --yes-lose-it'
    MOUNT = "the right to mount a small file system (CAP_SYS_ADMIN)"


# The scopes that need a replica as target.
AIMED = (FaultScope.REPLICA, FaultScope.TWO, FaultScope.REPLICA_HOST)


class FaultKind(Value):
    """One row of the table."""

    name: str
    does: str
    seen: str  # how the drill observes that the fault happened
    undone: str  # how the fault ends, and how the drill observes its end
    scope: FaultScope = FaultScope.REPLICA
    needs: tuple[FaultNeed, ...] = (FaultNeed.TRAINERS,)
    lasts_s: float = 0.0  # how long the fault lasts if the schedule does not say; 0.0: a moment


_RELAY = (FaultNeed.TRAINERS, FaultNeed.OWN_JOB)
_OWN = (FaultNeed.OWN_JOB,)
_BACK = "the launcher starts the replica again; a new process writes its start line"
_HEALED = "the relay forwards again"
# A running job has no relay: the trainer makes its kernel drop packets.
_DROPPED = "in a running job, the kernel dropped packets"
_DETACHED = "in a running job, the trainer has removed its filter"

FAULTS: Mapping[str, FaultKind] = {
    kind.name: kind
    for kind in (
        FaultKind("kill", "SIGKILL to the trainer", "the kernel says that the process is gone", _BACK),
        FaultKind(
            "stop",
            "SIGSTOP to the trainer, later SIGCONT",
            "the kernel says that the process is stopped",
            "SIGCONT; the kernel says that the process is not stopped",
            lasts_s=5.0,
        ),
        FaultKind(
            "slow",
            "SIGSTOP for three quarters of every 100 ms",
            "the kernel says that the process is stopped, again and again",
            "SIGCONT; the kernel says that the process is not stopped",
            lasts_s=5.0,
        ),
        FaultKind(
            "hang",
            "the trainer's exchange stands still inside the ring",
            "the trainer says at which step it stands still",
            "the trainer goes on, and says so",
            lasts_s=3.0,
        ),
        FaultKind(
            "kill-two",
            "SIGKILL to two trainers at once",
            "the kernel says that both processes are gone",
            _BACK,
            FaultScope.TWO,
            (FaultNeed.TRAINERS, FaultNeed.TWO_REPLICAS),
        ),
        FaultKind(
            "kill-all",
            "SIGKILL to all trainers at once",
            "the kernel says that all processes are gone",
            _BACK,
            FaultScope.ALL,
        ),
        FaultKind(
            "kill-recovering",
            "SIGKILL to a second trainer while the others recover from the death of the first",
            "a survivor has aborted and not committed when the second process is gone",
            _BACK,
            FaultScope.TWO,
            (FaultNeed.TRAINERS, FaultNeed.OWN_JOB, FaultNeed.TWO_REPLICAS),
        ),
        FaultKind(
            "kill-joining",
            "SIGKILL to a trainer, and to its next process before that process commits a step",
            "the journal of the second process has no commit",
            _BACK,
            needs=(FaultNeed.TRAINERS, FaultNeed.OWN_JOB),
        ),
        FaultKind(
            "kill-server",
            "SIGKILL to the replica's checkpoint server",
            "the kernel says that the process is gone",
            "the trainer starts another checkpoint server",
        ),
        FaultKind(
            "kill-lighthouse",
            "SIGKILL to the leading lighthouse",
            "the kernel says that the process is gone",
            "the drill starts the lighthouse again, and it answers",
            FaultScope.LIGHTHOUSE,
            _OWN,
            3.0,
        ),
        FaultKind(
            "kill-follower",
            "SIGKILL to a lighthouse that does not lead",
            "the kernel says that the process is gone",
            "the drill starts the lighthouse again, and it answers",
            FaultScope.LIGHTHOUSE,
            (*_OWN, FaultNeed.TWO_LIGHTHOUSES),
            3.0,
        ),
        FaultKind(
            "stop-lighthouse",
            "SIGSTOP to the leading lighthouse, later SIGCONT",
            "the kernel says that the process is stopped",
            "SIGCONT; the kernel says that the process is not stopped",
            FaultScope.LIGHTHOUSE,
            _OWN,
            5.0,
        ),
        FaultKind(
            "kill-store",
            "SIGKILL to an etcd member",
            "the kernel says that the process is gone",
            "the drill starts the member again, and it is healthy",
            FaultScope.STORE,
            (*_OWN, FaultNeed.THREE_MEMBERS),
            3.0,
        ),
        FaultKind(
            "stop-store",
            "SIGSTOP to an etcd member, later SIGCONT",
            "the kernel says that the process is stopped",
            "SIGCONT; the kernel says that the process is not stopped",
            FaultScope.STORE,
            (*_OWN, FaultNeed.THREE_MEMBERS),
            5.0,
        ),
        FaultKind(
            "cut-peers",
            "no byte passes between the replica and its peers",
            "the relay held bytes back",
            _HEALED,
            needs=_RELAY,
            lasts_s=5.0,
        ),
        FaultKind(
            "cut-in",
            "no byte reaches the replica from its peers' connections; its answers pass",
            f"the relay held bytes back; {_DROPPED}",
            f"{_HEALED}; {_DETACHED}",
            lasts_s=5.0,
        ),
        FaultKind(
            "cut-lighthouse",
            "no byte passes between the replica and the lighthouse",
            "the relay held bytes back",
            _HEALED,
            needs=(*_RELAY, FaultNeed.ONE_LIGHTHOUSE),
            lasts_s=5.0,
        ),
        FaultKind(
            "slow-link",
            "each piece of bytes to the replica waits 50 ms in the relay",
            "the relay delayed bytes",
            _HEALED,
            needs=_RELAY,
            lasts_s=5.0,
        ),
        FaultKind(
            "lossy-link",
            "the relay resets connections to the replica; in a running job it loses a fifth of its packets",
            f"the relay reset a connection; {_DROPPED}",
            f"{_HEALED}; {_DETACHED}",
            lasts_s=5.0,
        ),
        FaultKind(
            "flip-payload",
            "the relay flips one bit of a gradient on its way to the replica",
            "the relay flipped the bit",
            "the relay flips one bit alone",
            needs=_RELAY,
        ),
        FaultKind(
            "memory",
            "a process of the drill takes a quarter of the free memory of the replica's host, 1 GB at most",
            "the kernel counts the memory as that process's",
            "the process ends",
            FaultScope.REPLICA_HOST,
            (FaultNeed.TRAINERS,),
            5.0,
        ),
        FaultKind(
            "wipe-store",
            "SIGKILL to all etcd members, whose data is removed",
            "the kernel says that the processes are gone, and their data is gone",
            "the drill starts the members again, and all replicas commit in a new generation",
            FaultScope.STORE,
            (*_OWN, FaultNeed.THREE_MEMBERS),
            3.0,
        ),
        FaultKind(
            "disk-full",
            "the file system of the durable checkpoints shrinks to what it holds",
            "the lighthouse says why no durable checkpoint is written",
            "the file system has room; the lighthouse knows a newer durable checkpoint",
            FaultScope.HOST,
            (*_OWN, FaultNeed.MOUNT),
            5.0,
        ),
        FaultKind(
            "flip-gradient",
            "a bit flips in a gradient of the trainer before the exchange; nothing detects that",
            "the trainer says which value it changed at which step",
            "the trainer says so; the next gradient is computed afresh",
        ),
        FaultKind(
            "poison",
            "a gradient of the trainer gets a NaN before the exchange; FABRIC_ON_NAN=skip answers",
            "the trainer says which value it changed at which step",
            "the trainer says so; the next gradient is computed afresh",
        ),
        FaultKind(
            "kill-micro-batch",
            'a micro-batch kills each trainer that computes it, until on_poison="skip" leaves it out',
            "the kernel says that two processes are gone",
            _BACK,
            FaultScope.ALL,
            (FaultNeed.TRAINERS, FaultNeed.OWN_JOB, FaultNeed.TWO_REPLICAS, FaultNeed.MAY_LOSE),
        ),
        FaultKind(
            "flip-snapshot",
            "a bit flips in all snapshots in memory, and a trainer dies that has to fetch one",
            "the process is gone, and its next process says why it refused the snapshot",
            "the next process starts; later snapshots have replaced the flipped ones",
            needs=(FaultNeed.TRAINERS, FaultNeed.OWN_JOB),
        ),
        FaultKind(
            "clock",
            "the trainer's clock (Python's time.time) leaps an hour ahead, and later back",
            "the trainer says so",
            "the trainer says so",
            lasts_s=5.0,
        ),
    )
}


def kind_of(name: str) -> FaultKind:
    """Return the row of a fault. Raises ConfigError with one sentence."""
    if name not in FAULTS:
        raise ConfigError(f'there is no fault "{name[:40]}": `fabric drill --list` shows all faults')
    return FAULTS[name]


def obstacle(kind: FaultKind, met: Collection[FaultNeed]) -> str:
    """Return why a fault is not possible where the needs ``met`` are met, or an empty string."""
    missing = [need.value for need in kind.needs if need not in met]
    return f"it needs {' and '.join(missing)}" if missing else ""
