"""The lighthouse process: starts and ends store, election, jobs and HTTP in order.

A signal or a defect in one of its tasks ends the process. Its supervisor starts it again, and another
lighthouse leads meanwhile. Before it ends, it gives the lease back while HTTP still works. So sessions close
with a reason and find the next leader at once.
"""

import asyncio
import gc
import json
import logging
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

from msgspec import field

from fabric.errors import ConfigError, FabricError, StoreUnavailable
from fabric.lighthouse.connections.validation import MOST_REPLICAS, check_name
from fabric.lighthouse.diagnosis.rank_probe import AllowedHosts, ProbeAccess
from fabric.lighthouse.election import (
    Candidate,
    Commit,
    Election,
    ElectionHooks,
    StoreProbe,
    StoreThread,
    Term,
)
from fabric.lighthouse.http.routes import LighthouseParts, make_app
from fabric.lighthouse.http.tokens import Tokens
from fabric.lighthouse.jobs.jobs import Jobs, Quotas
from fabric.lighthouse.telemetry import LighthouseMetrics, Traces
from fabric.model import Value
from fabric.protocol.leader.core import LeaderConfig
from fabric.runtime.config import supervisor
from fabric.runtime.http import url_host
from fabric.runtime.http.http_service import check_exposure, serve
from fabric.runtime.http.tls import Tls
from fabric.runtime.http.token_file import TokenFile
from fabric.runtime.tasks import Tasks
from fabric.store import open_store, shown_url
from fabric.store.base import Store
from fabric.store.etcd_http import EtcdAccess

# Runs Python's cyclic garbage collector while the lighthouse is idle.
#
# By default the collector scans every object of every session again and again: with 10,000 sessions this
# takes 3 s of each 10 s. It also runs for a quarter of a second while an epoch is sent to all members,
# because sending makes objects. So this module makes the young generations larger, and a task collects the
# oldest generation.


# Heartbeats leave no cycles, so only new sessions (some 300) make the youngest generation due. The third
# number keeps Python from collecting the oldest generation.
THRESHOLDS = (50_000, 10, 1 << 30)
# The number of collections of the middle generation that make a full collection due, as in Python's default.
WHOLE = 10
LOOK_S = 0.25
# A due collection runs after so many idle looks in a row, or after so many looks of any kind.
CALM_LOOKS = 8
MOST_LOOKS = 240


class CollectionSchedule:
    """Chooses at each look the generation to collect."""

    def __init__(self) -> None:
        self._calm = self._waited = 0

    def look(self, is_calm: bool, counts: tuple[int, int, int]) -> int | None:
        """Return the generation to collect now, or None. ``counts``: from ``gc.get_count``."""
        _, young, middle = counts
        self._calm = self._calm + 1 if is_calm else 0
        self._waited = self._waited + 1 if young or middle >= WHOLE else 0
        if not self._waited or (self._calm < CALM_LOOKS and self._waited < MOST_LOOKS):
            return None
        self._waited = 0
        return 2 if middle >= WHOLE else 1


async def collect_when_calm(is_calm: Callable[[], bool]) -> None:
    """Collect for ever: a due generation after two calm seconds, or at the latest after a minute."""
    due = CollectionSchedule()
    while True:
        await asyncio.sleep(LOOK_S)
        generation = due.look(is_calm(), gc.get_count())
        if generation is not None:
            gc.collect(generation)


log = logging.getLogger(__name__)

_SHUTDOWN_S = 2.0
_STORE_RETRY_S = (0.1, 1.0)


class LighthouseSettings(Value):
    """``store``: its URL; ``store_access``: the credentials for it. ``bind``, ``port`` (or a range): where to
    listen; ``advertise``: the base URL that others use, empty for the bound address. ``namespace`` separates
    several fabrics in one store. ``tls``: the certificates of its HTTP. ``ready_file`` is written once
    requests can be answered. ``lease_s``: how long the others wait for a dead leader. ``store_wait_s``: how
    long to wait for a store that is not up yet. ``token_file`` opens every job, each file in ``job_tokens``
    the job of its name. ``otlp``: base URL of an OpenTelemetry collector, empty for no traces."""

    store: str
    bind: str = "127.0.0.1"
    port: str = "0"
    advertise: str = ""
    token_file: Path | None = None
    job_tokens: Path | None = None
    drill_token_file: Path | None = None
    namespace: str = "default"
    ready_file: Path | None = None
    lease_s: float = 5.0
    store_wait_s: float = 15.0
    leader: LeaderConfig = field(default_factory=LeaderConfig)
    quotas: Quotas = field(default_factory=Quotas)
    otlp: str = ""
    ckpt_networks: str = ""
    store_access: EtcdAccess = field(default_factory=EtcdAccess)
    tls: Tls = field(default_factory=Tls)


async def run(settings: LighthouseSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises FabricError if serving cannot begin or must end."""
    check_settings(settings)
    own = TokenFile(settings.token_file)
    check_exposure(
        settings.bind, (own.shown() or None) if settings.job_tokens is None else "one for each job"
    )
    tokens = Tokens(own, settings.job_tokens, TokenFile(settings.drill_token_file))
    deaths: list[str] = []
    _forget_ready(settings.ready_file)

    def on_death(name: str, error: BaseException) -> None:
        deaths.append(f"the task {name} died ({type(error).__name__}: {error})")
        work.cancel()

    work = asyncio.get_running_loop().create_task(_serve(settings, tokens, on_death))
    with _signals(work.cancel):
        try:
            await work
        except asyncio.CancelledError:
            if deaths:
                raise FabricError(
                    f"the lighthouse met a defect of its own, {deaths[0]}: see its log"
                ) from None
        finally:
            _forget_ready(settings.ready_file)
    log.info("the lighthouse has ended")


def check_settings(settings: LighthouseSettings) -> None:
    """Raise FabricError for settings that cannot be used."""
    check_name("namespace", settings.namespace)
    AllowedHosts.parse(settings.ckpt_networks)
    if not 1 <= settings.lease_s <= 3600:
        raise ConfigError(f"the lease is {settings.lease_s:g} s: give 1 to 3600 seconds")
    liveness, policy = settings.leader.liveness, settings.leader.policy
    for name, value in (
        ("silence-s", liveness.silence_s),
        ("start-wait-s", policy.start_wait_s),
        ("autonomy-s", settings.leader.autonomy_s),
    ):
        if not 0.25 <= value <= 1e6:
            raise ConfigError(f"{name} is {value:g}: give 0.25 to 1000000 seconds")
    if not 0 <= settings.leader.failures <= 1000:
        raise ConfigError(f"failures is {settings.leader.failures}: give 0 (never) to 1000")
    quotas = settings.quotas
    if min(quotas.jobs, quotas.replicas) < 1 or quotas.replicas > MOST_REPLICAS:
        raise ConfigError(f"max-jobs and max-replicas: give at least 1, and at most {MOST_REPLICAS} replicas")
    if not 0.25 <= quotas.retain_s <= 1e9:
        raise ConfigError(f"retain-s is {quotas.retain_s:g}: give 0.25 to 1e9 seconds")
    if settings.job_tokens is not None and not settings.job_tokens.is_dir():
        raise ConfigError(
            f"the folder of job tokens {settings.job_tokens} does not exist: make it, with a file per job"
        )
    if settings.advertise and not settings.advertise.startswith(("http://", "https://")):
        raise ConfigError(
            f'the advertised address "{settings.advertise[:200]}" is no URL: give one such as http://host:port'
        )
    if settings.ready_file is not None and not settings.ready_file.parent.is_dir():
        raise ConfigError(f"the folder of the ready file {settings.ready_file} does not exist: make it first")


async def _serve(
    settings: LighthouseSettings, tokens: Tokens, on_death: Callable[[str, BaseException], None]
) -> None:
    store = _handle(settings)
    async with AsyncExitStack() as stack:
        await _connect(store, settings.store_wait_s)
        stack.push_async_callback(store.close)
        for warning in store.warnings:
            log.warning("%s", warning)
        tasks = Tasks(on_death)
        traces = Traces(settings.otlp) if settings.otlp else None
        if traces is not None:
            stack.push_async_callback(asyncio.to_thread, traces.close)
        writer = StoreThread(_handle(settings))
        stack.push_async_callback(writer.close)
        parts, settled = _assemble(store, settings, tasks, tokens, writer.commit)
        parts.jobs.traces = traces
        runner, port = await serve(
            make_app(parts, tokens, (settings.advertise, settings.bind)),
            settings.bind,
            settings.port,
            ssl_context=settings.tls.server_context(),
            shutdown_s=_SHUTDOWN_S,
            cancel_abandoned=True,
            limit=parts.metrics.connections,
        )
        stack.push_async_callback(runner.cleanup)
        # The tasks are closed first: the end of the election's task resigns and closes the sessions.
        stack.push_async_callback(tasks.close)
        url = settings.advertise.rstrip("/") or f"{settings.tls.scheme}://{url_host(settings.bind)}:{port}"
        tasks.start("election", parts.election.run(url))
        tasks.start("collector", collect_when_calm(lambda: parts.jobs.are_calm))
        log.info("the lighthouse listens at %s", url)
        systemd = supervisor()
        tasks.start("watchdog", systemd.show_life())
        systemd.tell("READY=1")
        await settled.wait()
        if (path := settings.ready_file) is not None:
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            try:  # it appears whole
                draft.write_text(
                    json.dumps({"url": url, "pid": os.getpid(), "id": parts.election.me.id}) + "\n"
                )
                draft.replace(path)
            except OSError as error:
                raise ConfigError(
                    f"the ready file {path} cannot be written ({error.strerror}): name one in a folder of "
                    "this user"
                ) from error
        await asyncio.Event().wait()


def _assemble(
    store: Store, settings: LighthouseSettings, tasks: Tasks, tokens: Tokens, commit: Commit
) -> tuple[LighthouseParts, asyncio.Event]:
    """Make the parts, and an event that is set when requests can be answered for the first time."""
    metrics = LighthouseMetrics()

    hosts = AllowedHosts.parse(settings.ckpt_networks)

    def access_to(job: str, is_trusted: bool) -> ProbeAccess:
        return ProbeAccess(tokens.shown_to_servers(job, is_trusted=is_trusted), settings.tls, hosts)

    jobs = Jobs(
        store, settings.namespace, settings.leader, metrics, tasks, access_to, settings.quotas, commit
    )
    settled = asyncio.Event()

    def elected(term: Term) -> None:
        jobs.begin(term)
        tasks.start("readiness", jobs_loaded())

    async def jobs_loaded() -> None:
        await jobs.loaded.wait()
        settled.set()

    def followed(_: Candidate) -> None:
        settled.set()

    hooks = ElectionHooks(elected=elected, lost=jobs.end, followed=followed, written=metrics.election_write)
    lease_store = _handle(settings)
    election = Election(store, settings.namespace, settings.lease_s, hooks, lease_store=lease_store)
    probe = StoreProbe(store, election.prefix, shown_url(settings.store))
    tasks.start("write probe", probe.watch_writes())
    parts = LighthouseParts(election, jobs, metrics, probe)
    metrics.observe(lambda: parts.leads, jobs.gauges)
    metrics.watch_writes(lambda: not probe.refusal)
    return parts, settled


def _handle(settings: LighthouseSettings) -> Store:
    """Make a handle on the store; each thread needs its own."""
    return open_store(settings.store, access=settings.store_access)


async def _connect(store: Store, wait_s: float) -> None:
    """Connect to the store; try for ``wait_s`` while it does not answer; raise other errors at once."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    jitter = random.Random()  # noqa: S311 - spreads attempts, protects nothing
    pause_s = _STORE_RETRY_S[0]
    logged = ""
    while True:
        try:
            await store.connect()
            return
        except StoreUnavailable as error:
            if loop.time() + pause_s > deadline:
                raise
            if str(error) != logged:
                logged = str(error)
                log.warning("waiting for the store: %s", logged)
        await asyncio.sleep(pause_s * jitter.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, _STORE_RETRY_S[1])


def _forget_ready(path: Path | None) -> None:
    """Remove the ready file of an earlier process, or of this one."""
    if path is not None:
        with suppress(OSError):
            path.unlink(missing_ok=True)


@contextmanager
def _signals(end: Callable[[], object]) -> Iterator[None]:
    """Call ``end`` at the first SIGTERM or SIGINT, and ignore later ones."""
    loop = asyncio.get_running_loop()
    handled = (signal.SIGTERM, signal.SIGINT)
    asked = False

    def once() -> None:
        nonlocal asked
        if not asked:
            asked = True
            end()

    for number in handled:
        loop.add_signal_handler(number, once)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
