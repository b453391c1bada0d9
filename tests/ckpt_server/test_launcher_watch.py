"""The server kills what a killed launcher leaves behind, and nothing of a process that it did not start."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from server_support import alive, wait_for

from fabric.runtime.guarded_processes import LauncherWatch

# Starts a trainer, which has children with and without the mark, and prints all their process ids.
LAUNCHER = """
import os, subprocess, sys
trainer = '''
import os, subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
null = subprocess.DEVNULL
children = [subprocess.Popen(sleep, stdout=null, start_new_session=True)]
children.append(subprocess.Popen(sleep, stdout=null, env={}))
print(os.getpid(), *(child.pid for child in children), flush=True)
children[0].wait()
'''
environment = {"FABRIC_LAUNCH_MARK": f"{os.getpid()}-abc"}
subprocess.run([sys.executable, "-c", trainer], env=environment, start_new_session=True)
"""


@contextmanager
def launched():
    """Yield a launcher, and its trainer with the trainer's children."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in launcher.stdout.readline().split()]
    try:
        yield launcher, pids
    finally:
        launcher.kill()
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
        launcher.communicate()


async def test_a_killed_launcher_takes_along_what_its_trainers_have_started():
    with launched() as (launcher, pids):
        watch = LauncherWatch()
        for rank in (1, 0):
            watch.watch(f"{launcher.pid}-abc", pids[0], rank)
        assert all(map(alive, pids))
        launcher.kill()
        await asyncio.to_thread(wait_for, lambda: not any(map(alive, pids)), "their end")


async def test_a_trainer_that_a_person_starts_with_a_copy_of_the_mark_is_not_the_launchers():
    """Its session may be that person's shell."""
    with launched() as (launcher, pids):
        watch = LauncherWatch()
        watch.watch(f"{launcher.pid}-abc", os.getpid(), 0)
        assert not watch._sessions
        watch.watch(f"{launcher.pid}-abc", pids[0], 0)
        watch.watch(f"{launcher.pid}-abc", os.getpid(), 0)
        assert list(watch._sessions.values()) == [{0: os.getsid(pids[0])}]
        launcher.kill()
        await asyncio.to_thread(wait_for, lambda: not any(map(alive, pids)), "their end")


@pytest.mark.parametrize("mark", ["", "abc", "-abc", "0-abc", "-1-abc", f"{10**30}-abc", "1" * 5000])
async def test_a_word_that_is_no_launchers_mark_is_ignored(mark):
    watch = LauncherWatch()
    watch.watch(mark, os.getpid(), 0)
    assert not watch._sessions


async def test_a_launcher_that_has_ended_is_not_watched():
    with launched() as (launcher, pids):
        launcher.kill()
        launcher.wait()
        watch = LauncherWatch()
        watch.watch(f"{launcher.pid}-abc", pids[0], 0)
        assert not watch._sessions
