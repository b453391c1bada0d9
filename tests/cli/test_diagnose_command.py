"""``fabric diagnose`` on files and malformed answers: one sentence for each mistake, and no code is
executed.
"""

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fabric.cli.diagnose import JobReader, ServerTarget, diagnose, job_targets, rank_of
from fabric.collectives import recording
from fabric.collectives.recording import Process
from fabric.errors import FabricError
from fabric.runtime.http.tls import Tls

EVIL = "\x1b[2Jall is well"
ROOT = Path(__file__).resolve().parents[2]


def dump(*states: str, name: str = "all_reduce") -> dict[str, Any]:
    """A dump of gloo: one call for each state."""
    return {
        "pg_config": {"": {"name": "", "desc": "", "ranks": "[0, 1]"}},
        "entries": [
            {
                "record_id": place,
                "process_group": ["0", "default_pg"],
                "collective_seq_id": place + 1,
                "profiling_name": f"gloo:{name}",
                "input_sizes": [[4]],
                "input_dtypes": ["Float"],
                "state": "scheduled",
                "retired": state == "done",
                "is_p2p": False,
                "time_created_ns": 1_795_391_562_000_000_000 + place,
            }
            for place, state in enumerate(states)
        ],
    }


def run(*arguments: object) -> str:
    return CliRunner().invoke(diagnose, [str(a) for a in arguments], catch_exceptions=False).output


def refused(*arguments: object) -> str:
    outcome = CliRunner().invoke(diagnose, [str(a) for a in arguments])
    assert isinstance(outcome.exception, FabricError), outcome
    assert "\n" not in str(outcome.exception)
    return str(outcome.exception)


@pytest.fixture
def hung(tmp_path: Path) -> Path:
    """The dumps of two ranks: rank 1 is absent."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    (folder / "rank0.json").write_text(json.dumps(dump("done", "pending")))
    (folder / "rank1.json").write_text(json.dumps(dump("done")))
    return folder


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_12", 12),
        ("rank3.json", 3),
        ("rank3.torch.json", 3),
        ("7", 7),
        ("a2b.pkl", None),
        ("log", None),
    ],
)
def test_the_rank_is_the_last_number_of_the_name(name, rank):
    assert rank_of(Path(name)) == rank


def test_files_a_folder_and_named_ranks_give_one_report(hung, tmp_path):
    by_files = run(hung / "rank0.json", hung / "rank1.json")
    assert by_files.startswith(
        "absent rank: rank 1 has not come to all_reduce (number 2 of group 0 (default_pg))"
    )
    assert by_files.endswith("(3 calls of 2 processes were read)\n")
    assert run(hung) == by_files
    (tmp_path / "a").write_bytes(pickle.dumps(dump("done", "pending"), 2))
    assert run(f"0={tmp_path / 'a'}", hung / "rank1.json") == by_files


def test_folders_in_a_folder_are_replicas(hung, tmp_path):
    both = tmp_path / "both"
    both.mkdir()
    (both / "r0").symlink_to(hung)
    (both / "r1").mkdir()
    for rank in range(2):
        (both / "r1" / f"rank{rank}.json").write_text(json.dumps(dump("done", "done")))
    report = json.loads(run("--json", both))
    assert [c["about"] for c in report["conclusions"]] == [["r0 rank 1"]]
    assert {x["process"] for x in report["processes"]} == {f"r{r} rank {k}" for r in (0, 1) for k in (0, 1)}


def test_a_bad_dump_among_good_ones_is_left_out_with_its_sentence(hung):
    (hung / "rank1.json").write_text((hung / "rank1.json").read_text()[:100])
    lines = run(hung).splitlines()
    assert "rank 1 was not read" in lines[0]
    assert any(line.startswith("not read: rank 1: ") and "breaks off or is damaged" in line for line in lines)


class Bomb:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return (Path.touch, (self.trace,))


def test_a_malicious_dump_runs_nothing(hung, tmp_path):
    trace = tmp_path / "trace"
    (hung / "rank1.json").write_bytes(pickle.dumps({"entries": [Bomb(trace)]}, 2))
    assert "makes objects or is unknown" in run(hung)
    assert not trace.exists()


def test_names_in_a_dump_steer_no_terminal(hung):
    (hung / "rank0.json").write_text(json.dumps(dump("done", "pending", name=EVIL)))
    assert "\x1b" not in run(hung)


def test_mistakes_are_one_sentence(hung, tmp_path):
    assert "does not exist" in refused(tmp_path / "nothing0")
    (tmp_path / "nameless").write_text("{}")
    assert f"write RANK={tmp_path / 'nameless'}" in refused(tmp_path / "nameless")
    assert "write RANK=FILE" in refused(f"0={hung}")
    assert "are both recordings of rank 0" in refused(hung / "rank0.json", f"0={hung / 'rank1.json'}")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no file whose name ends with a rank" in refused(empty)
    assert "no recording could be read: " in refused(f"0={tmp_path / 'nameless'}")
    assert "files and URLs are given" in refused(hung, "http://127.0.0.1:9")
    assert "are files already" in refused(hung, "--save", tmp_path / "x")
    assert "give dumps, a folder" in refused()
    assert "no job is named" in refused("--lighthouse", "http://127.0.0.1:9")
    assert "is no checkpoint server that answers" in refused("http://127.0.0.1:9")


def test_the_command_needs_no_torch(hung):
    program = "import sys; from fabric.cli.main import main; main()"
    check = f"{program[:-6]}\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", check, "diagnose", str(hung)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("absent rank: rank 1")


# --- servers that answer strange things ---------------------------------------------------------------


class Answers:
    """A server with a fixed answer for each path; it records the tokens of its requests."""

    def __init__(self) -> None:
        self.said: dict[str, tuple[int, bytes]] = {}
        self.asked: list[tuple[str, str | None]] = []
        answers = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answers.asked.append((self.path, self.headers.get("Authorization")))
                status, body = answers.said.get(self.path, (404, b'{"error": "nothing there"}'))
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", body.decode())
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def answers() -> Iterator[Answers]:
    server = Answers()
    thread = threading.Thread(target=server.server.serve_forever)
    thread.start()
    yield server
    server.server.shutdown()
    server.server.server_close()
    thread.join()


READER = JobReader("secret", Tls())
R0 = Process("r0", 0)


def test_a_server_without_a_recording_is_unread_with_its_sentence(answers):
    look = READER.look([ServerTarget(R0, answers.url)])
    assert look.unread == {R0: "nothing there"} and not look.recordings


def test_the_stack_of_a_process_without_a_recording_is_kept(answers):
    stacks = {
        "how": "signal",
        "threads": [{"stack": ["x.py:1 other"]}, {"stack": ["t.py:7 stuck"]}],
        "kernel": [],
    }
    answers.said["/debug/stacks"] = (200, json.dumps(stacks).encode())
    answers.said["/debug/flight"] = (504, b'{"error": "the trainer did not answer within 1 s"}')
    look = READER.look([ServerTarget(R0, answers.url)])
    assert look.unread[R0] == "nothing there"
    [recording_] = look.recordings
    assert recording_.main == ("t.py:7 stuck",) and not recording_.collectives


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b"\x80\x02cos\nsystem\n.", b'{"entries": 5}', b"\xff" * 100]
)
def test_garbage_is_unread_with_a_sentence(answers, body):
    answers.said = {f"/debug/{what}": (200, body) for what in ("flight", "exchange", "stacks")}
    look = READER.look([ServerTarget(R0, answers.url)])
    assert "\n" not in look.unread[R0] and not look.recordings


def test_an_answer_without_an_end_is_bounded(answers, monkeypatch):
    monkeypatch.setattr(recording, "MAX_BYTES", 1000)
    monkeypatch.setattr("fabric.cli.diagnose.MAX_BYTES", 1000)
    answers.said["/debug/flight"] = (200, b" " * 100_000)
    look = READER.look([ServerTarget(R0, answers.url)])
    assert R0 in look.unread


def test_a_redirect_takes_no_token_elsewhere(answers):
    answers.said["/debug/flight"] = (302, f"{answers.url}/elsewhere".encode())
    READER.look([ServerTarget(R0, answers.url)])
    assert "/elsewhere" not in [path for path, _ in answers.asked]
    assert {token for _, token in answers.asked} == {"Bearer secret"}


def test_a_recording_counts_for_the_process_that_was_asked(answers):
    body = {"recorder": "fabric", "replica": "r9", "rank": 4, "entries": [], "pg_config": {}}
    answers.said["/debug/exchange"] = (200, json.dumps(body).encode())
    look = READER.look([ServerTarget(R0, answers.url)])
    assert [x.process for x in look.recordings] == [R0]


def test_the_ranks_of_a_job_are_its_members_and_theirs():
    status = {
        "members": [
            {"replica": "r0", "ckpt": "http://a:1", "ranks": [{"ckpt": "http://a:2#1", "link": "a:3"}]},
            {"replica": "r1", "ckpt": "", "ranks": []},
        ]
    }
    assert job_targets(status) == [
        ServerTarget(Process("r0", 0), "http://a:1"),
        ServerTarget(Process("r0", 1), "http://a:2#1"),
    ]


def job_status(answers: Answers, **more: object) -> bytes:
    member = {"replica": "r0", "ckpt": answers.url, "ranks": []}
    return json.dumps({"members": [member], **more}).encode()


@pytest.mark.parametrize("more", [{}, {"token_for_servers": False}, {"token_for_servers": "yes"}])
def test_the_token_of_all_jobs_is_kept_back(answers, tmp_path, more):
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    answers.said["/v1/jobs/gpt"] = (200, job_status(answers, **more))
    sentence = refused("--lighthouse", answers.url, "--job", "gpt", "--token-file", token)
    assert "give the job's with --server-token-file" in sentence
    assert {path for path, _ in answers.asked} == {"/v1/jobs/gpt"}


def test_the_servers_are_shown_their_own_token(answers, tmp_path):
    token, own = tmp_path / "token", tmp_path / "own"
    for path in (token, own):
        path.write_text(f"{path.name}-of-the-test\n")
        path.chmod(0o600)
    answers.said["/v1/jobs/gpt"] = (200, job_status(answers))
    answers.said["/debug/exchange"] = (200, b'{"recorder": "fabric", "entries": [], "pg_config": {}}')
    options = ["--lighthouse", answers.url, "--job", "gpt", "--token-file", token]
    assert "nothing found" in run(*options, "--server-token-file", own, "--settle-s", "0")
    shown = {token for path, token in answers.asked if path.startswith("/debug/")}
    assert shown == {"Bearer own-of-the-test"}
