"""Why an HTTP client could not dial or ask, and which setting mends it where TLS is the matter."""

import re

import aiohttp

from fabric.runtime.http.tls import Tls

_SETTINGS = "FABRIC_TLS_CERT, FABRIC_TLS_KEY and FABRIC_TLS_CA"
_HUNG_UP = re.compile("Server disconnected|Remote end closed connection without response")
_UNBELIEVED = re.compile(r"certificate verify failed: (.*?)\.? \(_ssl")


def permanent_cause(error: Exception, tls: Tls) -> str:
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


def describe(error: Exception, url: str, tls: Tls) -> str:
    """The reason of a client that could not dial or ask ``url``: what to set right where that is TLS."""
    if found := permanent_cause(error, tls):
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
