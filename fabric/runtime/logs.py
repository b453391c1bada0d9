"""Logs that a machine can read: one line each, as text or as JSON, with the same fields in every service.

The fields name the job, replica, process, epoch, step and incident of a line; the lighthouse's events and
recovery records carry the same incident id. ``describe`` sets fields for all later lines of the process,
``extra=fields(...)`` for one line.
"""

import contextlib
import json
import logging
import sys
from typing import Any, TextIO

FIELDS = ("job", "replica", "rank", "incarnation", "epoch", "step", "incident_id")
FORMATS = ("text", "json")

_NAME = "fabric"
_process: dict[str, Any] = {}
_service = ""
_form = "text"


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Return the argument ``extra=`` of one log line, by FIELDS; leave out None and empty values."""
    return {"fabric": values}


def describe(**values: Any) -> None:
    """Put these FIELDS into every later line of this process; None and empty values remove one."""
    _process.update(values)


def set_up(service: str, how: str, *, stream: TextIO | None = None, whole_process: bool = True) -> None:
    """Write the logs of fabric (INFO and up) to ``stream`` (standard error) as ``how``: text or json.

    Set ``whole_process`` to False in the user's program: its loggers stay as they are, and text goes only to
    handlers that the program has set up. Existing handlers stay.
    """
    global _service, _form
    _service, _form = service, how
    logger = logging.getLogger() if whole_process else logging.getLogger(_NAME)
    if how == "text" and (not whole_process or logger.handlers):
        return
    logger.propagate = whole_process
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if how == "json" else TextLines())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def tell(sentence: str) -> None:
    """Print a line for a person on standard error. Nothing fails where its reader is gone."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"fabric: {sentence}\n")
        sys.stderr.flush()


def form() -> str:
    """Return the form of this process's logs, for the processes that it starts."""
    return _form


def known_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the FIELDS of this line that have a value, in that order."""
    values = {**_process, **getattr(record, "fabric", {})}
    return {name: values[name] for name in FIELDS if values.get(name) not in (None, "")}


def printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class JsonLines(logging.Formatter):
    """One JSON object per line: ``t`` is Unix time in seconds, ``error`` a traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        body = {
            "t": round(record.created, 6),
            "level": record.levelname.lower(),
            "service": _service,
            "logger": record.name,
            **known_fields(record),
            "message": record.getMessage(),
        }
        if record.exc_info:
            body["error"] = self.formatException(record.exc_info)
        return json.dumps(body, default=str)


class TextLines(logging.Formatter):
    """For people: time, level, message, and the fields in brackets."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name of logging's own hook
        where = " ".join(f"{name}={value}" for name, value in known_fields(record).items())
        # Part of the text comes from other processes: keep it on one line, without control characters.
        return printable(super().formatMessage(record) + (f" [{where}]" if where else ""))
