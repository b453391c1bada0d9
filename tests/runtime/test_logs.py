"""Log lines for machines and for people, with the same fields in both."""

import io
import json
import logging
import subprocess
import sys

import pytest

from fabric.runtime import logs
from fabric.runtime.logs import TextLines


@pytest.fixture
def fabric_logger():
    """The logger ``fabric``, restored after the test."""
    logger = logging.getLogger("fabric")
    before = (logger.handlers[:], logger.propagate, logger.level)
    yield logger
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])
    logs.describe(**dict.fromkeys(logs.FIELDS))


def lines(form: str) -> list[str]:
    out = io.StringIO()
    logs.set_up("trainer", "json", stream=out, whole_process=False)
    if form == "text":
        logging.getLogger("fabric").handlers[0].setFormatter(logs.TextLines())
    logs.describe(job="gpt", replica="r1", incarnation=7, epoch=3, incident_id="e3")
    log = logging.getLogger("fabric.somewhere")
    log.info("abort: r2: the ring broke\nand more", extra=logs.fields(step=12, incident_id="e4"))
    try:
        raise ValueError("wrong")
    except ValueError:
        log.exception("a defect")
    return out.getvalue().splitlines()


def test_json_is_one_object_per_line_with_the_known_fields(fabric_logger):
    first, second = (json.loads(line) for line in lines("json"))
    assert first["t"] > 0 and first.pop("t")
    assert first == {
        "level": "info",
        "service": "trainer",
        "logger": "fabric.somewhere",
        "job": "gpt",
        "replica": "r1",
        "incarnation": 7,
        "epoch": 3,
        "step": 12,
        "incident_id": "e4",
        "message": "abort: r2: the ring broke\nand more",
    }
    assert second["incident_id"] == "e3" and "step" not in second, "what is of one line stays with it"
    assert "ValueError: wrong" in second["error"]


def test_text_has_the_same_fields_in_brackets(fabric_logger):
    text = "\n".join(lines("text"))
    assert "INFO fabric.somewhere: abort: r2: the ring broke" in text
    assert "[job=gpt replica=r1 incarnation=7 epoch=3 step=12 incident_id=e4]" in text


def test_a_line_of_text_is_one_line_whatever_others_wrote(fabric_logger):
    """A tenant's text once made a forged line in the lighthouse's log, with time and level."""
    forged = "x\n2026-11-22 10:00:00 INFO fabric: forged \x1b[2J\r\u2028\x9b"
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextLines())
    record = logging.LogRecord("fabric.x", logging.INFO, "x.py", 1, "%s", (forged,), None)
    record.fabric = {"replica": forged}
    handler.emit(record)
    written = stream.getvalue()
    assert written.endswith("\n") and written[:-1].isprintable() and written.count("\\x1b[2J") == 2


PROGRAM = """
import logging, sys
from fabric.runtime import logs
if sys.argv[1] == "own":
    logging.basicConfig(level=logging.INFO, format="mine %(message)s")
logs.set_up("trainer", sys.argv[2], whole_process=False)
logging.getLogger("fabric.x").info("said")
logging.getLogger("another").info("other")
"""


@pytest.mark.parametrize(
    "program, form, expected",
    [
        ("plain", "text", []),
        ("plain", "json", ['"message": "said"']),
        ("own", "text", ["mine said", "mine other"]),
        ("own", "json", ['"message": "said"', "mine other"]),
    ],
)
def test_a_users_program_keeps_its_own_logging(program, form, expected):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, program, form], capture_output=True, text=True, check=True
    )
    said = ran.stderr.splitlines()
    assert len(said) == len(expected) and all(part in line for part, line in zip(expected, said, strict=True))
