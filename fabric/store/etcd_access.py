"""The credentials for an etcd: its certificate authority, our own certificate, a user and a password.

Passwords and keys are files, never arguments: arguments show in process lists.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from fabric.errors import ConfigError
from fabric.runtime.http.tls import RenewedContext

_MAX_PASSWORD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """``tls``: speak TLS, trusting ``ca_file`` (PEM; None: the system's). ``cert_file`` and ``key_file``: our
    own certificate, where the etcd asks for one (mTLS). ``user`` and ``password_file``: etcd's own users."""

    tls: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    user: str = ""
    password_file: Path | None = None

    def check(self) -> None:
        """Raise ConfigError for options that do not fit together, or files that cannot be read."""
        if not self.tls and (self.ca_file or self.cert_file or self.key_file):
            raise ConfigError("Certificates are given for a store without TLS: write its URL as etcds://...")
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError(
                "A certificate for the store needs its key, and a key its certificate: give both."
            )
        if bool(self.user) != (self.password_file is not None):
            raise ConfigError("The store's user needs a password file, and the other way round: give both.")
        if self.password_file is not None:
            self.password()
        self.context()

    def context(self) -> ssl.SSLContext | bool:
        """Return the ``ssl`` argument of aiohttp. Raises ConfigError where a file cannot be used."""
        if not self.tls:
            return True
        try:
            context = RenewedContext(ssl.PROTOCOL_TLS_CLIENT)
            if self.ca_file is None:
                context.load_default_certs()
            context.read(self.cert_file, self.key_file, self.ca_file)
        except (OSError, ssl.SSLError) as error:
            names = ", ".join(str(f) for f in (self.ca_file, self.cert_file, self.key_file) if f is not None)
            raise ConfigError(
                f"The store's certificates cannot be used ({error.strerror or error}): check {names}."
            ) from error
        return context

    def password(self) -> str:
        """Read the password file, at each call, so that a change takes effect. Raises ConfigError."""
        assert self.password_file is not None
        try:
            with self.password_file.open("rb") as file:
                text = file.read(_MAX_PASSWORD_BYTES + 1).decode().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The store's password file {self.password_file} cannot be read: {error}"
            ) from error
        if not text or len(text) > _MAX_PASSWORD_BYTES:
            raise ConfigError(f"The store's password file {self.password_file} is empty or too long.")
        return text
