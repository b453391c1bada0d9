"""TLS in both directions for all that speaks HTTP here: one certificate for each process, one authority.

With it a service shows its certificate and wants one of the authority's from whoever connects, before it
reads a byte of a request; a client shows its own and checks that the service's is of the authority and for
the host that it dialled. The token is asked for as well. Without it all of this is off.
"""

import re
import ssl
from dataclasses import dataclass
from pathlib import Path

import aiohttp

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


_SETTINGS = "FABRIC_TLS_CERT, FABRIC_TLS_KEY and FABRIC_TLS_CA"
_HUNG_UP = re.compile("Server disconnected|Remote end closed connection without response")
_UNBELIEVED = re.compile(r"certificate verify failed: (.*?)\.? \(_ssl")


def mistake(error: Exception, tls: Tls) -> str:
    """What to set right where the TLS of the two sides cannot go together, which waiting does not heal; empty
    where ``error`` says nothing of that kind. ``tls``: of the side that dialled."""
    text = str(error)
    if "WRONG_VERSION_NUMBER" in text:
        return "it does not speak TLS: write http://"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        found = _UNBELIEVED.search(text)
        what = "its certificate is not believed" + (f" ({found[1]})" if found else "")
        if not tls.is_on:
            return f"{what}: give {_SETTINGS}"
        return f"{what}: FABRIC_TLS_CA must be the authority that issued it, for the host that is dialled"
    if "ALERT_UNKNOWN_CA" in text or "CERTIFICATE_REQUIRED" in text:
        return f"it does not believe the certificate shown to it: give {_SETTINGS} of its authority"
    return ""


def why(error: Exception, url: str, tls: Tls) -> str:
    """The reason of a client that could not dial or ask ``url``: what to set right where that is TLS."""
    if found := mistake(error, tls):
        return found
    text = str(error) or type(error).__name__
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in text:
        return "nobody listens there"
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        return error.os_error.strerror or str(error.os_error)
    if not _HUNG_UP.search(text):
        return text
    if url.startswith("http://"):
        return f"it hung up without an answer: if it speaks TLS, write https:// and give {_SETTINGS}"
    hint = "look whether FABRIC_TLS_CERT is of its authority" if tls.is_on else f"give {_SETTINGS}"
    return f"it hung up without an answer: if that is always so, {hint}"
