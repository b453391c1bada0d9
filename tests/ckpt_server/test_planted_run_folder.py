"""Another user who makes the run folder first and listens in it gets nothing, and the error names that
user.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from server_support import ROOT, start_server

from fabric.ckpt_server.server.debug_probe import DebugProbe, TrainerSilent
from fabric.ckpt_server.server.trainer_watch import TrainerWatch
from fabric.ckpt_server.wire.channel_protocol import SOCKET_NAME
from fabric.client.process.incarnation_lock import claim
from fabric.errors import ConfigError
from fabric.runtime.config import Settings

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = 65534
# This program answers requests as a checkpoint server would, and records them in a file.
ATTACK = """
import os, socket, sys
os.setresuid(65534, 65534, 65534)
os.umask(0)
folder, names = sys.argv[1], sys.argv[2:]
os.makedirs(folder, exist_ok=True)
listeners = []
for name in names:
    listeners.append(socket.socket(socket.AF_UNIX))
    listeners[-1].bind(os.path.join(folder, name))
    listeners[-1].listen()
print("ready", flush=True)
while True:
    asking, _ = listeners[0].accept()
    told = asking.recv(65536)
    if told:
        asking.sendall(b'{"ok":true,"url":"http://127.0.0.1:9","pid":1,"instance":"x","threads":[{}]}\\n')
    print(told, flush=True)
"""


@pytest.fixture
def shared(monkeypatch):
    """A temporary folder in which every user may make files, like /tmp."""
    with tempfile.TemporaryDirectory(prefix="fabric-planted-") as folder:
        Path(folder).chmod(0o1777)
        monkeypatch.setattr("tempfile.tempdir", folder)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield Path(folder)


@pytest.fixture
def attacker():
    """A function that starts the attacking program on a folder; the program ends with the test."""
    processes = []

    def start(folder: Path, *names: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", ATTACK, str(folder), *names], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_trainer_does_not_use_a_folder_that_another_user_made_first(shared, attacker):
    home = Settings(job="gpt", replica="r0").home
    assert home.is_relative_to(shared)
    attacker(home, SOCKET_NAME)
    assert home.stat().st_uid == NOBODY
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}"):
        claim(home)


def test_the_trainer_sends_nothing_to_another_users_server_in_its_folder(shared, attacker):
    """If the folder is ours but the socket is another user's, the kernel's answer about the peer decides."""
    folder = shared / "ours"
    folder.mkdir()
    folder.chmod(0o777)
    process = attacker(folder, SOCKET_NAME)
    folder.chmod(0o700)
    with pytest.raises(ConfigError, match=f"answered by a process of user {NOBODY}"):
        start_server(folder)
    assert process.stdout is not None and process.stdout.readline() == "b''\n"


def test_a_checkpoint_server_is_not_started_in_a_folder_that_another_user_made_first(shared):
    folder = shared / "theirs"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}"):
        start_server(folder)
    command = [sys.executable, "-m", "fabric.ckpt_server", "--job=gpt", "--replica=r0", f"--run-dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 1 and f"belongs to user {NOBODY}" in done.stderr
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", ["ckpt-server.log", "ckpt.lock"])
def test_no_link_in_the_folder_leads_to_a_file_of_the_user(shared, name):
    folder, precious = shared / "ours", shared / "precious"
    folder.mkdir(mode=0o700)
    precious.write_text("as it was")
    (folder / name).symlink_to(precious)
    with pytest.raises(ConfigError, match="not a plain file of this user alone"):
        start_server(folder)
    assert precious.read_text() == "as it was"


async def test_only_a_process_of_this_user_answers_for_the_trainer(shared, attacker):
    folder = shared / "ours"
    folder.mkdir()
    folder.chmod(0o777)
    process = attacker(folder, "trainer.sock")
    trainer = TrainerWatch()
    trainer.attach(os.getpid(), 1)
    try:
        with pytest.raises(TrainerSilent, match=f"answered by a process of user {NOBODY}"):
            await DebugProbe(folder, trainer).ask("state")
    finally:
        trainer.close()
    assert process.stdout is not None and process.stdout.readline() == "b''\n"
