"""What is remembered of hosts for days. Pure.

Hosts that failed fail again. Of nodes that were put back into service after a failure, a public trace has
14 % fail again within half an hour, 37 % within a day and 52 % within a week. So each failure of a host
counts half as much for every day that has passed. A host is suspect while they come to ``SUSPECT``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fabric.model import HostHistory

# Two failures within a day, or three within two days.
SUSPECT = 1.5
# What has come to less than this says nothing any more: one failure is forgotten after a week.
FORGOTTEN = 2.0**-7
# A record stays small: of more hosts the least suspect are forgotten.
MAX_HOSTS = 256


def score(history: HostHistory, unix_s: float, half_life_s: float) -> float:
    """What the failures of this host come to at ``unix_s``."""
    return float(history.score * 0.5 ** (max(0.0, unix_s - history.at) / half_life_s))


def with_failures(
    known: Iterable[HostHistory], failed: Mapping[str, str], unix_s: float, half_life_s: float
) -> tuple[HostHistory, ...]:
    """``known`` and one failure more of each host in ``failed`` (host -> why), sorted by host."""
    by_host = {x.host: x for x in known if score(x, unix_s, half_life_s) >= FORGOTTEN}
    for host, why in failed.items():
        old = by_host.get(host, HostHistory(host, 0, 0.0, unix_s))
        value = score(old, unix_s, half_life_s) + 1.0
        by_host[host] = HostHistory(host, old.times + 1, round(value, 4), round(unix_s, 1), why)
    worst = sorted(by_host.values(), key=lambda x: -score(x, unix_s, half_life_s))[:MAX_HOSTS]
    return tuple(sorted(worst, key=lambda x: x.host))


def by_this_clock(known: Iterable[HostHistory], unix_s: float) -> tuple[HostHistory, ...]:
    """What another leader wrote, by a clock that may be ahead of this one."""
    return tuple(x if x.at <= unix_s else replace(x, at=unix_s) for x in known)
