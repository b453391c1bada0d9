"""Finds the cause of a failure: probes the ranks concerned, and stores one diagnosis with the recovery
record.

A diagnosis begins when an eviction is pending or a member aborts, while the process can still be probed. A
diagnosis also begins when members have long waited for a member that is not evicted yet. No decision waits
for a diagnosis: the recovery record gets it when it is ready.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from msgspec.structs import replace

from fabric.lighthouse.diagnosis import rank_probe
from fabric.lighthouse.diagnosis.rank_probe import PeerAddresses, ProbeAccess, ProbeTarget
from fabric.lighthouse.diagnosis.verdict import UNKNOWN, Diagnosis, Symptoms, diagnose
from fabric.lighthouse.history.recovery import RecoveryRecord
from fabric.model import Record, Value
from fabric.protocol.leader.core import LeaderCore
from fabric.protocol.leader.state import EpochState
from fabric.runtime.logs import fields
from fabric.runtime.tasks import Tasks

log = logging.getLogger(__name__)

# The most diagnoses at a time in one job; a failure beyond this number gets no diagnosis.
MOST_AT_ONCE = 4
# The other members of an aborted round report their aborts within this time.
_COMPANIONS_S = 0.1
# A wait of this length, or of half the member's limit, is a stall to diagnose.
STALLED_S = 10.0
_LOOK_S = 0.5

Tell = Callable[[str, str, str, str], None]


class FailureSnapshot(Value):
    """The leader and the epoch at the time of the failure; the view stays valid after that epoch."""

    core: LeaderCore
    record: Record
    epoch: EpochState

    def case(self, waited_for: str = "") -> Symptoms:
        """Return the symptoms now, with only those members that a symptom names."""
        condemned, aborted = dict(self.epoch.pending_evictions), dict(self.epoch.aborted)
        if waited_for and waited_for not in condemned:
            condemned[waited_for] = "the others wait for it"
        named = {
            *condemned,
            *aborted,
            *(x for a in aborted.values() for x in (a.about, *a.waiting_for, *a.unreachable)),
        }
        liveness, processes = self.core.state.liveness, dict[str, str]()
        for member in (x for x in self.record.roster if x.replica in named):
            status, process = liveness.statuses().get(member.replica), "unknown"
            if status is not None and status.incarnation == member.incarnation:
                process = status.trainer if status.connected else "silent"
            processes[member.replica] = "gone" if liveness.proven_dead(member) else process
        return Symptoms(condemned, aborted, self.record.names, processes)

    def places(self, names: tuple[str, ...], addresses: PeerAddresses) -> list[ProbeTarget]:
        """Return every rank of these replicas, up to the limit of probes."""
        servers, members = self.core.state.liveness.servers, map(self.record.member, names)
        targets = [
            ProbeTarget(x.replica, rank, url, addresses.of(x.replica, rank), addresses.is_trusted(x.replica))
            for x in members
            for rank, url in enumerate(servers.urls_of(x) if x is not None else ())
            if x is not None and url
        ]
        return targets[: rank_probe.MAX_RANKS]


class DiagnosisTask:
    """Diagnoses the failures of one job: call ``observe`` after every event of its core.

    ``keep`` gets a record with its diagnosis, ``tell`` an event (kind, about, why, incident id). ``access``
    returns the credentials for a checkpoint server, given whether its member showed the lighthouse's token.
    """

    def __init__(
        self,
        access: Callable[[bool], ProbeAccess],
        peer_addresses: PeerAddresses,
        tasks: Tasks,
        tell: Tell,
        keep: Callable[[RecoveryRecord], None],
    ) -> None:
        self._access = access
        self._peer_addresses = peer_addresses
        self._tasks = tasks
        self._tell = tell
        self._keep = keep
        self._begun: set[int] = set()  # ids of records whose diagnosis is under way, done or skipped
        self._running = 0
        self._stalls: set[tuple[str, int]] = set()
        self._looked = 0.0

    def observe(self, core: LeaderCore, changed: list[RecoveryRecord], now: float) -> None:
        """Begin the diagnoses that are due. ``changed``: new and changed records. ``now``: the core's
        clock."""
        record = core.state.record
        if record is None or record.complete:
            return  # members close their links because they have finished, so there is no failure
        for recovery in changed:
            if recovery.id in self._begun or recovery.diagnosis is not None:
                continue
            self._begun = {*sorted(self._begun)[-200:], recovery.id}
            if not recovery.epoch_committed:
                self._start(FailureSnapshot(core, record, core.state.epoch), recovery)
        if now - self._looked >= _LOOK_S:
            self._looked = now
            self._look_for_stalls(core, record, now)

    def _look_for_stalls(self, core: LeaderCore, record: Record, now: float) -> None:
        standing = set()
        for name, (step, since) in core.evictions.stragglers.since.items():
            peer = core.state.liveness.peers.get(name)
            if peer is None or peer.step > step or not record.lists(*peer.process):
                continue
            standing.add((name, step))
            if now - since < min(STALLED_S, core.state.patience_s(peer) / 2) or (name, step) in self._stalls:
                continue
            self._stalls.add((name, step))
            self._start(FailureSnapshot(core, record, core.state.epoch), None, name)
        self._stalls &= standing

    def _start(self, scene: FailureSnapshot, recovery: RecoveryRecord | None, waited_for: str = "") -> None:
        if self._running >= MOST_AT_ONCE:
            return
        self._running += 1
        self._tasks.start(f"explain {scene.core.state.job}", self._explain(scene, recovery, waited_for))

    async def _explain(
        self, scene: FailureSnapshot, recovery: RecoveryRecord | None, waited_for: str
    ) -> None:
        begun = time.monotonic()
        try:
            if not scene.epoch.pending_evictions and not waited_for:
                await asyncio.sleep(_COMPANIONS_S)
            targets = scene.places(scene.case(waited_for).concerned(), self._peer_addresses)
            seen = await rank_probe.ask(targets, self._access)
            # Aborts, evictions and ends of processes that happened during the probes count, too.
            diagnosis = diagnose(scene.case(waited_for), seen)
            diagnosis = replace(diagnosis, t=time.time(), seconds=time.monotonic() - begun)
        except Exception as error:
            log.exception("a failure cannot be explained", extra=fields(job=scene.core.state.job))
            diagnosis = Diagnosis(
                UNKNOWN, (), f"asking for it failed: {type(error).__name__}: {error}", time.time()
            )
        finally:
            self._running -= 1
        incident_id = ""
        if recovery is not None:
            recovery.diagnosis = diagnosis.to_json()
            incident_id = recovery.incident_id
            self._keep(recovery)
        about = diagnosis.about[0] if len(diagnosis.about) == 1 else ""
        whom = f" ({', '.join(diagnosis.about)})" if len(diagnosis.about) > 1 else ""
        kind = "diagnosis" if recovery is not None else "stalled"
        self._tell(kind, about, f"{diagnosis.verdict}{whom}: {diagnosis.why}", incident_id)
