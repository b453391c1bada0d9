"""``fabric doctor``: finds problems of this host that would stop a replica, and names a remedy for each."""

import asyncio
import email.utils
import fcntl
import mmap
import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import quote

import aiohttp
import click

from fabric import command_of_another
from fabric.ckpt_server.durable.storage import ANSWER_S, Storage, StorageCall, StorageError
from fabric.cli.lighthouse_options import store_access, store_options
from fabric.errors import ConfigError, FabricError, ProtocolError
from fabric.model import Value, printable
from fabric.runtime.config import (
    Settings,
    advertised_hosts,
    given_text,
    refuse_unknown_variables,
    settings,
)
from fabric.runtime.http import bind_first_free, parse_ports
from fabric.runtime.http.lighthouse_client import describe, permanent_cause, understood
from fabric.runtime.system_calls import (
    NetworkInterface,
    available_bytes,
    create_memfd,
    network_interfaces,
    open_pidfd,
    refused,
    speeds_of,
)
from fabric.store import EtcdAccess, open_store

_ANSWER_S = 3.0
_OPEN_FILES = 1024
_CLOCK_S = 5.0
# Room for two snapshot slots, and for six gradient slots (after a catch-up), a third as large with AdamW.
_STATE_COPIES = 4.0


class Finding(Value):
    """``level``: ok, warn (works, but should be checked) or bad (does not work). ``do``: the remedy."""

    level: str
    what: str
    do: str = ""


@click.command()
@store_options(required=False)
@click.option("--state-gb", default=0.0, help="Parameters and optimizer state of one process, in GB.")
def doctor(store: str | None, state_gb: float, **access: Any) -> None:
    """Check this host for a replica with the FABRIC_* settings that are set, and say what to do.

    With --store it looks at the store too; where lighthouses run, that is enough.
    """
    worst = 0
    for_replica = bool(given_text("replica")) or not store
    for finding in examine(store or "", state_gb, store_access(access), replica=for_replica):
        worst = max(worst, ("ok", "warn", "bad").index(finding.level))
        what, advice = printable(finding.what), printable(finding.do)  # a lighthouse's own words may be in it
        click.echo(f"{finding.level:<5}{what}" + (f"\n     {advice}" if advice else ""))
    sys.exit(1 if worst == 2 else 0)


def examine(
    store: str, state_gb: float, access: EtcdAccess | None = None, *, replica: bool = True
) -> Iterator[Finding]:
    """Yield all findings; those about a replica's settings only with ``replica``."""
    yield from _versions()
    try:
        if replica:
            chosen = settings()
        else:
            refuse_unknown_variables()
    except ConfigError as error:
        what = "the settings cannot be used" if replica else "a variable is unknown"
        yield Finding("bad", what, str(error))
    else:
        if replica and not chosen.disable:
            for check in (_token, _run_dir, _durable, _bind, _advertise):
                yield check(chosen)
            yield from asyncio.run(_lighthouses(chosen))
    yield _open_files()
    if replica and sys.platform == "linux":
        yield from _system_calls()
    yield _memory(state_gb)
    if store:
        yield from asyncio.run(_store(store, access))


def _versions() -> Iterator[Finding]:
    yield Finding("ok", f"Python {platform.python_version()}, {platform.system()} {platform.release()}")
    if sys.platform != "linux":
        yield Finding("bad", f"this is {sys.platform}", "fabric needs Linux: memfd, pidfd and /proc")
    try:
        torch = version("torch")
    except PackageNotFoundError:
        yield Finding("bad", "torch is not installed", "pip install torch (2.11 or newer)")
        return
    if clash := command_of_another():
        yield Finding("warn", clash, "the last of both that is installed has the name")
    numbers = tuple(int(part) for part in torch.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < (2, 11):
        yield Finding("bad", f"torch {torch} is too old", "install torch 2.11 or newer")
    else:
        yield Finding("ok", f"torch {torch}")


def _token(chosen: Settings) -> Finding:
    if chosen.token_file is None:
        return Finding(
            "warn", "no token file is set", "set FABRIC_TOKEN_FILE wherever others reach this network"
        )
    try:
        mode = chosen.token_file.stat().st_mode
        _ = chosen.token
    except (OSError, FabricError) as error:
        return Finding("bad", f"the token file {chosen.token_file} cannot be used", str(error))
    if mode & 0o077:
        return Finding("warn", f"others can read {chosen.token_file}", f"chmod 600 {chosen.token_file}")
    return Finding("ok", f"token file {chosen.token_file}")


def _run_dir(chosen: Settings) -> Finding:
    home = chosen.home
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(
            "bad", f"the run folder {home} cannot be made here", "set FABRIC_RUN_DIR to a folder of this user"
        )
    return Finding("ok", f"run folder {home}")


def _durable(chosen: Settings) -> Finding:
    if not chosen.durable:
        return Finding("ok", "no durable checkpoints: FABRIC_DURABLE is not set")
    try:
        StorageCall(chosen.durable, Storage(chosen.durable).try_writing).wait(ANSWER_S)
    except StorageError as error:
        return Finding(
            "bad", str(error), "set FABRIC_DURABLE to a folder or fsspec URL that this user may write to"
        )
    return Finding("ok", f"durable checkpoints can be written to {chosen.durable}")


def _bind(chosen: Settings) -> Finding:
    try:
        probe = bind_first_free(chosen.host, parse_ports(chosen.ports))
    except FabricError as error:
        return Finding("bad", f"no port of {chosen.ports} is free at {chosen.host}", str(error))
    port = probe.getsockname()[1]
    probe.close()
    return Finding("ok", f"listens at {chosen.host}, for instance on port {port}")


def _advertise(chosen: Settings) -> Finding:
    hosts, addresses = advertised_hosts(chosen), set()
    for host in hosts:
        try:
            places = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
        except OSError as error:
            return Finding(
                "bad",
                f"the advertised name {host} has no address ({error})",
                "set FABRIC_ADVERTISE to one that peers know",
            )
        loopback = all(address.startswith("127.") or address == "::1" for address in places)
        if loopback and chosen.host not in ("127.0.0.1", "::1", "localhost"):
            return Finding(
                "bad", f"{host} is this host's own loopback: no peer reaches it there", "set FABRIC_ADVERTISE"
            )
        addresses |= places
    return _interface(" and ".join(hosts), addresses, network_interfaces())


def _interface(hosts: str, addresses: set[str], interfaces: list[NetworkInterface]) -> Finding:
    """Name the interfaces that peers use, and a faster one that this host has."""
    over, faster = speeds_of(addresses, interfaces)
    sentence = f"peers reach it at {hosts} ({', '.join(sorted(addresses))}{over and ' on ' + over})"
    if faster is None:
        return Finding("ok", sentence)
    return Finding(
        "warn",
        f"{sentence}, and {faster.name} at {faster.address} has {faster.mbit_s} Mbit/s",
        f"if peers reach that too, set FABRIC_ADVERTISE={faster.address}",
    )


async def _lighthouses(chosen: Settings) -> list[Finding]:
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    connector = aiohttp.TCPConnector(ssl=chosen.tls.client_context() or True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        findings = [finding for url in chosen.lighthouse for finding in await _lighthouse(http, url, chosen)]
    if not any(finding.level == "ok" for finding in findings):
        findings.append(Finding("bad", "no lighthouse works", "start one, or correct FABRIC_LIGHTHOUSE"))
    return findings


async def _lighthouse(http: aiohttp.ClientSession, url: str, chosen: Settings) -> list[Finding]:
    tls = chosen.tls
    try:
        async with http.get(f"{url}/healthz") as answer:
            body = await answer.json()
            date = email.utils.parsedate_to_datetime(answer.headers["Date"]).timestamp()
        with understood(url):
            role = "leads" if body["is_leader"] else f"follows {body['leader']}"
            ok, reachable = bool(body["ok"]), bool(body["store_reachable"])
        refused = await _refuses(http, url, chosen)
    except ProtocolError as error:
        return [Finding("warn", f"{url} is no lighthouse of this version", str(error))]
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, RecursionError) as error:
        advice = "docs/jobs.md, 'TLS'" if permanent_cause(error, tls) else "is a lighthouse there?"
        return [Finding("warn", f"{url} does not answer ({describe(error, url, tls)})", advice)]
    findings = []
    if ok:
        findings.append(Finding("ok", f"{url} {role}"))
    else:
        idle = "it leads, and has yet to read the jobs' records" if body["is_leader"] else "no leader"
        incident_id = idle if reachable else "its store does not answer"
        findings.append(Finding("warn", f"{url}: {incident_id}", "docs/runbook.md, 'No lighthouse leads'"))
    if abs(date - time.time()) > _CLOCK_S:
        apart = f"the clocks of {url} and this host are {abs(date - time.time()):.0f} s apart"
        findings.append(Finding("warn", apart, "only logs and tables suffer, no decision: run an NTP client"))
    if refused:
        findings.append(Finding("bad", f"{url} does not let this job in", refused))
    return findings


async def _refuses(http: aiohttp.ClientSession, url: str, chosen: Settings) -> str:
    """Return why this lighthouse refuses this job, or an empty string; a follower answers, too."""
    try:
        token = chosen.token.decode()
    except ConfigError:
        return ""  # another finding reports the unreadable token
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    path = f"{url}/v1/jobs/{quote(chosen.job, safe='')}"
    async with http.get(path, headers=headers, allow_redirects=False) as answer:
        if answer.status != 401:
            return ""
        with understood(url):
            return str((await answer.json())["error"])


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES:
        return Finding(
            "warn", f"at most {soft} open files", f"ulimit -n {_OPEN_FILES}, or LimitNOFILE= of its unit"
        )
    return Finding("ok", f"at most {'any number of' if soft == resource.RLIM_INFINITY else soft} open files")


def _system_calls() -> Iterator[Finding]:
    """Try what a replica asks of the kernel, and a container's security profile may refuse."""
    memory, call = -1, "pidfd_open"
    try:
        os.close(open_pidfd(os.getpid()))
        memory = create_memfd("fabric-doctor")
        call = "fallocate"
        os.posix_fallocate(memory, 0, mmap.PAGESIZE)
        call = "fcntl"
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        call = "flock"
        fcntl.flock(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        call = "eventfd"
        os.close(os.eventfd(0))
        yield Finding("ok", "the kernel allows the system calls of a replica")
    except (OSError, ConfigError) as error:
        why = str(error)
        if isinstance(error, OSError):
            why = f"a replica cannot do its work {refused(call, error)}"
        yield Finding("bad", "the kernel refuses a system call of a replica", why)
    finally:
        if memory >= 0:
            os.close(memory)


def _memory(state_gb: float) -> Finding:
    free = available_bytes()
    if not state_gb:
        return Finding(
            "ok", f"{free / 1e9:.1f} GB of memory are free (--state-gb says whether that is enough)"
        )
    needed = state_gb * 1e9 * _STATE_COPIES
    if needed > free:
        return Finding(
            "bad",
            f"snapshots of {state_gb:g} GB need about {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free",
            "a host with more memory, or more ranks per replica: each holds its part only",
        )
    return Finding("ok", f"snapshots of {state_gb:g} GB need about {needed / 1e9:.1f} of {free / 1e9:.1f} GB")


async def _store(url: str, access: EtcdAccess | None) -> list[Finding]:
    try:
        store = open_store(url, access=access)
    except ConfigError as error:
        return [Finding("bad", "the store cannot be used", str(error))]
    try:
        store_id = await store.connect()
    except FabricError as error:
        return [Finding("bad", "the store cannot be used", str(error))]
    finally:
        await store.close()
    return [
        Finding("ok", f"store {store_id}"),
        *(Finding("warn", "the store works, but", w) for w in store.warnings),
    ]
