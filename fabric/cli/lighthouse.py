"""``fabric lighthouse``: run one lighthouse in the foreground."""

import gc
from pathlib import Path
from typing import Any

import click
import uvloop

from fabric.cli.lighthouse_options import current_tls, store_access, store_access_options
from fabric.lighthouse.jobs.jobs import Quotas
from fabric.lighthouse.service import THRESHOLDS, LighthouseSettings, run
from fabric.model import Policy
from fabric.protocol.leader.core import LeaderConfig
from fabric.protocol.leader.liveness import LivenessConfig
from fabric.runtime import logs
from fabric.runtime.http.connection_limit import raise_descriptor_limit

_FILE = click.Path(path_type=Path)
_LIVENESS = LivenessConfig()


@click.command()
@click.option("--store", required=True, help="sqlite:///PATH, etcd://HOST:PORT,HOST:PORT or etcds://...")
@store_access_options
@click.option("--bind", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default="0", show_default=True, help="Port, range such as 8600-8609, or 0 for any.")
@click.option("--advertise", default="", help="Base URL that others reach this one by.")
@click.option("--token-file", type=_FILE, help="File with the token that everybody must show.")
@click.option("--job-tokens", type=_FILE, help="Folder with a file per job: that job's own token.")
@click.option("--drill-token-file", type=_FILE, help="File with the token that has the right to drill jobs.")
@click.option(
    "--ckpt-networks",
    default="",
    help="Networks (10.1.0.0/16,...) in which checkpoint servers may be asked besides where they come from.",
)
@click.option("--max-jobs", default=Quotas().jobs, show_default=True, help="Most jobs in progress at once.")
@click.option("--max-replicas", default=Quotas().replicas, show_default=True, help="Replicas of each job.")
@click.option(
    "--retain-s",
    default=Quotas().retain_s,
    show_default=True,
    help="How long the record of a complete job is kept.",
)
@click.option("--namespace", default="default", show_default=True, help="Name of this cluster in the store.")
@click.option("--ready-file", type=_FILE, help="File to write the URL to (JSON) once requests are answered.")
@click.option("--lease-s", default=5.0, show_default=True, help="How long a dead leader's place is kept.")
@click.option("--store-wait-s", default=15.0, show_default=True, help="How long to wait for the store.")
@click.option("--silence-s", default=_LIVENESS.silence_s, show_default=True, help="Silence of a dead member.")
@click.option(
    "--start-wait-s",
    default=Policy().start_wait_s,
    show_default=True,
    help="How long the first start waits for all replicas.",
)
@click.option(
    "--autonomy-s",
    default=LeaderConfig().autonomy_s,
    show_default=True,
    help="The trainers' FABRIC_AUTONOMY_S: how long they step without any lighthouse.",
)
@click.option("--otlp", default="", help="Base URL of an OpenTelemetry collector for traces (extra otel).")
@click.option(
    "--log",
    "form",
    envvar="FABRIC_LOG",
    default="text",
    type=click.Choice(logs.FORMATS),
    help="How to log: text, or a JSON object per line (FABRIC_LOG).",
)
@click.option(
    "--failures",
    default=LeaderConfig().failures,
    show_default=True,
    help="This many failures within half an hour keep a replica or a host out for a while; 0: never.",
)
def lighthouse(**given: Any) -> None:
    """Decide who takes part in each job, until SIGTERM. Start several on one store: one of them leads."""
    take = given.pop
    logs.set_up("lighthouse", take("form"))
    leader = LeaderConfig(
        policy=Policy(start_wait_s=take("start_wait_s")),
        liveness=LivenessConfig(silence_s=take("silence_s")),
        autonomy_s=take("autonomy_s"),
        failures=take("failures"),
    )
    access = store_access(given)
    quotas = Quotas(take("max_jobs"), take("max_replicas"), take("retain_s"))
    settings = LighthouseSettings(
        leader=leader, quotas=quotas, store_access=access, tls=current_tls(), **given
    )
    raise_descriptor_limit()  # each session needs a file descriptor
    gc.set_threshold(*THRESHOLDS)
    uvloop.run(run(settings))
