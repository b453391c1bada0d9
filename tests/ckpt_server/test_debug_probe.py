"""/debug shows a real trainer that is healthy, keeps the interpreter's lock in C, is stopped, or is dead."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_support import ROOT, end, fetch, wait_for

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.server.debug_probe import catches, kernel_threads, parse_dump
from fabric.ckpt_server.wire.channel_protocol import DEBUG_SOCKET_NAME, STACKS_SIGNAL
from fabric.runtime.private_folder import socket_path

TRAINER = """
import ctypes, json, os, sys, threading
sys.path[:0] = [sys.argv[2], sys.argv[3]]
from pathlib import Path
import torch
import torch.distributed
from server_support import start_server
from fabric.ckpt_server.attach import ServerHandle
from fabric.client.process.debug_endpoint import DebugEndpoint, flight, stacks

folder = Path(sys.argv[1])
handle = start_server(folder)

def state():
    return {"step": 7}

def broken():
    raise ValueError("a defect")

insight = DebugEndpoint(folder, {"stacks": stacks, "flight": flight, "state": state, "broken": broken})

def in_a_thread():
    threading.Event().wait()

threading.Thread(target=in_a_thread, name="the-other", daemon=True).start()

def stuck_in_c():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # PyDLL keeps the interpreter's lock: nothing of Python runs any more

print(json.dumps({"url": handle.url}), flush=True)
for line in sys.stdin:
    if line == "stick\\n":
        print("sticking", flush=True)
        stuck_in_c()
    elif line == "close\\n":
        insight.close()
    elif line == "gloo\\n":
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    elif line == "reduce\\n":
        torch.distributed.all_reduce(torch.ones(4))
    print("done", flush=True)
"""


class Trainer:
    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(folder), str(ROOT), str(Path(__file__).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCH_FR_BUFFER_SIZE": "100"},
        )
        self.pid = self.process.pid
        line = self.process.stdout.readline()
        assert line, f"the trainer ended with {self.process.wait()}"
        self.url = json.loads(line)["url"]

    def do(self, what: str) -> str:
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextmanager
def _trainer(folder: Path):
    trainer = Trainer(folder)
    try:
        yield trainer
    finally:
        trainer.process.kill()
        trainer.process.wait()
        trainer.process.stdin.close()
        trainer.process.stdout.close()
        server = (folder / "ckpt.lock").read_text().strip()
        end(int(server))


def frames(thread: dict) -> str:
    return " ".join(thread["stack"])


def test_the_stacks_of_a_trainer_that_runs_hangs_in_c_code_is_stopped_or_died_are_shown(tmp_path):
    folder = tmp_path / "run"
    with _trainer(folder) as trainer:
        url = trainer.url

        well = fetch(url, "/debug/stacks").json
        assert (well["pid"], well["how"], well["why"]) == (trainer.pid, "interpreter", "")
        assert well["threads"][0]["name"] == "MainThread" and well["threads"][0]["tid"] == trainer.pid
        other = next(t for t in well["threads"] if t["name"] == "the-other")
        assert "in_a_thread" in frames(other)
        tids = {t["tid"] for t in well["kernel"]}
        assert {t["tid"] for t in well["threads"]} <= tids and well["kernel"][0]["tid"] == trainer.pid
        assert {"tid", "name", "state", "wchan", "syscall", "cpu_s"} == set(well["kernel"][0])
        assert fetch(url, "/debug/state").json["trainer"]["says"] == {"step": 7}

        told = fetch(url, "/debug/flight")
        assert told.status == 404 and "no process group" in told.error
        assert trainer.do("gloo") == "done"
        told = fetch(url, "/debug/flight")
        assert told.status == 404 and "TORCH_FR_BUFFER_SIZE" in told.error
        assert trainer.do("reduce") == "done"
        told = fetch(url, "/debug/flight").json
        assert [e["profiling_name"] for e in told["entries"]] == ["gloo:all_reduce"]

        told = fetch(url, "/debug/exchange")
        assert told.status == 404 and "knows no answer to 'exchange'" in told.error, (
            "a trainer of an older version"
        )

        assert trainer.do("stick") == "sticking"

        def by_signal() -> dict | None:
            told = fetch(url, "/debug/stacks").json
            return told if told["how"] == "signal" else None

        stuck = wait_for(by_signal, "the lock to be held")
        assert "did not answer within 1 s" in stuck["why"]
        [main] = [t for t in stuck["threads"] if "stuck_in_c" in frames(t)]
        assert main["stack"][0].endswith(" stuck_in_c")
        assert any("in_a_thread" in frames(t) for t in stuck["threads"]), "all threads are shown"
        assert stuck["kernel"][0]["state"] == "S", "the signal has not ended it"
        assert fetch(url, "/debug/stacks").json["threads"] == stuck["threads"], "one dump, not two in a row"
        assert fetch(url, "/debug/flight").status == 504
        state = fetch(url, "/debug/state").json["trainer"]
        assert (state["state"], state["says"]) == ("running", None) and "did not answer" in state["silent"]

        os.kill(trainer.pid, signal.SIGSTOP)
        wait_for(lambda: fetch(url, "/debug/state").json["trainer"]["state"] == "stopped", "the stop")
        stopped = fetch(url, "/debug/stacks").json
        assert (stopped["how"], stopped["threads"]) == ("kernel", []) and "is stopped" in stopped["why"]
        assert stopped["kernel"][0]["state"] == "T"

        os.kill(trainer.pid, signal.SIGKILL)
        wait_for(lambda: fetch(url, "/debug/state").json["trainer"]["state"] == "gone", "the death")
        for path in ("/debug/stacks", "/debug/flight", "/debug/exchange"):
            told = fetch(url, path)
            assert told.status == 409 and f"process {trainer.pid}, has ended" in told.error


def test_an_unresponsive_trainer_is_never_sent_a_signal_that_would_kill_it(tmp_path, attach, run_dir):
    """This process attaches as a trainer, but installs no handler of the signal for stacks."""
    handle: ServerHandle = attach()
    assert not catches(os.getpid(), STACKS_SIGNAL), "it would end this test"
    told = fetch(handle.url, "/debug/stacks").json
    assert told["how"] == "kernel" and "made ready" in told["why"]
    assert told["kernel"][0]["tid"] == os.getpid()
    (run_dir / "trainer.stacks").touch()
    assert fetch(handle.url, "/debug/stacks").json["how"] == "kernel", "a file alone is no handler"


YOUNGER_THREAD_WITH_A_SMALLER_NUMBER = """
import os, threading
from pathlib import Path
from fabric.ckpt_server.server.debug_probe import kernel_threads
last = Path("/proc/sys/kernel/ns_last_pid")
last.write_text("5000")
if not (pid := os.fork()):
    last.write_text("1000")
    done = threading.Event()
    threading.Thread(target=done.wait).start()
    first, second = [thread["tid"] for thread in kernel_threads(os.getpid())]
    done.set()
    os._exit(0 if first == os.getpid() > second else 1)
assert not os.waitpid(pid, 0)[1]
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a namespace of process numbers")
def test_the_main_thread_comes_first_after_the_kernel_has_begun_its_numbers_again():
    command = ["unshare", "--pid", "--fork", "--mount-proc"]
    command += [sys.executable, "-c", YOUNGER_THREAD_WITH_A_SMALLER_NUMBER]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert not ended.returncode, ended.stderr


def test_without_a_trainer_the_debug_probe_says_that_there_is_none(tmp_path):
    run_dir = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "fabric.ckpt_server",
        "--job=job",
        "--replica=r0",
        f"--run-dir={run_dir}",
    ]
    reader, writer = os.pipe()
    process = subprocess.Popen([*command, f"--ready-fd={writer}"], pass_fds=(writer,), cwd=ROOT)
    os.close(writer)
    try:
        with os.fdopen(reader) as ready:
            url = json.loads(ready.readline())["url"]
        for path in ("/debug/stacks", "/debug/flight"):
            told = fetch(url, path)
            assert told.status == 409 and "no trainer has attached" in told.error
    finally:
        process.kill()
        process.wait()


NONSENSE = [
    b"",
    b"no JSON\n",
    b'["a list"]\n',
    b'{"ok": false, "error": "a sentence"}\n',
    b'{"ok": true}\n',
    b'{"ok": true, "threads": 3}\n',
    b"x" * 100_000,
]


def test_the_kernels_view_of_the_process_is_included_for_any_answer_on_the_socket(attach, run_dir):
    handle = attach()

    def answer(listener: socket.socket) -> None:
        for said in NONSENSE:
            asking, _ = listener.accept()
            with asking:
                asking.recv(4096)
                asking.sendall(said)

    with socket.socket(socket.AF_UNIX) as listener:
        with socket_path(run_dir, DEBUG_SOCKET_NAME) as path:
            listener.bind(path)
        listener.listen(8)
        thread = threading.Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        for said in NONSENSE:
            told = fetch(handle.url, "/debug/stacks")
            assert told.status == 200, said
            assert told.json["how"] == "kernel" and told.json["why"]
        thread.join()


def test_a_process_that_has_ended_shows_no_threads():
    child = subprocess.Popen(["true"])
    child.wait()
    assert kernel_threads(child.pid) == []


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_any_text_is_parsed_as_a_dump_without_an_error(text):
    assert all(isinstance(t["stack"], list) for t in parse_dump(text))


def test_a_dump_of_faulthandler_is_parsed_into_threads_and_frames():
    text = (
        "Thread 0x00007f01 (most recent call first):\n"
        '  File "/a b/c.py", line 3 in wait\n  File "<string>", line ??? in run\n\n'
        "Current thread 0x00007f02 [main] (most recent call first):\n"
        '  File "d.py", line 9 in <module>\n  ...\n'
    )
    assert parse_dump(text) == [
        {"name": "0x00007f01", "current": False, "stack": ["/a b/c.py:3 wait", "<string>:??? run"]},
        {"name": "0x00007f02", "current": True, "stack": ["d.py:9 <module>"]},
    ]
