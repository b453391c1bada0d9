"""``fabric lighthouse``: run one lighthouse in the foreground."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import uvloop

from fabric.cli.lighthouse_options import current_tls, store_access, store_options
from fabric.errors import ConfigError
from fabric.lighthouse.jobs.jobs import Quotas
from fabric.lighthouse.service import THRESHOLDS, LighthouseSettings, run
from fabric.model import Policy
from fabric.protocol.leader.core import LeaderConfig
from fabric.protocol.leader.liveness import LivenessConfig
from fabric.runtime import logs
from fabric.runtime.config import parse_bind
from fabric.runtime.http.connection_limit import raise_descriptor_limit

_FILE = click.Path(path_type=Path)
# Limit -> its default.
_LIMITS: dict[str, float] = {
    "autonomy-s": LeaderConfig().autonomy_s,
    "failures": LeaderConfig().failures,
    "lease-s": 5.0,
    "max-jobs": Quotas().jobs,
    "max-replicas": Quotas().replicas,
    "retain-s": Quotas().retain_s,
    "silence-s": LivenessConfig().silence_s,
    "start-wait-s": Policy().start_wait_s,
    "store-wait-s": 15.0,
}


@click.command()
@store_options(required=True)
@click.option(
    "--bind",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on, and :PORT or a range such as :8600-8609; else any port.",
)
@click.option("--advertise", default="", help="Base URL that others reach this one by.")
@click.option("--token-file", type=_FILE, help="File with the token that everybody must show.")
@click.option("--job-tokens", type=_FILE, help="Folder with a file per job: that job's own token.")
@click.option("--drill-token-file", type=_FILE, help="File with the token that has the right to drill jobs.")
@click.option(
    "--ckpt-networks",
    default="",
    help="Networks (10.1.0.0/16,...) in which checkpoint servers may be asked besides where they come from.",
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=NUMBER",
    help="Another limit than "
    + ", ".join(f"{name}={value:g}" for name, value in _LIMITS.items())
    + "; several.",
)
@click.option("--namespace", default="default", show_default=True, help="Name of this cluster in the store.")
@click.option("--ready-file", type=_FILE, help="File to write the URL to (JSON) once requests are answered.")
@click.option("--otlp", default="", help="Base URL of an OpenTelemetry collector for traces (extra otel).")
@click.option(
    "--log",
    "form",
    envvar="FABRIC_LOG",
    default="text",
    type=click.Choice(logs.FORMATS),
    help="How to log: text, or a JSON object per line (FABRIC_LOG).",
)
def lighthouse(form: str, bind: str, limits: Sequence[str], **given: Any) -> None:
    """Decide who takes part in each job, until SIGTERM. Start several on one store: one of them leads.

    \b
    Limits, in seconds where the name ends with -s:
      autonomy-s    the trainers' FABRIC_AUTONOMY_S: how long they step without any lighthouse
      failures      so many within half an hour keep a replica or a host out for a while; 0: never
      lease-s       how long a dead leader's place is kept
      max-jobs      most jobs in progress at once
      max-replicas  replicas of each job
      retain-s      how long the record of a complete job is kept
      silence-s     silence of a dead member
      start-wait-s  how long the first start waits for all replicas
      store-wait-s  how long to wait for the store
    """
    logs.set_up("lighthouse", form)
    limit = parse_limits(limits)
    leader = LeaderConfig(
        policy=Policy(start_wait_s=limit["start-wait-s"]),
        liveness=LivenessConfig(silence_s=limit["silence-s"]),
        autonomy_s=limit["autonomy-s"],
        failures=int(limit["failures"]),
    )
    host, port = parse_bind(bind, "--bind")
    settings = LighthouseSettings(
        bind=host,
        port=port,
        lease_s=limit["lease-s"],
        store_wait_s=limit["store-wait-s"],
        leader=leader,
        quotas=Quotas(int(limit["max-jobs"]), int(limit["max-replicas"]), limit["retain-s"]),
        store_access=store_access(given),
        tls=current_tls(),
        **given,
    )
    raise_descriptor_limit()  # each session needs a file descriptor
    gc.set_threshold(*THRESHOLDS)
    uvloop.run(run(settings))


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """Return all limits, with those of ``texts`` such as ``lease-s=2`` changed. Raises ConfigError."""
    limits = dict(_LIMITS)
    for text in texts:
        name, _, number = text.partition("=")
        if name not in _LIMITS:
            raise ConfigError(f'--limit is "{text[:80]}": the limits are {", ".join(_LIMITS)}')
        try:
            limits[name] = type(_LIMITS[name])(number)
        except ValueError:
            raise ConfigError(f'--limit is "{text[:80]}": give {name}={_LIMITS[name]:g} or such') from None
    return limits
