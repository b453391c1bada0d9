"""The slots of a trainer with a real checkpoint server: how many published gradients a newcomer gets, and
that no slot is overwritten before its round is applied.
"""

import contextlib
import threading
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_support import fetch

from fabric.ckpt_server.fetch.fetcher import GradientMeta
from fabric.client.gradients.gradient_slots import GradientSlots
from fabric.client.state import fetch_thread
from fabric.client.state.fetch_thread import FetchThread
from fabric.errors import StateError
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.member_events import PreparedRound

NBYTES = 1024


@pytest.fixture
def plane():
    ring = CpuRing()
    yield ring
    ring.close()


def run(slots: GradientSlots, first: int, last: int) -> None:
    """Run rounds: publish each gradient when its round is over, and withdraw the next round's slot ahead."""
    for step in range(first, last):
        slots.for_round(1, step).buffer[:] = step
        slots.publish(1, PreparedRound(1, step, f"{step:032x}", 1.0, (("r0", (0,)),)))
        slots.prepare()


def test_the_first_rounds_get_their_slots(attach, plane):
    slots = GradientSlots(attach(), NBYTES, "layout", plane)
    slots.reserve()
    reserved = [slots.handle.descriptor("gradient", index) for index in range(3)]
    run(slots, 0, 10)
    assert [slots.handle.descriptor("gradient", index) for index in range(3)] == reserved
    assert not slots.handle.holds("gradient", 3, 1)
    assert held_steps(slots, range(10)) == [8, 9]


def test_rounds_go_on_while_the_server_allocates_a_large_slot(attach, plane):
    slots = GradientSlots(attach(), NBYTES, "layout", plane)
    slots.reserve()

    def rounds() -> None:
        for step in range(6):
            slots.for_round(1, step)
            told.append(slots.label(1, PreparedRound(1, step, f"{step:032x}", 1.0, (("r0", (0,)),))))

    told = []
    trainer = threading.Thread(target=rounds, daemon=True)
    with slots.handle._lock:  # hold the lock for as long as the server needs for its answer
        trainer.start()
        trainer.join(timeout=20)
    assert told == [True] * 6 and held_steps(slots, range(6)) == [4, 5]


class LateEvent:
    """The event of a copy that ends when the test says so."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def done(self) -> bool:
        return self.happened.is_set()

    def wait(self) -> None:
        assert self.happened.wait(timeout=20)


def test_a_gradient_is_not_published_while_the_device_still_copies_it(attach, plane):
    slots = GradientSlots(attach(), NBYTES, "layout", plane)
    slots.reserve()
    held = PreparedRound(1, 0, f"{0:032x}", 1.0, (("r0", (0,)),))
    slot = slots.for_round(1, 0)
    slot.copied = event = LateEvent()
    assert not slots.label(1, held)
    publishing = threading.Thread(target=lambda: slots.publish(1, held), daemon=True)
    publishing.start()
    assert held_steps(slots, range(1)) == []
    slot.buffer[:] = 5
    event.happened.set()
    publishing.join(timeout=20)
    assert held_steps(slots, range(1)) == [0] and slot.copied is None


def test_a_late_publication_does_not_label_the_round_of_another_epoch(attach, plane):
    """A cold start redoes a step whose gradient the publishing thread has not published yet."""
    slots = GradientSlots(attach(), NBYTES, "layout", plane)
    old = PreparedRound(1, 5, f"{5:032x}", 1.0, (("r0", (0,)),))
    slots.for_round(1, 5).buffer[:] = 5
    redone = slots.for_round(2, 5)
    redone.buffer[:] = 6  # half of the buffer is reduced when the other thread reads it
    slots.publish(1, old)
    assert not slots.label(1, old)
    assert held_steps(slots, range(10)) == [] and not redone.published
    new = PreparedRound(2, 5, f"{6:032x}", 1.0, (("r0", (0,)),))
    slots.publish(2, new)
    (row,) = fetch(slots.handle.url, "/v1/gradients").json
    assert (row["generation"], row["step"], row["digest"]) == (2, 5, f"{6:032x}")


def test_a_late_reservation_has_a_number_of_its_own(attach, plane):
    slots = GradientSlots(attach(), NBYTES, "layout", plane)
    run(slots, 0, 3)
    slots.reset()
    slots.reserve()
    assert sorted(slot.index for slot in slots._slots) == [0, 1, 2]


def test_a_round_may_come_before_all_memory_is_there(attach, plane):
    slots = GradientSlots(attach(), NBYTES, "layout", plane)
    run(slots, 0, 2)
    slots.reserve()
    run(slots, 2, 6)
    assert not slots.handle.holds("gradient", 3, 1) and held_steps(slots, range(6)) == [4, 5]


FETCHED = 255  # fills the gradients that are fetched; the rounds fill theirs with other numbers
ACTS = ["round", "fetch", "commit", "apply", "publish", "reserve", "listen", "lost-server"]


class OneMember:
    """A member's rounds, fetches and publications, in any order that its core allows.

    The core has at most one round that is not committed. The main thread applies one committed round at a
    time. Another thread publishes committed rounds as late as it likes, and in order.
    """

    def __init__(self, slots: GradientSlots) -> None:
        self.slots = slots
        self.epoch = self.step = 0
        self.needed: dict[int, int] = {}  # step -> the content of its slot
        self.committed: PreparedRound | None = None  # the main thread has not applied it yet
        self.late: list[PreparedRound] = []
        source = SimpleNamespace(fetch_gradient=self._fetched, cancel=lambda: None)
        loader = SimpleNamespace(make_fetcher=lambda: source)
        self.fetches = FetchThread(loader, NBYTES, SimpleNamespace(hit=lambda *_: None), pytest.fail)

    def _fetched(self, urls, *, step, into, **_) -> GradientMeta:
        into[:] = bytes([FETCHED]) * NBYTES
        return GradientMeta(1, step, 1, 1.0, "ab", "", NBYTES, {}, "http://b")

    def act(self, act: str) -> None:
        match act:
            case "round":  # the first of a step, or its next one after an abort
                self.epoch += 1
                self.needed[self.step] = self.epoch % FETCHED
                self.slots.for_round(self.epoch, self.step).buffer[:] = self.epoch % FETCHED
            case "fetch":  # this member is behind the round: it replays the steps before
                self.fetches.fetch_gradient(io.FetchGradient(1, self.step, ("http://b",)), lambda _: None)
            case "commit" if self.step in self.needed and self.committed is None:
                self.committed = PreparedRound(self.epoch, self.step, f"{self.step:032x}", 1.0, ())
                self.step += 1
                if not self.slots.label(1, self.committed):
                    self.late.append(self.committed)
            case "apply" if self.committed is not None:
                del self.needed[self.committed.step]
                self.committed = None
            case "publish" if self.late:
                with contextlib.suppress(StateError):  # there was no server when the round took its slot
                    self.slots.publish(1, self.late.pop(0))
                    self.slots.prepare()
            case "reserve":
                self.slots.reserve()
            case "listen":
                self.slots.listening = not self.slots.listening
            case "lost-server":
                self.slots.reset()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=st.lists(st.sampled_from(ACTS), min_size=20, max_size=60))
def test_the_slot_of_a_round_that_is_not_applied_yet_is_never_given_away(served, plane, monkeypatch, acts):
    """A replica that replays may hold a round that waits until its own state is there."""
    at_once = SimpleNamespace(submit=lambda job: job())
    monkeypatch.setattr(fetch_thread, "Worker", lambda *_, **__: at_once)
    member = OneMember(GradientSlots(served, NBYTES, "layout", plane))
    for act in acts:
        member.act(act)
        for step, content in member.needed.items():
            assert set(member.slots.find(step).buffer.tolist()) == {content}, (act, step)


def held_steps(slots: GradientSlots, steps: range) -> list[int]:
    held = [row["step"] for row in fetch(slots.handle.url, "/v1/gradients").json]
    return [step for step in steps if step in held]


@pytest.mark.parametrize(
    ("limit_bytes", "kept"),
    [
        (1, 5),  # gradients larger than the limit: as many slots as a fetch of the state may need
        (10 * NBYTES, 9),
    ],
)
def test_a_replica_that_catches_up_finds_the_steps_of_a_fetch_whatever_their_size(
    attach, plane, limit_bytes, kept
):
    slots = GradientSlots(attach(), NBYTES, "layout", plane, limit_bytes=limit_bytes)
    run(slots, 0, 20)
    assert held_steps(slots, range(20)) == [18, 19]
    slots.listening = True
    run(slots, 20, 40)
    assert held_steps(slots, range(40)) == list(range(40 - kept, 40))
