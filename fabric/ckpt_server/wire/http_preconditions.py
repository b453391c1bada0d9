"""Range, If-Range, If-Match and If-None-Match by RFC 9110, for one strong ETag.

A request may ask for one range; several ranges are refused with a sentence. The functions are pure.
"""

import re

from fabric.errors import FabricError, ProtocolError

_RANGE = re.compile(r"bytes=\s*(\d{0,19})-(\d{0,19})", re.ASCII | re.IGNORECASE)


class Unsatisfiable(FabricError):
    """The range begins behind the last byte; ``nbytes`` is the size of the content."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"the range has none of the {nbytes} bytes there are: begin below {nbytes}")
        self.nbytes = nbytes


class PreconditionFailed(FabricError):
    """If-Match names other content than this server holds."""


def etag(digest: str) -> str:
    """Return the strong entity tag of content with this digest."""
    return f'"{digest}"'


def check_if_match(header: str | None, tag: str) -> None:
    """Raises PreconditionFailed unless ``header`` is absent, ``*``, or lists ``tag``."""
    if header is None or header.strip() == "*":
        return
    if tag not in (entry.strip() for entry in header.split(",")):
        raise PreconditionFailed(f"what is held has the tag {tag}, not the one in If-Match: ask anew")


def is_unchanged(header: str | None, tag: str) -> bool:
    """Whether If-None-Match (``header``) says that the reader has this content: then the answer is 304."""
    if header is None:
        return False
    listed = (entry.strip().removeprefix("W/") for entry in header.split(","))
    return header.strip() == "*" or tag in listed


def wanted_range(header: str | None, if_range: str | None, tag: str, nbytes: int) -> tuple[int, int] | None:
    """Return (begin, end) of the bytes that a GET wants, or None for all of them.

    Ignores a unit other than bytes, and a range whose If-Range does not match, as the RFC says. Raises
    ProtocolError for several or malformed ranges, Unsatisfiable for a range without a byte.
    """
    if header is None or (if_range is not None and if_range.strip() != tag):
        return None
    unit, equals, _ = header.partition("=")
    if equals and unit.strip().lower() != "bytes":
        return None
    match = _RANGE.fullmatch(header.strip())
    if match is None or match.groups() == ("", ""):
        raise ProtocolError("the header Range must be one range such as bytes=0-99, bytes=100- or bytes=-99")
    first, last = match.groups()
    if not first:
        begin, end = max(nbytes - int(last), 0), nbytes
    elif last and int(last) < int(first):
        raise ProtocolError("the header Range ends before it begins: give it as bytes=FIRST-LAST")
    else:
        begin, end = int(first), min(int(last) + 1, nbytes) if last else nbytes
    if begin >= end:
        raise Unsatisfiable(nbytes)
    return begin, end
