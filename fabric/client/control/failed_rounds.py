"""Counts the rounds in a row that were aborted after this process had contributed."""

from fabric.errors import RoundsFailed


class FailedRounds:
    """Only the control thread uses it. ``most``: the count that gives an error; 0 for none."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._has_contributed = False  # whether members know of a contribution to the round under way
        self._count = 0

    def contributed(self) -> None:
        """Note that a contribution to the round under way goes to the members."""
        self._has_contributed = True

    def committed(self) -> None:
        """Note that the round under way is committed."""
        self._has_contributed, self._count = False, 0

    def aborted(self, step: int, why: str) -> RoundsFailed | None:
        """Note that the round under way is aborted; return the error that the loop must see, if any."""
        counts, self._has_contributed = self._has_contributed, False
        self._count += counts
        if not counts or self._count != self._most:
            return None
        return RoundsFailed(
            f"{self._count} exchanges of step {step} failed in a row, the last because {why}: this process "
            "has left the job, and a new process may join it"
        )
