"""Which process of the job this is."""

from dataclasses import dataclass

from fabric.client.process.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Which process this is."""

    incarnation: int
    # Incarnations that ran on this host before and have ended, newest first.
    predecessors: tuple[int, ...]
    # The ranks of this replica, None where it is one process.
    group: RankGroup | None = None

    @property
    def rank(self) -> int:
        return self.group.rank if self.group is not None else 0

    @property
    def size(self) -> int:
        return self.group.size if self.group is not None else 1
