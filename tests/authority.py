"""A certificate authority for tests, made by the openssl command."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from fabric.runtime.http.tls import TLS_FILES, Tls


class Authority:
    """A certificate authority in a folder, by the openssl command."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("no openssl on PATH: install it to run the tests of certificates")
        self.folder = folder
        folder.mkdir()
        self.ca = folder / "ca.pem"
        self._run(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"
        )

    def _run(self, *arguments: str) -> None:
        subject = [
            "-subj",
            "/CN=test authority",
            "-keyout",
            str(self.folder / "ca.key"),
            "-out",
            str(self.ca),
        ]
        self._openssl(*arguments, *subject)

    @staticmethod
    def _openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)

    def issue(self, name: str, host: str = "IP:127.0.0.1", days: int = 2) -> tuple[Path, Path]:
        """Issue a certificate for ``host``, valid for servers and clients, with its key; 0 days: expired."""
        cert, key, request, extra = (self.folder / f"{name}.{kind}" for kind in ("pem", "key", "csr", "ext"))
        extra.write_text(f"subjectAltName={host}\nextendedKeyUsage=serverAuth,clientAuth\n")
        new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        self._openssl("req", *new, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request))
        sign = (
            "-CA",
            str(self.ca),
            "-CAkey",
            str(self.folder / "ca.key"),
            "-CAcreateserial",
            "-days",
            str(days),
        )
        self._openssl("x509", "-req", "-in", str(request), *sign, "-extfile", str(extra), "-out", str(cert))
        return cert, key

    def tls(self, name: str, host: str = "IP:127.0.0.1", days: int = 2) -> Tls:
        """Issue a certificate into a folder of its own, as ``issue`` does."""
        return tls_folder(*self.issue(name, host, days), self.ca)


def tls_folder(cert: Path, key: Path, ca: Path) -> Tls:
    """Return the settings for these files, with a new folder of links to them."""
    folder = Path(tempfile.mkdtemp(dir=cert.parent, prefix=f"{cert.stem}-"))
    for name, file in zip(TLS_FILES, (cert, key, ca), strict=True):
        (folder / name).symlink_to(file.absolute())
    return Tls(folder)


def mixed(own: Tls, believed: Tls) -> Tls:
    """Return the settings with the certificate of ``own`` and the authority of ``believed``."""
    return tls_folder(*own.files[:2], believed.files[2])
