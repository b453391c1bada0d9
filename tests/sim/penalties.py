"""Checks penalties from outside: counts the evidence against replicas that failed.

The checker sees the store's records, the replicas' messages and the operators' orders. The checker counts
only evidence that counts by every clock, because clocks and times of day go wrong.
"""

from collections import defaultdict
from collections.abc import Callable

from fabric.model import Record

# An eviction with one of these reasons was asked for by the member or by an operator.
NO_FAILURE = ("evicted by ", "it cannot go on: ")


class Penalties:
    """``limit`` failures within ``window_s`` keep a replica out (each host has one replica here, so that its
    penalty is the same); ``least`` members are needed where nobody has ordered otherwise. ``error_s``: the
    largest difference between two leaders' times of one event. A replica that failed twice within
    ``half_life_s`` may join only while the job has fewer than ``full`` members.
    """

    def __init__(
        self,
        now: Callable[[], float],
        limit: int,
        window_s: float,
        least: int,
        error_s: float,
        full: int,
        half_life_s: float,
    ) -> None:
        self._now = now
        self._limit = limit
        self._window_s = window_s
        self._least = least
        self._error_s = error_s
        self._asked: dict[str, float] = {}  # nonce -> when a leader first tried to write that record
        self._failures: dict[str, list[float]] = defaultdict(list)
        # failures by replica, with those that a leader need not count
        self._perhaps: dict[str, list[float]] = defaultdict(list)
        self._full = full
        self._half_life_s = half_life_s
        self._excused: set[tuple[str, int]] = set()  # processes whose end may be no failure
        # number of records that admitted a replica on a suspect host, because members were missing
        self.suspects = 0
        self.met = 0  # number of records written while a replica was kept out

    def asked(self, record: Record) -> None:
        """Note the time at which a leader begins to write the record, because the leader knew only earlier
        evidence.
        """
        self._asked.setdefault(record.nonce, self._now())

    def excuse(self, replica: str, incarnation: int) -> None:
        """Excuse a process that has sent CannotContinue, or whose end an operator has asked for."""
        self._excused.add((replica, incarnation))

    def pardon(self, replica: str) -> None:
        """Forget the failures of a replica that an operator admits."""
        self._failures.pop(replica, None)

    def forget(self) -> None:
        """The store was wiped: the next leader knows of no failure."""
        self._failures.clear()
        self._perhaps.clear()

    def written(self, before: Record, after: Record) -> str:
        """Judge the replicas that ``after`` admits, then count the evictions; return the violation, or
        empty.
        """
        at = self._asked.get(after.nonce, self._now())
        kept_out = {name for name in self._failures if self._is_kept_out(name, at)}
        self.met += bool(kept_out)
        least = after.overrides.min_replicas or self._least
        if after.generation == before.generation:
            came = [x.replica for x in after.roster if not before.lists(x.replica, x.incarnation)]
            enough = len(before.roster) >= least
        else:
            came = list(after.names)
            # Do not count replicas that the leader, by its own clock, may still keep out.
            enough = sum(not self._may_be_kept_out(name, at) for name in after.names) >= least
        wrong = sorted(kept_out & set(came))
        # A replica whose ranks are on several hosts has no host that could be suspect.
        alone = {x.replica for x in after.roster if len({y.link.partition(":")[0] for y in x.addresses}) == 1}
        suspects = {name for name in came if name in alone and self._is_suspect(name, at)} - kept_out
        self.suspects += bool(suspects)
        room = (after.overrides.max_replicas or self._full) - len(before.roster)
        others = len(set(came) - suspects)
        if after.generation == before.generation and suspects and len(suspects) > max(0, room - others):
            return f"{sorted(suspects)} came in with epoch {after.epoch} although the job had its members"
        if after.is_forced and after.epoch > before.epoch and after.generation == before.generation:
            self._count(before, after, at)
        if not wrong or not enough:
            return ""
        return f"{wrong} came in with epoch {after.epoch}: {self._limit} failures in {self._window_s:g} s"

    def _count(self, before: Record, after: Record, at: float) -> None:
        whys = dict(part.partition(" evicted: ")[::2] for part in after.reason.split("; "))
        for member in before.roster:
            why = whys.get(member.replica, "")
            if not why or why.startswith(NO_FAILURE) or after.lists(member.replica, member.incarnation):
                continue
            self._perhaps[member.replica].append(at)
            if (member.replica, member.incarnation) not in self._excused:
                self._failures[member.replica].append(at)

    def _is_kept_out(self, name: str, at: float) -> bool:
        """Return whether every leader must keep the replica out, because it failed too often."""
        recent = [x for x in self._failures[name] if 1.1 * (at - x) + self._error_s < self._window_s]
        return 0 < self._limit <= len(recent)

    def _is_suspect(self, name: str, at: float) -> bool:
        """Return whether every leader must call the replica's host suspect."""
        recent = [x for x in self._failures[name] if 1.1 * (at - x) + self._error_s < self._half_life_s]
        return self._limit > 0 and len(recent) >= 2

    def _may_be_kept_out(self, name: str, at: float) -> bool:
        """Return whether a leader may keep the replica out, by its own clock."""
        recent = [x for x in self._perhaps[name] if (at - x) / 1.1 - self._error_s < self._window_s]
        return 0 < self._limit <= len(recent)
