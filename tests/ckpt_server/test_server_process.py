"""A checkpoint server's process starts fast, outlives its trainer, is found again, and ends on request."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from forked_processes import run_python
from server_support import (
    ROOT,
    TOKEN,
    alive,
    end,
    fetch,
    no_more_descriptors,
    publish,
    publish_gradient,
    snapshot_file,
    start_server,
    trainer_process,
    wait_for,
)

from fabric.ckpt_server.wire.channel_protocol import LOG_NAME, SOCKET_NAME
from fabric.errors import ConfigError, Refused, ServerLost

NBYTES = 300_000


def test_a_server_loads_numpy_only_when_a_reader_needs_it(attach):
    """The import contracts of pyproject.toml cannot see an import that waits inside a function."""
    handle = attach()
    maps = Path(f"/proc/{handle.pid}/maps")
    assert "uvloop" in maps.read_text()
    assert "numpy" not in maps.read_text()
    publish(handle, 0, snapshot_file(NBYTES), 1)
    assert fetch(handle.url, "/v1/snapshots/1/statistics/a").status == 200
    assert "numpy" in maps.read_text()


def test_folder_and_socket_are_closed_to_others(attach, run_dir):
    attach()
    assert run_dir.stat().st_mode & 0o777 == 0o700
    assert (run_dir / SOCKET_NAME).stat().st_mode & 0o777 == 0o600


def test_the_server_is_in_a_session_of_its_own(attach):
    handle = attach()
    assert os.getsid(handle.pid) == handle.pid != os.getsid(0)


def test_a_folder_deeper_than_a_socket_path_works(tmp_path):
    deep = tmp_path / ("d" * 120) / ("e" * 120)
    handle = start_server(deep)
    try:
        assert fetch(handle.url, "/healthz").json == {"ok": True}
    finally:
        handle.close()
        end(handle.pid)


def test_a_server_that_was_started_by_hand_is_the_trainers(run_dir, attach):
    command = [sys.executable, "-m", "fabric.cli.main", "ckpt-server"]
    command += ["--job", "job", "--replica", "r0", "--run-dir", str(run_dir), "--orphan-s", "60"]
    server = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_for(lambda: (run_dir / SOCKET_NAME).exists(), "the server")
        handle = attach()
        assert handle.pid == server.pid
        assert fetch(handle.url, "/healthz").json == {"ok": True}
    finally:
        server.terminate()
        assert server.wait(timeout=60) == 0


def test_a_killed_trainer_leaves_its_snapshots_and_the_next_one_finds_them(run_dir):
    with trainer_process(run_dir) as first:
        assert first.hello["snapshots"] == []
        first.do("publish", slot=0, nbytes=NBYTES, step=40)
        first.do("publish", slot=1, nbytes=NBYTES, step=50)
        first.do("gradient", slot=0, nbytes=1000, step=50)
        # The trainer begins a snapshot and never publishes it, so the server must not serve the slot.
        first.do("begin", slot=0)
        first.signal(signal.SIGKILL)
        url = first.hello["url"]
        wait_for(lambda: fetch(url, "/debug/state").json["trainer"]["state"] == "gone", "gone")
        assert fetch(url, "/v1/snapshots/latest/data").body == snapshot_file(NBYTES, 50)
        assert fetch(url, "/v1/gradients/50").body == bytes(1000)
        assert fetch(url, "/v1/snapshots/40/data").status == 409
    with trainer_process(run_dir, incarnation=2) as second:
        assert second.hello == {"url": url, "pid": first.hello["pid"], "snapshots": [50]}
        assert fetch(url, "/debug/state").json["trainer"]["incarnation"] == 2
        second.do("publish", slot=0, nbytes=NBYTES, step=60)
        assert [s["step"] for s in fetch(url, "/v1/snapshots").json] == [50, 60]


def test_a_second_living_trainer_is_refused_even_when_the_first_is_stopped(run_dir, attach):
    with trainer_process(run_dir) as first:
        with pytest.raises(Refused, match=f"already has a trainer, process {first.pid} \\(running\\)"):
            attach(incarnation=2)
        first.signal(signal.SIGSTOP)
        wait_for(
            lambda: fetch(first.hello["url"], "/debug/state").json["trainer"]["state"] == "stopped", "stopped"
        )
        with pytest.raises(Refused, match=r"\(stopped\): stop that one"):
            attach(incarnation=2)
        first.signal(signal.SIGCONT)
        first.do("publish", slot=0, nbytes=NBYTES, step=1)
        assert fetch(first.hello["url"], "/debug/state").json["trainer"]["pid"] == first.pid


def test_a_trainer_that_closed_its_handle_makes_room(run_dir, attach):
    with trainer_process(run_dir) as first:
        first.do("close")
        url = first.hello["url"]
        wait_for(lambda: not fetch(url, "/debug/state").json["trainer"]["attached"], "detached")
        assert attach(incarnation=2).url == url


def test_a_server_without_descriptors_says_so_and_goes_on(attach):
    first = attach()
    publish(first, 0, snapshot_file(NBYTES), 3)
    sentence = (
        r"cannot watch process \d+ \((pidfd_)?open: Too many open files\): raise its limit on open files"
    )
    # One descriptor is left, and the connection takes it.
    with no_more_descriptors(1, first.pid), pytest.raises(Refused, match=sentence):
        attach(incarnation=2)
    publish(first, 1, snapshot_file(NBYTES), 4)
    assert [ref.step for ref in attach(incarnation=3).snapshots] == [3, 4]


def hangs_up(path: Path) -> bool:
    """Return whether a server listens at this path and closes a connection with a malformed request."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(str(path))
            sock.sendall(b"?\n")
            while sock.recv(4096):
                pass
        except OSError:
            return False
        return True


def test_a_server_that_can_never_watch_anybody_ends(run_dir, attach):
    server = subprocess.Popen(command(run_dir, "--orphan-s=600"), cwd=ROOT)
    try:
        # A server that answers has opened all its own files.
        wait_for(lambda: hangs_up(run_dir / SOCKET_NAME), "the server")
        with (
            no_more_descriptors(1, server.pid),
            pytest.raises(Refused, match="raise its limit on open files"),
        ):
            attach()
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
        server.wait()


def test_a_process_may_attach_twice(attach):
    first = attach()
    publish(first, 0, snapshot_file(NBYTES), 3)
    second = attach(incarnation=2)
    assert (second.pid, [ref.step for ref in second.snapshots]) == (first.pid, [3])
    publish_gradient(second, 0, b"x", 1)
    with pytest.raises(ServerLost, match="attach again"):
        first.begin("snapshot", 0)


@pytest.mark.parametrize("others", [{"replica": "r1"}, {"job": "other"}])
def test_another_replicas_folder_is_refused(attach, others):
    attach()
    with pytest.raises(Refused, match="give each replica a folder of its own"):
        attach(**others)


def test_ensure_starts_a_new_server_when_the_old_one_was_killed(attach):
    handle = attach()
    publish(handle, 0, snapshot_file(NBYTES), 3)
    assert handle.ensure() is False
    before = handle.pid
    end(before)
    assert handle.ensure() is True
    assert handle.pid != before
    assert handle.snapshots == ()
    assert handle.ensure() is False
    publish(handle, 0, snapshot_file(NBYTES, 4), 4)
    assert fetch(handle.url, "/v1/snapshots/latest/data").body == snapshot_file(NBYTES, 4)


def test_calls_without_a_server_say_so_and_memory_stays_usable(attach):
    handle = attach()
    memory = handle.allocate("gradient", 0, 1000)
    end(handle.pid)
    with pytest.raises(ServerLost, match="checkpoint server of r0 did not answer 'begin'"):
        handle.begin("gradient", 0)
    with pytest.raises(ServerLost):
        handle.void()
    memory[:] = bytes(1000)
    assert handle.ensure() is True
    publish_gradient(handle, 0, b"abc", 5)
    assert fetch(handle.url, "/v1/gradients/5").body == b"abc"


def test_ensure_keeps_server_and_memory_when_only_the_channel_was_lost(attach):
    handle = attach()
    publish(handle, 0, snapshot_file(NBYTES), 3)
    handle._line.close()
    assert handle.ensure() is False
    handle.begin("snapshot", 0)
    assert fetch(handle.url, "/v1/snapshots").json == []


def test_two_trainers_that_start_at_once_share_one_server(run_dir, attach):
    """Both trainers are this process, so both may attach, but only one server may start."""
    handles = []
    threads = [threading.Thread(target=lambda: handles.append(attach())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({handle.pid for handle in handles}) == 1 == len({handle.url for handle in handles})


def test_finish_ends_the_server_and_an_attach_before_that_keeps_it(attach):
    handle = attach()
    handle.finish(linger_s=60)
    again = attach()
    assert again.pid == handle.pid
    again.finish(linger_s=60)
    again.finish(linger_s=0)
    wait_for(lambda: not alive(handle.pid), "the server's end")


def test_a_server_without_a_trainer_ends(run_dir):
    with trainer_process(run_dir, orphan_s=0.2) as trainer:
        trainer.do("publish", slot=0, nbytes=1000, step=1)
        pid = trainer.hello["pid"]
        assert alive(pid)
    wait_for(lambda: not alive(pid), "the orphan's end")
    assert not (run_dir / SOCKET_NAME).exists()
    assert "no trainer has been attached for 0.2 s" in (run_dir / LOG_NAME).read_text()


def test_a_trainer_that_dies_while_its_child_holds_the_channel_is_not_attached(run_dir):
    """A forked data loader worker keeps the descriptor open: the process's own death must count."""
    script = (
        "import os, signal, sys, time; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path\n"
        "from server_support import start_server\n"
        "from fabric.ckpt_server.attach import ServerHandle\n"
        "h = start_server(Path(sys.argv[3]), orphan_s=0.2)\n"
        "child = os.fork()\n"
        "if not child: signal.pause()\n"
        "print(child, h.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    arguments = [str(ROOT), str(Path(__file__).parent), str(run_dir)]
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        # Read one line, not until the end of file: the child keeps the pipe open too.
        child, server = map(int, trainer.stdout.readline().split())
        try:
            assert trainer.wait() == -signal.SIGKILL
            wait_for(lambda: not alive(server), "the orphan's end")
            assert alive(child)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def command(run_dir: Path, *others: str) -> list[str]:
    base = [sys.executable, "-m", "fabric.ckpt_server", "--job=job", "--replica=r0"]
    return [*base, f"--run-dir={run_dir}", *others]


def refused(run_dir: Path, *others: str) -> str:
    done = run_python(*command(run_dir, *others)[1:], cwd=str(ROOT))
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_sigterm_ends_it_cleanly(attach, run_dir):
    handle = attach()
    publish(handle, 0, snapshot_file(NBYTES), 3)
    os.kill(handle.pid, signal.SIGTERM)
    _, status = os.waitpid(handle.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not (run_dir / SOCKET_NAME).exists()
    assert "Traceback" not in (run_dir / LOG_NAME).read_text()


def test_sigterm_ends_it_while_a_reader_hangs(attach):
    handle = attach()
    file = snapshot_file(20_000_000)
    publish(handle, 0, file, 3)
    host, port = handle.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as reader:
        reader.sendall(b"GET /v1/snapshots/3/data HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        reader.recv(1)
        os.kill(handle.pid, signal.SIGTERM)
        _, status = os.waitpid(handle.pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def test_a_second_server_on_the_folder_is_refused(attach, run_dir):
    handle = attach()
    sentence = refused(run_dir)
    assert f"another checkpoint server (process {handle.pid}) serves {run_dir}" in sentence
    assert fetch(handle.url, "/healthz").status == 200


def test_a_taken_port_is_reported_and_a_range_goes_past_it(run_dir, attach):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is taken" in refused(run_dir, f"--port={port}")
        with pytest.raises(Refused, match="taken by another process"):
            attach(port=str(port))
        url = attach(port=f"{port}-{min(port + 50, 65535)}").url
        assert int(url.rpartition(":")[2]) > port


def test_a_bad_setting_is_refused_in_one_sentence(run_dir, tmp_path):
    empty = tmp_path / "token"
    empty.write_text(" \n")
    assert "is empty" in refused(run_dir, f"--token-file={empty}")
    assert "cannot be read" in refused(run_dir, f"--token-file={tmp_path / 'none'}")
    assert "without a token" in refused(run_dir, "--bind=0.0.0.0")
    assert "cannot be used" in refused(run_dir, "--port=80-70")
    assert "no URL" in refused(run_dir, "--lighthouse=somewhere:80")
    assert "orphan-s" in refused(run_dir, "--orphan-s=0")
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "cannot be used" in refused(blocked / "deeper")


def test_a_trainer_gets_the_refusal_of_the_server_that_it_starts(run_dir, tmp_path, attach):
    with pytest.raises(Refused, match="cannot be read"):
        attach(token_file=tmp_path / "none")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        start_server(blocked / "deeper")


def test_a_server_that_does_not_start_in_time_is_ended_and_reported(run_dir, attach, monkeypatch):
    with monkeypatch.context() as hurried:
        hurried.setattr("fabric.ckpt_server.attach.ATTACH_S", 0.001)
        with pytest.raises(ServerLost, match=r"did not start in time|could not be attached"):
            attach()
    # The lock is free again: the failed start left nothing behind.
    assert attach().ensure() is False


def test_token_file_is_used_from_the_trainers_folder(run_dir, attach, tmp_path, monkeypatch):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    url = attach(token_file=Path("token")).url
    assert fetch(url, "/v1/snapshots").status == 401
    assert fetch(url, "/v1/snapshots", Authorization=f"Bearer {TOKEN}").json == []
