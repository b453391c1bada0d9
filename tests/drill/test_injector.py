"""A process that takes the freed port of a lighthouse orders no fault of a trainer."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fabric.drill.injection import injector
from fabric.drill.injection.injector import TrainerAddress, start_injector
from fabric.lighthouse.http.tokens import Tokens
from fabric.runtime.config import settings
from fabric.runtime.drill_orders import order_key, proof_of

TOKEN, DRILL_TOKEN = "a-job-token", "the-token-for-drills"
KILL = {"drill": "d1", "faults": [{"number": 1, "fault": "kill", "seconds": 0.0, "point": ""}]}
LIMIT_S = 60
Answer = Callable[[str], dict]  # of the injector's nonce


class Lighthouse(ThreadingHTTPServer):
    """A process at a lighthouse's address. It gives each answer once, and the last one for ever."""

    def __init__(self, *answers: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Asked)
        self.answers, self.nonces, self.bearers = list(answers), [], set()
        self.has_given_all = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, body: dict, bearer: str) -> dict:
        self.nonces.append(body["nonce"])
        self.bearers.add(bearer)
        number = len(self.nonces) - 1
        if number > len(self.answers):  # the injector has dealt with the last answer
            self.has_given_all.set()
        return self.answers[min(number, len(self.answers) - 1)](body["nonce"])


class _Asked(BaseHTTPRequestHandler):
    server: Lighthouse

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        data = json.dumps(self.server.answer(body, self.headers["Authorization"])).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        """Say nothing."""


def proved(key: str, nonce: str, answer: dict) -> dict:
    return {**answer, "proofs": [proof_of(key, nonce, answer)]}


@pytest.fixture
def beside(tmp_path) -> Iterator[Callable[[str], subprocess.Popen]]:
    """Start a process and its injector, which asks the lighthouse at an address; return the process."""
    started: list[subprocess.Popen] = []
    for name, text in (("token", TOKEN), ("key", order_key(DRILL_TOKEN, "gpt"))):
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_text(text)

    def begin(url: str) -> subprocess.Popen:
        trainer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        address = TrainerAddress(trainer.pid, "gpt", "r1", tmp_path, True, str(tmp_path / "key"))
        variables = {"FABRIC_JOB": "gpt", "FABRIC_REPLICA": "r1", "FABRIC_LIGHTHOUSE": url}
        variables["FABRIC_TOKEN_FILE"] = str(tmp_path / "token")
        words = [sys.executable, "-m", "fabric.drill.injection.injector", json.dumps(address.words())]
        started.extend([trainer, subprocess.Popen(words, env=os.environ | variables)])
        return trainer

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_a_process_on_a_freed_port_kills_no_trainer(beside):
    key = order_key(DRILL_TOKEN, "gpt")
    idle = {"drill": "", "faults": []}
    attacks: tuple[Answer, ...] = (
        lambda nonce: KILL,
        lambda nonce: {**KILL, "proofs": None},
        lambda nonce: {**KILL, "proofs": [7, "", {}]},
        # The attacker has seen the job's token, knows the key of another job, and has heard of older answers.
        lambda nonce: proved(TOKEN, nonce, KILL),
        lambda nonce: proved(order_key(TOKEN, "gpt"), nonce, KILL),
        lambda nonce: proved(order_key(DRILL_TOKEN, "another"), nonce, KILL),
        lambda nonce: proved(key, server.nonces[0], KILL),
        lambda nonce: {**KILL, "proofs": proved(key, nonce, idle)["proofs"]},
    )
    server = Lighthouse(*attacks)
    trainer = beside(server.url)
    assert server.has_given_all.wait(LIMIT_S)
    assert server.bearers == {f"Bearer {TOKEN}"} and trainer.poll() is None
    server.shutdown()


def test_a_lighthouse_with_the_token_for_drills_is_obeyed(beside):
    keys = Tokens(TOKEN, drill=DRILL_TOKEN).order_keys("gpt")
    server = Lighthouse(lambda nonce: proved(keys[0], nonce, KILL))
    assert beside(server.url).wait(LIMIT_S) == -9
    server.shutdown()


@pytest.mark.parametrize(
    ("drill", "url", "starts"),
    [
        ("1", "http://a:1", 0),
        ("1", "https://a:1,http://a:2", 0),
        ("1", "https://a:1", 1),
        ("", "http://a:1", 1),
    ],
    ids=["no proof", "one without TLS", "TLS", "a key"],
)
def test_a_trainer_without_tls_and_key_has_no_injector(monkeypatch, tmp_path, drill, url, starts):
    (tmp_path / "key").write_text("a-key")
    started: list[object] = []
    monkeypatch.setattr(injector, "start_helper", lambda *words, **options: started.append(words))
    start_injector(
        settings({}, replica="r1", lighthouse=tuple(url.split(",")), drill=drill or f"{tmp_path}/key")
    )
    assert len(started) == starts
