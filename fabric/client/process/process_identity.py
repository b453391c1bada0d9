"""Which process of the job this is."""

from dataclasses import dataclass

from fabric.client.process.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Which process this is. ``predecessors``: those that ran on this host before, which have ended, newest
    first. ``group``: the ranks of this replica, None where it is one process."""

    incarnation: int
    predecessors: tuple[int, ...]
    group: RankGroup | None = None

    @property
    def rank(self) -> int:
        return self.group.rank if self.group is not None else 0
