"""Logs that a machine can read: one line each, as text or as JSON, with the same fields in every service.

The fields say which job, replica, process, epoch and step a line is about, and its cause: the id that the
lighthouse's events and recovery records carry too. What is true of a whole process (``describe``) is
in all its lines; what is true of one line goes with it (``extra=fields(...)``).
"""

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


def fields(**known: Any) -> dict[str, dict[str, Any]]:
    """``extra=`` of one log line: those of FIELDS that are known; None and empty ones are left out."""
    return {"fabric": known}


def describe(**known: Any) -> None:
    """From now on every line of this process has these of FIELDS; None and empty ones go out."""
    _process.update(known)


def set_up(service: str, how: str, *, stream: TextIO | None = None, whole_process: bool = True) -> None:
    """Write what fabric logs (INFO and up) to ``stream`` (standard error) as ``how``: text or json.

    ``whole_process`` False, in somebody else's program: its own loggers stay as they are, and text is left to
    what it has set up (nothing, as a rule: the end of a trainer is one sentence on standard error). Handlers
    that are there already stay.
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


def form() -> str:
    """How this process logs, for the processes that it starts."""
    return _form


def known_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Which of FIELDS are known of this line, in that order."""
    found = {**_process, **getattr(record, "fabric", {})}
    return {name: found[name] for name in FIELDS if found.get(name) not in (None, "")}


def printable(text: str) -> str:
    """``text`` with an escape for each character that is not printable."""
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
        # Others wrote some of it: it stays one line, and steers no terminal.
        return printable(super().formatMessage(record) + (f" [{where}]" if where else ""))
