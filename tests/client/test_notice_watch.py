"""SIGTERM before, during and after a session, and where nobody reads the trainer's output."""

import signal
import sys
from types import SimpleNamespace

import pytest
from forked_processes import run_with_torch

from fabric.client.control.engine import Engine
from fabric.client.loop.shutdown import Shutdown
from fabric.protocol.messages import member_events as io


class Closed:
    """Standard error whose reader is gone."""

    def write(self, _):
        raise BrokenPipeError

    def flush(self):
        raise BrokenPipeError


def test_sigterm_ends_the_process_after_the_session_although_a_framework_had_put_a_handler_around():
    script = """
import os, signal
from fabric.client.loop.shutdown import NoticeWatch
watch = NoticeWatch(lambda work: print("notice", flush=True), print, print)
watch.begin()
ours = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *arguments: ours(*arguments))
os.kill(os.getpid(), signal.SIGTERM)
watch.end()
signal.signal(signal.SIGTERM, ours)
os.kill(os.getpid(), signal.SIGTERM)
print("goes on")
"""
    done = run_with_torch("-c", script)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "notice\n"), done.stderr


def test_a_notice_is_heeded_where_the_reader_of_the_output_got_sigterm_too(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Closed())
    posted = []
    shutdown = SimpleNamespace(
        _parts=SimpleNamespace(durable=SimpleNamespace(noticed=False)),
        _settings=SimpleNamespace(replica="r0"),
        _engine=SimpleNamespace(post=posted.append),
    )
    shutdown._say = lambda sentence: Shutdown._say(shutdown, sentence)
    Shutdown._on_notice(shutdown, 30.0)
    assert posted == [io.Noticed()]


def test_a_change_of_the_members_ends_no_trainer_whose_output_nobody_reads(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Closed())
    engine = SimpleNamespace(_parts=SimpleNamespace(peers=SimpleNamespace(replica="r0")))
    Engine._say(engine, "epoch 2 with r0")


@pytest.mark.parametrize("on", [True, False])
def test_a_request_for_a_state_during_a_look_at_the_members_is_not_forgotten(on):
    slots = SimpleNamespace(wanted=False, listening=False)
    engine = SimpleNamespace(
        _parts=SimpleNamespace(slots=slots, journal=SimpleNamespace(on=False)), newest=None
    )

    class Alone:
        """The record of an epoch of one replica, during whose reading another thread serves a request."""

        @property
        def roster(self):
            Engine._listen(engine, io.RetainGradients(on))
            return ("r0",)

    engine.current = Alone()
    assert Engine.may_be_asked(engine)
