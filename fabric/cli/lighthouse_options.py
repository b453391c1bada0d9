"""The options of every command that calls a lighthouse: its address, the job, the token and TLS."""

import getpass
import os
import socket
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

import click

from fabric.errors import ConfigError
from fabric.runtime.http.lighthouse_client import Lighthouses
from fabric.runtime.http.tls import TLS_FILES, Tls
from fabric.runtime.http.token_file import TokenFile
from fabric.store import EtcdAccess

_FILE = click.Path(path_type=Path)


def store_options(required: bool) -> Callable[..., Any]:
    """Return the decorator that adds ``--store`` and the options that ``store_access`` reads."""
    options = (
        click.option(
            "--store",
            required=required,
            help="sqlite:///PATH, etcd://HOST:PORT,HOST:PORT or etcds://...",
        ),
        click.option(
            "--store-tls",
            type=_FILE,
            help="etcds: folder with ca.crt, and for mTLS tls.crt and tls.key of this lighthouse (PEM).",
        ),
        click.option("--store-user", default="", help="etcd's user, where it has users."),
        click.option("--store-password-file", type=_FILE, help="File with that user's password."),
    )
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


def store_access(given: dict[str, Any]) -> EtcdAccess:
    """Return the credentials that these options name; remove the options from ``given``."""
    folder: Path | None = given.pop("store_tls")
    cert, key, ca = (None if folder is None else folder / name for name in TLS_FILES)
    has_own = any(file is not None and file.exists() for file in (cert, key))
    return EtcdAccess(
        ca_file=ca,
        cert_file=cert if has_own else None,
        key_file=key if has_own else None,
        user=given.pop("store_user"),
        password_file=given.pop("store_password_file"),
    )


def current_tls() -> Tls:
    """Return the TLS of the running command, by ``fabric --tls``. Raises ConfigError."""
    context = click.get_current_context(silent=True)
    tls = context.find_object(Tls) if context is not None else None
    tls = tls if tls is not None else Tls()
    tls.check()
    return tls


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
out_option = partial(click.option, "--out", type=_FILE, help="Folder of the run.")
why_option = partial(click.option, "--why", help="The reason, for the record.")
replicas_option = partial(click.option, "--replicas", show_default=True, help="How many replicas train.")
_OPTIONS = (
    click.option(
        "--lighthouse",
        envvar="FABRIC_LIGHTHOUSE",
        default="",
        help="URLs, separated by commas; FABRIC_LIGHTHOUSE.",
    ),
    click.option("--job", envvar="FABRIC_JOB", default="", help="Which job; FABRIC_JOB."),
    click.option(
        "--token-file",
        envvar="FABRIC_TOKEN_FILE",
        type=click.Path(path_type=Path),
        help="File with the token; FABRIC_TOKEN_FILE.",
    ),
)


def lighthouse_only_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--lighthouse`` and ``--token-file``, for a command whose job has an option of its own."""
    return _OPTIONS[0](_OPTIONS[2](command))


def lighthouse_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--lighthouse``, ``--job`` and ``--token-file``, for ``lighthouses_of``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def lighthouses_of(lighthouse: str, job: str, token_file: Path | None, *, needs_job: bool) -> Lighthouses:
    """Make the client of the lighthouses in the options. Raises ConfigError for impossible options."""
    urls = tuple(part.strip().rstrip("/") for part in lighthouse.split(",") if part.strip())
    if not urls:
        raise ConfigError(
            "no lighthouse is named: give --lighthouse http://host:port, or set FABRIC_LIGHTHOUSE"
        )
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f'the lighthouse "{url[:200]}" is no URL: give addresses such as http://host:port'
            )
    if needs_job and not job:
        raise ConfigError("no job is named: give --job NAME, or set FABRIC_JOB (`fabric status` lists them)")
    return Lighthouses(urls, job, TokenFile(token_file), current_tls())


def operator_name() -> str:
    """Return this user at this host, for the record."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
