"""The calls of all processes side by side: which processes have entered which collective."""

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from fabric.collectives.recording import Group, Process, RecordedCollective, Recording
from fabric.model import Value

_DEFAULT_GROUP = "default_pg"
_LISTED = 8
# No process leaves one of these collectives before every process of the group has entered it.
_SYNCHRONISING = ("all_reduce", "barrier", "all_gather", "all_to_all", "reduce_scatter")


class GroupId(Value, order=True):
    """One group of one replica. Fabric's own exchange is a group of the whole job: then ``replica`` is empty,
    and ``rank`` says which rank of every replica takes part."""

    replica: str
    name: str
    ranks: tuple[int, ...] = ()
    rank: int = -1


class GroupCalls(Struct):
    """The calls in one group by number and process, and those members of the group that are known."""

    group: Group
    is_own: bool
    members: set[Process] = field(default_factory=set)
    are_members_known: bool = False
    are_members_guessed: bool = False  # ``members`` may lack a process that has no recording
    by_number: dict[int, dict[Process, RecordedCollective]] = field(default_factory=dict)
    sends: dict[Process, list[RecordedCollective]] = field(default_factory=dict)  # and receives
    last: dict[Process, int] = field(default_factory=dict)  # the newest call that each process entered

    def by_rank(self, rank: int) -> Process | None:
        members = sorted(self.members) if self.are_members_known else []
        return members[rank] if rank < len(members) else None


class AllCalls(Struct):
    """The recordings of all processes, by group. ``unread``: why the recording of a process is missing."""

    recordings: tuple[Recording, ...]
    unread: Mapping[Process, str]
    groups: dict[GroupId, GroupCalls] = field(default_factory=dict)
    names: dict[Process, str] = field(default_factory=dict)
    has_recorded: set[tuple[Process, bool]] = field(default_factory=set)  # (process, is_own) of recordings

    def name(self, process: Process) -> str:
        return self.names.get(process, process.name)

    def listed(self, processes: Iterable[Process]) -> str:
        words = [self.name(process) for process in sorted(processes)]
        words = words[:_LISTED] + ([f"{len(words) - _LISTED} more"] if len(words) > _LISTED else [])
        return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)

    def last_call(self, process: Process) -> RecordedCollective | None:
        """The newest call of the process in any group."""
        calls = [c for x in self.recordings if x.process == process for c in x.collectives[-1:]]
        return max(calls, key=lambda call: call.created_ns, default=None)

    def where(self, process: Process, call: RecordedCollective) -> str:
        """The program's line that made the call, as the end of a sentence; empty where it is unknown."""
        if call.at:
            return f", called at {call.at}"
        recording = self.recording(process)
        frame = recording.user_frame if recording is not None and call.is_pending else ""
        return f", its main thread is at {frame}" if frame else ""

    def recording(self, process: Process) -> Recording | None:
        return next((x for x in self.recordings if x.process == process), None)


def side_by_side(recordings: Iterable[Recording], unread: Mapping[Process, str] | None = None) -> AllCalls:
    """All calls by group and number. A process may have two recordings: torch's and fabric's."""
    everything = AllCalls(tuple(recordings), dict(unread or {}))
    for recording in everything.recordings:
        everything.has_recorded.add((recording.process, recording.is_own))
        for call in recording.collectives:
            calls = _calls_of(everything, recording, call.group)
            if call.is_p2p:
                calls.sends.setdefault(recording.process, []).append(call)
                continue
            # The last entry of a coalesced launch stands for all its entries.
            calls.by_number.setdefault(call.number, {})[recording.process] = call
            calls.last[recording.process] = max(calls.last.get(recording.process, -1), call.number)
        for group in recording.groups.values():
            if group.ranks or group.replicas:
                _calls_of(everything, recording, group)
    for group_id, calls in everything.groups.items():
        if not calls.are_members_known:
            _guess_members(everything, group_id, calls)
    processes = {x.process for x in everything.recordings} | set(everything.unread)
    processes |= {member for calls in everything.groups.values() for member in calls.members}
    several = {x.replica for x in processes if x.rank > 0}
    for process in processes:  # a replica of one process needs no rank in its name
        is_single = process.replica and process.replica not in several
        everything.names[process] = process.replica if is_single else process.name
    return everything


def is_over(call: RecordedCollective, awaited: Iterable[Process]) -> bool:
    """Whether a call has ended with a result. Gloo marks a timed-out call as complete, too. Such a call has
    no result if a member never entered it."""
    if call.is_pending or call.has_failed:
        return False
    return call.backend != "gloo" or call.operation not in _SYNCHRONISING or not any(awaited)


def _calls_of(everything: AllCalls, recording: Recording, group: Group) -> GroupCalls:
    process = recording.process
    if recording.is_own:
        group_id = GroupId("", group.name, (), process.rank)
        members = {Process(replica, process.rank) for replica in group.replicas}
    else:
        group_id = GroupId(process.replica, group.name, group.ranks)
        members = {Process(process.replica, rank) for rank in group.ranks}
    calls = everything.groups.get(group_id)
    if calls is None:
        calls = everything.groups[group_id] = GroupCalls(group, recording.is_own)
    calls.members |= members
    calls.are_members_known = calls.are_members_known or bool(members)
    if not members:
        calls.members.add(process)
    return calls


def _guess_members(everything: AllCalls, group_id: GroupId, calls: GroupCalls) -> None:
    """Guess the members of a group of gloo, which does not record them. The default group has all known
    ranks. Another group has the processes that have called in it; in a world of two it has both."""
    if calls.is_own:
        return
    replica = [x for x in everything.recordings if x.process.replica == group_id.replica and not x.is_own]
    ranks = {x.process.rank for x in replica} | {rank for x in replica for rank in x.ranks_named}
    ranks |= {x.rank for x in everything.unread if x.replica == group_id.replica}
    world = {Process(group_id.replica, rank) for rank in range(max(ranks, default=-1) + 1)}
    if calls.group.description == _DEFAULT_GROUP or len(world) == 2:
        calls.members |= world
        calls.are_members_known = calls.are_members_guessed = True
