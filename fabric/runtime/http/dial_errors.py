"""The reasons of a failed HTTP request, and the settings to change where TLS is the cause."""

import re

import aiohttp

from fabric.runtime.http.tls import Tls

_SETTINGS = "FABRIC_TLS_CERT, FABRIC_TLS_KEY and FABRIC_TLS_CA"
_HUNG_UP = re.compile("Server disconnected|Remote end closed connection without response")
_RENEWED = "each process reads its renewed files without a restart"
_UNBELIEVED = re.compile(r"certificate verify failed: (.*?)\.? \(_ssl")


def permanent_cause(error: Exception, tls: Tls) -> str:
    """Say what to change where the TLS settings of the two sides do not match; empty for other errors.

    Such an error lasts until a person changes a setting. ``tls`` is that of the dialling side.
    """
    text = str(error)
    if _passing_cause(text):
        return ""
    if "WRONG_VERSION_NUMBER" in text:
        return "it does not speak TLS: write http://"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        reason = _UNBELIEVED.search(text)
        what = "its certificate is not believed" + (f" ({reason[1]})" if reason else "")
        if not tls.is_on:
            return f"{what}: give {_SETTINGS}"
        return f"{what}: FABRIC_TLS_CA must be the authority that issued it, for the host that is dialled"
    if "ALERT_UNKNOWN_CA" in text or "CERTIFICATE_REQUIRED" in text:
        return f"it does not believe the certificate shown to it: give {_SETTINGS} of its authority"
    return ""


def _passing_cause(text: str) -> str:
    """Say what to do where a certificate's time is the cause: that mends without another setting."""
    if "certificate has expired" in text:
        return f"its certificate has expired: renew its FABRIC_TLS_CERT; {_RENEWED}"
    if "ALERT_CERTIFICATE_EXPIRED" in text:
        return f"the certificate shown to it has expired: renew FABRIC_TLS_CERT here; {_RENEWED}"
    if "certificate is not yet valid" in text:
        return "its certificate is not valid yet: set the clocks of both hosts right, or issue it again"
    return ""


def describe(error: Exception, url: str, tls: Tls) -> str:
    """Say why a client could not dial or ask ``url``, and what to change where TLS is the cause."""
    text = str(error) or type(error).__name__
    if cause := permanent_cause(error, tls) or _passing_cause(text):
        return cause
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in text:
        return "nobody listens there"
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        return error.os_error.strerror or str(error.os_error)
    if not _HUNG_UP.search(text):
        return text
    if url.startswith("http://"):
        return f"it hung up without an answer: if it speaks TLS, write https:// and give {_SETTINGS}"
    hint = (
        "look whether FABRIC_TLS_CERT is of its authority, and has not expired"
        if tls.is_on
        else f"give {_SETTINGS}"
    )
    return f"it hung up without an answer: if that is always so, {hint}"
