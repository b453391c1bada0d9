"""TLS in both directions for all that speaks HTTP here: one certificate for each process, one authority.

With it a service shows its certificate and wants one of the authority's from whoever connects, before it
reads a byte of a request; a client shows its own and checks that the service's is of the authority and for
the host that it dialled. The token is asked for as well. Without it all of this is off.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from fabric.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tls:
    """``cert`` and ``key``: this process's own (PEM), ``ca``: the authority that is believed. All or none."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    @property
    def is_on(self) -> bool:
        """Whether TLS is spoken."""
        return self.cert is not None

    @property
    def scheme(self) -> str:
        """Of the URLs of a service that has this."""
        return "https" if self.is_on else "http"

    @property
    def files(self) -> dict[str, Path]:
        """What is set, by the end of its setting's name."""
        named = {"cert": self.cert, "key": self.key, "ca": self.ca}
        return {name: path for name, path in named.items() if path is not None}

    def check(self) -> None:
        """Raises ConfigError for a part of it, or for files that cannot be used."""
        if len(self.files) not in (0, 3):
            missing = ", ".join(sorted({"cert", "key", "ca"} - set(self.files)))
            raise ConfigError(
                f"TLS is set without {missing}: give FABRIC_TLS_CERT, FABRIC_TLS_KEY and FABRIC_TLS_CA, or"
                " none of them"
            )
        self.server_context()
        self.client_context()

    def server_context(self) -> ssl.SSLContext | None:
        """What a service listens with; None without TLS. Raises ConfigError."""
        if not self.is_on:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._loaded(context)

    def client_context(self) -> ssl.SSLContext | None:
        """What a client dials with; None without TLS. Raises ConfigError."""
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
