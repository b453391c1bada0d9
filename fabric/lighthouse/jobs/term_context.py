"""The context that all jobs of one term share: the term, the leader's settings, metrics and tasks."""

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from fabric.lighthouse.connections.validation import MAX_REPLICAS
from fabric.lighthouse.diagnosis.rank_probe import ProbeAccess
from fabric.lighthouse.election.election import Term
from fabric.lighthouse.telemetry.metrics import LighthouseMetrics
from fabric.lighthouse.telemetry.traces import Traces
from fabric.protocol.leader.core import LeaderConfig
from fabric.runtime.tasks import Tasks


@dataclass(frozen=True, slots=True)
class TermContext:
    """The context of one term."""

    term: Term
    config: LeaderConfig
    metrics: LighthouseMetrics
    tasks: Tasks
    access_to: Callable[[str, bool], ProbeAccess] = lambda _job, _with_own: ProbeAccess()
    traces: Traces | None = None
    clock: Callable[[], float] = time.monotonic
    max_replicas: int = MAX_REPLICAS


def entropy() -> random.Random:
    """Return a source of nonces, by which a writer recognises its own record; each lighthouse has its own."""
    return random.Random(secrets.randbits(128))  # noqa: S311
