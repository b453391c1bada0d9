"""Text of other processes cannot control a person's terminal. JSON of another shape leads to an error of one
sentence.
"""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.table import Table

from fabric.ckpt_server.format.safetensors_file import build_preamble
from fabric.cli import operate
from fabric.cli.demo.command import demo
from fabric.cli.doctor import doctor
from fabric.cli.main import cli
from fabric.cli.states import diff, inspect_state
from fabric.cli.status import events, status
from fabric.cli.terminal_text import all_printable, plain_console
from fabric.errors import FabricError, ProtocolError
from fabric.model import printable
from fabric.runtime.http.lighthouse_client import _refusal

ROOT = Path(__file__).resolve().parents[2]
# This text would clear a terminal's screen and write a false line.
EVIL = "r1\x1b[2J\x1b]0;mine\x07\nall is well\x9b1m\u202e"


class Answers:
    """A server in place of a lighthouse, with given answers."""

    def __init__(self) -> None:
        self.said: object = None
        answers = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(answers.said).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.do_GET()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture(scope="module")
def answers() -> Iterator[Answers]:
    found = Answers()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


def steers(text: str) -> bool:
    """Return whether the text could control a terminal."""
    return any(not c.isprintable() for c in text.replace("\n", ""))


def test_an_unprintable_character_becomes_a_question_mark():
    assert printable(EVIL) == "r1?[2J?]0;mine??all is well?1m?"
    assert printable("größe 漢字") == "größe 漢字"
    assert all_printable({"a\x1b": ["b\n", 1, None, {"c": "\x07"}]}) == {"a?": ["b?", 1, None, {"c": "?"}]}


def test_jobs_and_reasons_steer_no_terminal(answers):
    answers.said = [{"job": EVIL, "error": EVIL}]
    done = CliRunner().invoke(status, ["--lighthouse", answers.url])
    assert done.exit_code == 0 and "is well" in done.output
    assert not steers(done.output)


def test_a_note_of_the_lighthouse_steers_no_terminal(answers):
    answers.said = {"min": 2, "max": 4, "note": EVIL}
    done = CliRunner().invoke(
        operate.scale, ["--lighthouse", answers.url, "--job", "gpt", "--why", "budget", "--min", "2"]
    )
    assert done.exit_code == 0 and not steers(done.output)


def test_names_of_tensors_steer_no_terminal(tmp_path):
    for name, tensor in (("one", EVIL), ("other", "w")):
        (tmp_path / name).write_bytes(build_preamble([(tensor, "U8", (4,), 4)], "{}") + bytes(4))
    looked = CliRunner().invoke(inspect_state, [str(tmp_path / "one")])
    assert looked.exit_code == 0 and "r1?" in looked.output and not steers(looked.output)
    compared = CliRunner().invoke(diff, [str(tmp_path / "one"), str(tmp_path / "other")])
    assert compared.exit_code == 1 and "r1?" in compared.output and not steers(compared.output)


@pytest.mark.parametrize("status", [400, 401, 503])
def test_a_refusal_steers_no_terminal(status):
    """`fabric events --follow`, `top` and `drill` print the refusal of what answers at the address."""
    error = _refusal(status, json.dumps({"error": EVIL}).encode())
    assert "is well" in str(error) and not steers(str(error))


def test_journals_steer_no_terminal_and_cause_no_traceback(tmp_path):
    (tmp_path / "journal").mkdir()
    base = {"t": 1.0, "mono": 1.0, "incarnation": 1, "replica": "r0", "generation": 1, "epoch": 1, "step": 1}
    data = {"dataset_size": 4, "global_batch_size": 4, "micro_batch_size": 1, "seed": 1, "micro_batches": 4}
    samples = {"9" * 5000: [1]}  # Python converts no number of so many digits
    lines = [
        {**base, "event": "start", "pid": 3, "data": data},
        {**base, "event": "contribute", "micro_batches": [0], "samples": samples, "weight": 1.0},
        {**base, "event": EVIL, "t": "x"},
    ]
    (tmp_path / "journal" / "r0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = CliRunner().invoke(demo, ["verify", str(tmp_path)])
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit), done.exception
    assert "is well" in done.output and not steers(done.output)


def test_an_error_steers_no_terminal(tmp_path):
    """Run the whole command, because it writes the error line at its end."""
    path = tmp_path / "no\x1b[2Jsuch\x07state"
    command = [sys.executable, "-m", "fabric.cli.main", "inspect", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "such" in done.stderr
    assert not steers(done.stderr)


SHAPES: list[object] = [
    None,
    7,
    "text",
    [],
    {},
    [1],
    [[]],
    {"record": 1},
    {"job": []},
    [{"id": {}}],
    [{}],
    True,
    {"injectors": [1]},
    {"injectors": [{"replica": "r1", "pid": "x", "host": "h"}]},
    {"kind": "death", "detected": 10**400},
]


JOB = ("--job", "gpt")
# The commands that ask a lighthouse, with the arguments of a call.
ASKING = [
    ("status", ()),
    ("status", JOB),
    ("events", JOB),
    ("diagnose", JOB),
    ("pull", ("r0", *JOB, "-o", "state")),
    ("inspect", ("r0", *JOB)),
    ("diff", ("r0", "r1", *JOB)),
    ("drill", (*JOB, "--list")),
    ("plan", ("--from-job", "gpt", "gpus=8", "replica_gpus=1")),
    *((name, (*JOB, "--why", "x")) for name in ("end", "pause", "resume", "retry")),
    *((name, ("r1", *JOB, "--why", "x")) for name in ("admit", "drain", "evict")),
    ("adapt", (*JOB, "--why", "x", "--mode", "off")),
    ("scale", (*JOB, "--why", "x", "--min", "2")),
]
NOT_ASKED = {
    "launch": "a launcher reports, and reads no answer",
    "top": "it prints what status prints, without an end",
}


def test_the_table_has_every_command_that_asks_a_lighthouse():
    with click.Context(cli) as context:
        every = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    asking = {
        name for name, command in every.items() if any("--lighthouse" in x.opts for x in command.params)
    }
    assert asking | {"plan"} == {name for name, _ in ASKING} | set(NOT_ASKED)


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
@pytest.mark.parametrize(("name", "arguments"), ASKING, ids=lambda x: " ".join(x) if type(x) is tuple else x)
def test_json_of_another_shape_is_one_sentence(answers, name, arguments, shape, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answers.said = shape
    command = cli.get_command(click.Context(cli), name)
    done = CliRunner().invoke(command, [*arguments, "--lighthouse", answers.url])
    if isinstance(done.exception, SystemExit):
        assert done.output.startswith("error: ") and done.output.count("\n") == 1
    elif done.exit_code:
        assert isinstance(done.exception, FabricError), done.exception
    assert not steers(done.output)


@pytest.mark.parametrize("shape", [*SHAPES, {"is_leader": False, "leader": EVIL, "ok": 1}], ids=repr)
def test_doctor_understands_or_names_what_answers_in_a_lighthouses_place(answers, tmp_path, shape):
    answers.said = shape
    settings = {"FABRIC_LIGHTHOUSE": answers.url, "FABRIC_JOB": "x", "FABRIC_REPLICA": "r0"}
    done = CliRunner().invoke(doctor, [], env={**settings, "FABRIC_RUN_DIR": str(tmp_path / "run")})
    assert isinstance(done.exception, SystemExit), done.exception
    assert f"{answers.url} is no lighthouse of this version" in done.output and not steers(done.output)


def test_brackets_of_others_are_no_markup():
    """A reason such as ``[/red]`` once ended a command, and ``[link=...]`` could be clicked."""
    for path in sorted((ROOT / "fabric").rglob("*.py")):
        if path.name != "terminal_text.py":
            assert not re.search(r"(?<!plain_)\bConsole\(", path.read_text()), path
    console = plain_console(width=80)
    with console.capture() as shown:
        console.print(Table("[/red]", 40 * "x", title="[link=http://evil]x[/link]"), "[/bold] :smile:")
    assert all(x in shown.get() for x in ("[/red]", "[link=http://evil]", "[/bold] :smile:"))


@pytest.mark.parametrize("shape", [7, "text", {"id": {}}, [1]], ids=repr)
def test_an_event_of_another_shape_ends_the_stream(answers, shape):
    answers.said = shape
    done = CliRunner().invoke(events, ["--job", "gpt", "--follow", "--lighthouse", answers.url])
    assert isinstance(done.exception, ProtocolError) and "cannot be understood" in str(done.exception)
