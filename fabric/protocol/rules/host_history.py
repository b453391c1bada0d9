"""The failures of hosts, remembered for days. Pure.

Hosts that failed fail again: in a public trace 14 % of the repaired nodes fail again within half an hour,
37 % within a day and 52 % within a week. So a failure counts half as much for every day that has passed. A
host is suspect while its failures sum to ``SUSPECT``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fabric.model import HostHistory

# Two failures within a day, or three within two days, give a host this score.
SUSPECT = 1.5
# A host with a lower score is forgotten: one failure has this score after a week.
FORGOTTEN = 2.0**-7
# The most hosts in a record, to keep it small: the least suspect ones beyond it are forgotten.
MAX_HOSTS = 256


def score(history: HostHistory, unix_s: float, half_life_s: float) -> float:
    """The score of this host's failures at ``unix_s``."""
    return float(history.score * 0.5 ** (max(0.0, unix_s - history.at) / half_life_s))


def with_failures(
    hosts: Iterable[HostHistory], failed: Mapping[str, str], unix_s: float, half_life_s: float
) -> tuple[HostHistory, ...]:
    """Add one failure of each host in ``failed`` (host -> why) to ``hosts``; sort them by host."""
    by_host = {x.host: x for x in hosts if score(x, unix_s, half_life_s) >= FORGOTTEN}
    for host, why in failed.items():
        old = by_host.get(host, HostHistory(host, 0, 0.0, unix_s))
        value = score(old, unix_s, half_life_s) + 1.0
        by_host[host] = HostHistory(host, old.times + 1, round(value, 4), round(unix_s, 1), why)
    worst = sorted(by_host.values(), key=lambda x: -score(x, unix_s, half_life_s))[:MAX_HOSTS]
    return tuple(sorted(worst, key=lambda x: x.host))


def by_this_clock(hosts: Iterable[HostHistory], unix_s: float) -> tuple[HostHistory, ...]:
    """Correct times that another leader wrote by a clock ahead of this one."""
    return tuple(x if x.at <= unix_s else replace(x, at=unix_s) for x in hosts)
