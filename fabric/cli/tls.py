"""The TLS options of ``fabric`` itself: every command that connects or listens reads them here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fabric.runtime.http.tls import Tls

_WHAT = {
    "cert": "Own certificate (PEM), for TLS in both directions",
    "key": "Key of that certificate",
    "ca": "The authority whose certificates are believed",
}


def tls_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--tls-cert``, ``--tls-key`` and ``--tls-ca``."""
    for name, what in reversed(_WHAT.items()):
        variable = f"FABRIC_TLS_{name.upper()}"
        option = click.option(
            f"--tls-{name}", envvar=variable, type=click.Path(path_type=Path), help=f"{what}; {variable}."
        )
        command = option(command)
    return command


def current_tls() -> Tls:
    """Return the TLS options of the running command. Raises ConfigError."""
    context = click.get_current_context(silent=True)
    tls = context.find_object(Tls) if context is not None else None
    tls = tls if tls is not None else Tls()
    tls.check()
    return tls
