"""Mutual TLS for HTTP: one certificate for each process, one authority.

A service shows its certificate. It demands a certificate of the authority from each client before it reads a
byte of a request. A client shows its own certificate, and checks that the service's certificate comes from
the authority and names the dialled host. Clients need the job's token as well. Without the settings there is
no TLS.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from fabric.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tls:
    """The three files of TLS, in PEM: all, or none."""

    cert: Path | None = None  # certificate of this process
    key: Path | None = None  # private key of this certificate
    ca: Path | None = None  # certificate of the trusted authority

    @property
    def is_on(self) -> bool:
        """Whether TLS is used."""
        return self.cert is not None

    @property
    def scheme(self) -> str:
        """The scheme of a service's URLs."""
        return "https" if self.is_on else "http"

    @property
    def files(self) -> dict[str, Path]:
        """The files that are set, by the end of their setting's name."""
        named = {"cert": self.cert, "key": self.key, "ca": self.ca}
        return {name: path for name, path in named.items() if path is not None}

    def check(self) -> None:
        """Raise ConfigError where only some are set, or a file cannot be used."""
        if len(self.files) not in (0, 3):
            missing = ", ".join(sorted({"cert", "key", "ca"} - set(self.files)))
            raise ConfigError(
                f"TLS is set without {missing}: give FABRIC_TLS_CERT, FABRIC_TLS_KEY and FABRIC_TLS_CA, or"
                " none of them"
            )
        self.server_context()
        self.client_context()

    def server_context(self) -> ssl.SSLContext | None:
        """Return the context of a service; None without TLS. Raises ConfigError."""
        if not self.is_on:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._loaded(context)

    def client_context(self) -> ssl.SSLContext | None:
        """Return the context of a client; None without TLS. Raises ConfigError."""
        return self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)) if self.is_on else None

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        assert self.cert is not None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key)
            context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            names = ", ".join(map(str, self.files.values()))
            raise ConfigError(
                f"TLS cannot be used ({error.strerror or error}): check the files {names}"
            ) from error
        return context
