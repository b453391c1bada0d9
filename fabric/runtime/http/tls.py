"""Mutual TLS for HTTP: one certificate for each process, one authority.

A service shows its certificate. It demands a certificate of the authority from each client before it reads a
byte of a request. A client shows its own certificate, and checks that the service's certificate comes from
the authority and names the dialled host. Clients need the job's token as well. Without the settings there is
no TLS. Each handshake looks whether the files have changed, because certificates are renewed in place.
"""

import logging
import ssl
import threading
from pathlib import Path
from typing import Any

from fabric.errors import ConfigError
from fabric.model import Value

log = logging.getLogger(__name__)
TLS_FILES = ("tls.crt", "tls.key", "ca.crt")


class RenewedContext(ssl.SSLContext):
    """A context that reads its files again before a handshake, if they have changed.

    Open connections keep the certificate with which they began. New files that cannot be used are logged, and
    the old certificate stays. An authority that is no more in the file is trusted until the process ends.
    """

    cert: Path | None
    key: Path | None
    ca: Path | None

    def read(self, cert: Path | None, key: Path | None, ca: Path | None) -> None:
        """Load the files, and those that replace them later. Raises OSError or ssl.SSLError."""
        self.cert, self.key, self.ca = cert, key, ca
        self._lock, self._failed = threading.Lock(), ""
        self._seen = self._stamps()
        self._load(self)

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        """As in the base class; threads call it."""
        self._renew()
        return super().wrap_socket(*arguments, **options)

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """As in the base class; event loops call it."""
        self._renew()
        return super().wrap_bio(*arguments, **options)

    def _stamps(self) -> list[tuple[int, int]]:
        stats = [path.stat() for path in (self.cert, self.key, self.ca) if path is not None]
        return [(stat.st_mtime_ns, stat.st_ino) for stat in stats]

    def _renew(self) -> None:
        with self._lock:
            try:
                if (stamps := self._stamps()) == self._seen:
                    return
                self._seen = stamps
                # A certificate without its key would spoil this context, so another one tries the files.
                self._load(ssl.SSLContext(self.protocol))
                self._load(self)
            except OSError as error:  # ssl.SSLError is an OSError too
                if self._failed != str(error):
                    log.warning("the files of TLS have changed and cannot be used: %s", error)
                self._failed = str(error)

    def _load(self, context: ssl.SSLContext) -> None:
        if self.cert is not None:
            context.load_cert_chain(self.cert, self.key)
        if self.ca is not None:
            context.load_verify_locations(self.ca)


class Tls(Value):
    """The files of TLS, in PEM, in one folder. They have the names of a Kubernetes secret of the type tls."""

    folder: Path | None = None  # None without TLS

    @property
    def is_on(self) -> bool:
        return self.folder is not None

    @property
    def scheme(self) -> str:
        return "https" if self.is_on else "http"

    @property
    def files(self) -> list[Path]:
        """Certificate of this process, its private key, certificate of the trusted authority."""
        return [] if self.folder is None else [self.folder / name for name in TLS_FILES]

    def check(self) -> None:
        """Raise ConfigError where a file cannot be used."""
        self.server_context()
        self.client_context()

    def server_context(self) -> ssl.SSLContext | None:
        """Return the context of a service; None without TLS. Raises ConfigError."""
        if not self.is_on:
            return None
        context = RenewedContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._loaded(context)

    def client_context(self) -> ssl.SSLContext | None:
        """Return the context of a client; None without TLS. Raises ConfigError."""
        return self._loaded(RenewedContext(ssl.PROTOCOL_TLS_CLIENT)) if self.is_on else None

    def _loaded(self, context: RenewedContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.read(*self.files)
        except (OSError, ssl.SSLError) as error:
            names = ", ".join(map(str, self.files))
            raise ConfigError(
                f"TLS cannot be used ({error.strerror or error}): check the files {names}"
            ) from error
        return context
