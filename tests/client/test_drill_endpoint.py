"""A trainer obeys a drill at a named point, one drill at a time, and goes on when the drill is gone."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked_processes import WITHOUT_TORCH

from fabric.client.gradients.exchange_thread import ExchangeThread
from fabric.client.gradients.gradient_backend import HostBackend
from fabric.client.process.drill_endpoint import DrillEndpoint, _HeldOrder
from fabric.client.process.journal import Journal
from fabric.drill.injection.drilled_processes import ProcessTarget
from fabric.drill.injection.played_faults import PlayedFault, SentOrder, obey
from fabric.drill.schedule.drill_schedule import ScheduledFault
from fabric.errors import ProtocolError, Refused
from fabric.ftar.buckets import FlatGradients
from fabric.model import Fence
from fabric.protocol.messages.member_events import StartExchange
from fabric.runtime.drill_orders import DRILL_SOCKET_NAME, PointOrder, read_order
from fabric.runtime.failpoints import Failpoints

FENCE = Fence("s", 1, 1)
TRAINER = f"""{WITHOUT_TORCH}
import sys, time
from pathlib import Path
from fabric.client.process.drill_endpoint import DrillEndpoint, _HeldOrder
endpoint = DrillEndpoint(Path(sys.argv[1]))
print("up", flush=True)
for step in range(100000):
    endpoint.hit("optimizer", step)
    time.sleep(0.01)
"""


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder whose path is longer than a unix socket's."""
    path = tmp_path / ("long" * 30)
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def endpoint(folder: Path) -> Iterator[DrillEndpoint]:
    with closing(DrillEndpoint(folder)) as endpoint:
        yield endpoint


class Loop:
    """A thread that passes a point once a step, as a training loop does."""

    def __init__(self, points: Failpoints, name: str = "ring") -> None:
        self.step = 0
        self._over = False
        self._points, self._name = points, name
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Loop":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()

    def _run(self) -> None:
        while not self._over:
            self._points.hit(self._name, self.step)
            self.step += 1
            time.sleep(0.001)

    def stands_still(self) -> bool:
        before = self.step
        time.sleep(0.1)
        return self.step == before


@pytest.fixture
def points(endpoint: DrillEndpoint) -> Failpoints:
    points = Failpoints("")
    points.on_hit = endpoint.hit
    return points


def order(**changes: object) -> PointOrder:
    return PointOrder(**{"drill": "d1", "point": "ring", "action": "hold", "seconds": 600.0} | changes)


def test_a_held_process_goes_on_when_its_drill_ends_the_order(folder, points):
    with Loop(points) as loop, closing(SentOrder(folder, order(step=20))) as sent:
        until(lambda: sent.look() or sent.hit_step >= 20)
        assert loop.stands_still() and not sent.is_over
        sent.end()
        until(lambda: sent.look() or sent.is_over)
        until(lambda: not loop.stands_still())


def test_a_held_process_goes_on_when_its_drill_is_gone(folder, points):
    with Loop(points) as loop:
        sent = SentOrder(folder, order())
        until(lambda: sent.look() or sent.hit_step >= 0)
        sent.close()
        until(lambda: not loop.stands_still())


def test_a_held_process_goes_on_when_the_orders_time_is_over(folder, points):
    with Loop(points) as loop, closing(SentOrder(folder, order(seconds=0.05))) as sent:
        until(lambda: sent.look() or sent.is_over)
        until(lambda: not loop.stands_still())


def test_an_order_acts_once_and_at_its_point_alone(folder, points):
    with closing(SentOrder(folder, order(seconds=0.01))) as sent:
        points.hit("optimizer", 1)
        sent.look()
        assert sent.hit_step == -1
        points.hit("ring", 2)
        points.hit("ring", 3)
        until(lambda: sent.look() or sent.is_over)
        assert sent.hit_step == 2


def test_a_second_drill_is_refused_with_one_sentence_and_may_come_later(folder, endpoint):
    first = SentOrder(folder, order())
    with pytest.raises(Refused, match="the drill d1 has an order for this process: wait for its end"):
        SentOrder(folder, order(drill="d2"))
    first.close()

    def is_taken() -> bool:
        try:
            SentOrder(folder, order(drill="d2")).close()
        except Refused:
            return False
        return True

    until(is_taken)


def test_a_killed_process_dies_at_its_point(folder):
    process = subprocess.Popen([sys.executable, "-c", TRAINER, str(folder)], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline()
        with closing(SentOrder(folder, order(point="optimizer", action="kill", step=3))) as sent:
            assert process.wait(timeout=60) == -signal.SIGKILL
            sent.look()
            assert sent.hit_step >= 3
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_without_an_endpoint_no_order_is_taken(folder):
    with pytest.raises(Refused, match="start it with FABRIC_DRILL=1"):
        SentOrder(folder, order())
    with pytest.raises(Refused, match="no trainer takes orders"):
        SentOrder(folder / "none", order())


def test_the_socket_is_its_users_alone(folder, endpoint):
    assert (folder / DRILL_SOCKET_NAME).stat().st_mode & 0o777 == 0o600
    assert (folder / DRILL_SOCKET_NAME).stat().st_uid == os.geteuid()


@pytest.mark.parametrize(
    "changes",
    [
        {"point": "nowhere"},
        {"action": "explode"},
        {"seconds": -1.0},
        {"seconds": 1e9},
        {"seconds": "long"},
        {"step": -1},
        {"step": 1.5},
        {"drill": ""},
        {"drill": "a\nb"},
        {"drill": "x" * 100},
        {"point": ["ring"]},
        {"point": "ring", "action": "flip"},
        {"point": "publish", "action": "nan"},
        {"point": "gather", "action": "kill"},
    ],
)
def test_a_malformed_order_is_refused_with_one_sentence(folder, endpoint, changes):
    with pytest.raises(Refused) as raised:
        SentOrder(folder, order(**changes))
    assert str(raised.value) and "\n" not in str(raised.value)
    SentOrder(folder, order()).close()


@pytest.mark.parametrize("line", [b"", b"[]", b"{}", b"{", b'{"drill": "d", "new": 1}', b"[" * 9000])
def test_any_other_line_is_one_sentence(line):
    with pytest.raises(ProtocolError) as raised:
        read_order(line)
    assert "\n" not in str(raised.value)


def gradients(*values: float, dtype=torch.float32) -> FlatGradients:
    parameter = torch.nn.Parameter(torch.zeros(len(values), dtype=dtype))
    parameter.grad = torch.tensor(values, dtype=dtype)
    return FlatGradients([("w", parameter)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_flipped_bit_changes_one_value_of_the_gradient_and_keeps_it_finite(folder, points, dtype):
    flat = gradients(0.0, -3.0, 1.0, dtype=dtype)
    (bucket,) = flat.buckets
    with closing(SentOrder(folder, order(point="gather", action="flip", step=2))) as sent:
        for step in range(5):
            points.hit("gather", step, lambda: bucket)
        until(lambda: sent.look() or sent.is_over)
        assert (sent.hit_step, sent.hits) == (2, 1)
        assert sent.about.startswith("element 1 of the gradient of w is ") and "instead of -3" in sent.about
    changed = flat.parameters[0][1].grad
    assert changed[0] == 0.0 and changed[2] == 1.0 and changed[1] != -3.0 and changed.isfinite().all()


def test_a_flipped_bit_is_in_what_the_members_sum(folder, points):
    flat = gradients(1.0, 2.0)
    exchange = ExchangeThread(None, flat, None, points, lambda error: None, HostBackend())
    memory = torch.zeros(flat.nbytes, dtype=torch.uint8)
    with closing(SentOrder(folder, order(point="gather", action="flip"))):
        exchange._gather(StartExchange(FENCE, 0, 1.0), flat.buckets[0], memory)
    exchange.close()
    sent_gradient = flat.buckets[0].views(memory)[0][2].tolist()
    assert sent_gradient == [1.0, flat.parameters[0][1].grad[1].item()] != [1.0, 2.0]


def test_a_poisoned_gradient_has_one_nan(folder, points):
    flat = gradients(1.0, 2.0)
    with closing(SentOrder(folder, order(point="gather", action="nan"))) as sent:
        points.hit("gather", 0, lambda: flat.buckets[0])
        until(lambda: sent.look() or sent.is_over)
    assert flat.first_nonfinite_own() == "w" and int(flat.parameters[0][1].grad.isnan().sum()) == 1


def test_a_trainer_without_a_gradient_is_asked_again_in_the_next_step(folder, points):
    flat = gradients(1.0)
    flat.parameters[0][1].grad = None
    with closing(SentOrder(folder, order(point="gather", action="nan"))) as sent:
        points.hit("gather", 0, lambda: flat.buckets[0])
        flat.parameters[0][1].grad = torch.ones(1)
        points.hit("gather", 1, lambda: flat.buckets[0])
        until(lambda: sent.look() or sent.is_over)
        assert sent.hit_step == 1


def test_each_snapshot_is_flipped_until_the_orders_end_and_two_more_replace_them(folder, points):
    memory = bytearray(64)

    def publish(step: int) -> bool:
        memory[:] = bytes(64)
        points.hit("publish", step, lambda: memoryview(memory))
        return any(memory)

    with closing(SentOrder(folder, order(point="publish", action="flip"))) as sent:
        assert publish(1) and publish(2)
        until(lambda: sent.look() or sent.hits == 2)
        assert sent.about == "bit 0 of byte 32 of 64 is flipped"
        sent.end()
        until(lambda: not publish(3))
        publish(4)
        until(lambda: sent.look() or sent.is_over)


def test_a_clock_leaps_ahead_and_back_and_the_journal_keeps_the_hosts_time(folder, endpoint, tmp_path):
    journal = Journal(tmp_path / "r1.jsonl", "r1", 1)
    before, before_ns = time.time(), time.time_ns()
    with closing(SentOrder(folder, order(point="clock", action="leap"))) as sent:
        until(lambda: sent.look() or sent.hits)
        assert time.time() - before > 3000 and time.time_ns() - before_ns > 3000e9
        journal.write("start")
        sent.end()
        until(lambda: sent.look() or sent.is_over)
    assert time.time() - before < 3000
    assert json.loads((tmp_path / "r1.jsonl").read_text())["t"] - before < 3000


def test_a_clock_leaps_back_when_its_drill_is_gone(folder, endpoint):
    before = time.time()
    sent = SentOrder(folder, order(point="clock", action="leap"))
    until(lambda: sent.look() or sent.hits)
    sent.close()
    until(lambda: time.time() - before < 3000)


def test_a_thread_that_reaches_the_point_at_once_reports_after_the_answer():
    """The drill reads the first line as the answer to its order."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        held = _HeldOrder(order(), theirs)
        thread = threading.Thread(target=lambda: held.report(hit="ring", step=1))
        thread.start()
        held.accept()
        thread.join()
        theirs.close()
        assert [json.loads(line) for line in ours.makefile()] == [{"ok": True}, {"hit": "ring", "step": 1}]


def scene(folder: Path, pid: int, started: Sequence[str] = ()) -> SimpleNamespace:
    """Stands for what a drill may touch: the trainer ``pid``."""
    return SimpleNamespace(
        processes=SimpleNamespace(trainer=lambda replica: ProcessTarget(pid)),
        run_dir=lambda replica: folder,
        drill="drill",
        restarted=lambda names: lambda: "".join(started),
    )


def test_a_player_has_the_evidence_of_an_order_and_of_its_end(folder, points):
    fault = PlayedFault("hang")
    fault.script = obey(
        scene(folder, os.getpid()), fault, ScheduledFault("hang", "r0", lasts_s=600.0, step=20)
    )
    with Loop(points) as loop:
        until(lambda: fault.look() or fault.observed)
        assert fault.observed == f"process {os.getpid()} stands still at ring of step {loop.step}"
        assert fault.began and not fault.undone
        fault.end()
        until(lambda: fault.look() or fault.undone)
        assert fault.undone == f"process {os.getpid()} has ended it"
        until(lambda: not loop.stands_still())


def test_a_player_of_a_deadly_order_waits_for_the_next_process(folder):
    words = [sys.executable, "-c", TRAINER, str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout.readline()
        started = []
        fault = PlayedFault("kill")
        deadly = ScheduledFault("kill", "r0", point="optimizer")
        fault.script = obey(scene(folder, trainer.pid, started), fault, deadly)
        until(lambda: fault.look() or fault.observed)
        assert f"process {trainer.pid} is gone at optimizer of step" in fault.observed
        fault.end()
        assert not fault.undone
        started.append("process 1 of r0 started")
        fault.look()
        assert fault.undone == "process 1 of r0 started"
