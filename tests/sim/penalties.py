"""Checks penalties from outside: counts the evidence against replicas that failed.

The checker sees the store's records, the replicas' messages and the operators' orders. The checker counts
only evidence that counts by every clock, because clocks and times of day go wrong.
"""

import re
from collections import defaultdict
from collections.abc import Callable

from fabric.model import Record
from fabric.protocol.leader.state import MAX_REASON_CHARACTERS

# The leader's reasons for an eviction that are failures of the member.
FAILURES = (
    "its process is gone",
    "a newer process of it has registered and found this one gone",
    "its host is gone, says ",
    "the process of its rank ",
    "its trainer has been stopped for ",
    "its session ended ",
    "its host has been silent for ",
    "it lives, but did not answer epoch ",
    "it was in user code while the others waited for ",
    "it was busy with ",
    "the others waited .* s for its state, which did not arrive",
    "all others waited for it in ",
    "peers could not reach it ",
    ".* disagrees? with .* about ",
)
# Those that are not: an operator or the member has asked for the eviction, or a link is cut.
NO_FAILURES = (
    "evicted by ",
    "it cannot go on: ",
    "it and .* cannot reach each other",
    "it and .* cannot exchange messages of ",
    "the others could not link to it, and have not waited for it",
)


def is_failure(why: str) -> bool:
    """Whether an eviction for this reason is a failure of the member. Each reason has a row in one table."""
    found = [table for table in (FAILURES, NO_FAILURES) if any(re.match(x, why) for x in table)]
    if len(found) != 1:
        raise LookupError(f"give this reason for an eviction a row in one table of sim/penalties.py: {why}")
    return found[0] is FAILURES


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
        self.no_failures = 0  # number of evictions that are no failures of the members

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

    def restored(self, copy: Record) -> None:
        """The store was put back: the next leader knows no newer failure than its ``copy``."""
        for name, times in self._failures.items():
            del times[sum(x.replica == name for x in copy.failures) :]

    def written(self, before: Record, after: Record) -> str:
        """Judge the replicas that ``after`` admits, then count the evictions; return the violation, or
        empty.
        """
        early = [x.replica for x in after.failures if x.epoch >= after.epoch]
        if early:
            return f"epoch {after.epoch} counts failures of members that it lists: {early}"
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
            unlike = self._count(before, after, at)
            if unlike:
                return unlike
        if not wrong or not enough:
            return ""
        return f"{wrong} came in with epoch {after.epoch}: {self._limit} failures in {self._window_s:g} s"

    def _count(self, before: Record, after: Record, at: float) -> str:
        """Count the failures for which ``after`` leaves members out; return how the record differs."""
        noted = {x.replica for x in after.failures if x.epoch == before.epoch}
        parts = after.reason.split("; ")
        if len(after.reason) == MAX_REASON_CHARACTERS:
            parts.pop()  # it may be cut
        whys = dict(part.partition(" evicted: ")[::2] for part in parts)
        for member in before.roster:
            name, why = member.replica, whys.get(member.replica, "")
            if not why or after.lists(name, member.incarnation):
                continue
            if not is_failure(why):
                self.no_failures += 1
                if name in noted:
                    return f"epoch {after.epoch} counts a failure of {name}, which was evicted: {why}"
                continue
            self._perhaps[name].append(at)
            if (name, member.incarnation) not in self._excused:
                self._failures[name].append(at)
                if self._limit and name not in noted:
                    return f"epoch {after.epoch} does not count that {name} was evicted: {why}"
        return ""

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
