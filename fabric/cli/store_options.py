"""The credentials for the store: the same options for every command that names a store."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fabric.store import EtcdAccess

_FILE = click.Path(path_type=Path)
_OPTIONS = (
    click.option("--store-ca", type=_FILE, help="etcds: the certificate authority to trust (PEM)."),
    click.option(
        "--store-cert", type=_FILE, help="etcds: this lighthouse's own certificate (PEM), for mTLS."
    ),
    click.option("--store-key", type=_FILE, help="etcds: the key of --store-cert."),
    click.option("--store-user", default="", help="etcd's user, where it has users."),
    click.option("--store-password-file", type=_FILE, help="File with that user's password."),
)


def store_access_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--store-ca`` and the other options that ``store_access`` reads."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def store_access(given: dict[str, Any]) -> EtcdAccess:
    """Return the credentials that these options name; remove the options from ``given``."""
    return EtcdAccess(
        ca_file=given.pop("store_ca"),
        cert_file=given.pop("store_cert"),
        key_file=given.pop("store_key"),
        user=given.pop("store_user"),
        password_file=given.pop("store_password_file"),
    )
