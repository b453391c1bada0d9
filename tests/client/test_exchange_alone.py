"""The round of the only member, in the thread that asks for it."""

import queue
import threading

import pytest
import torch

from fabric.ckpt_server.format.manifest import bytes_digest
from fabric.client.gradients.exchange_thread import ExchangeThread
from fabric.client.gradients.gradient_backend import HostBackend
from fabric.client.gradients.gradient_slots import GradientSlot, GradientSlots
from fabric.errors import RoundAborted
from fabric.ftar.buckets import FlatGradients
from fabric.ftar.reduce_ops import put_together
from fabric.model import Fence
from fabric.protocol.messages import member_events as io
from fabric.runtime.failpoints import Failpoints


class Plane:
    """A data plane that notes the thread of each all-reduce, and first calls ``before``."""

    waiting_s: dict[str, float] = {}  # noqa: RUF012
    sending_s: dict[str, float] = {}  # noqa: RUF012

    def __init__(self, before=lambda step: None):
        self.before = before
        self.rounds: list[tuple[int, str]] = []

    def all_reduce(self, epoch, step, source, result, *_, **__):
        put_together(source, result)
        self.rounds.append((step, threading.current_thread().name))
        self.before(step)


def make_exchange(plane, on_crash=print):
    model = torch.nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    gradients = FlatGradients(model.named_parameters())
    slots = GradientSlots(None, gradients.nbytes, gradients.layout, plane)
    slots._slots = [GradientSlot(i, torch.zeros(gradients.nbytes, dtype=torch.uint8)) for i in range(3)]
    return ExchangeThread(plane, gradients, slots, Failpoints(""), on_crash, HostBackend()), gradients, slots


def order(step: int) -> io.StartExchange:
    return io.StartExchange(Fence("", 1, 1), step, 1.0)


def test_the_asking_thread_does_the_round():
    plane = Plane()
    exchange, gradients, slots = make_exchange(plane)
    posted: list[io.Event] = []
    exchange.run_alone(order(4), posted.append)
    exchange.close()
    assert plane.rounds == [(4, threading.current_thread().name)]
    (outcome,) = posted
    assert isinstance(outcome, io.Exchanged) and outcome.step == 4
    (bucket,), slot = gradients.buckets, slots.find(4)
    assert bucket.view(slot.buffer).tolist() == [2.0] * 8 + [1.0] * 2 and not slot.absent


def test_it_begins_after_the_end_of_an_aborted_round():
    """The other members are gone, and the exchange thread has not yet left the round with them."""
    is_inside, may_leave = threading.Event(), threading.Event()

    def lose_the_peer(step: int) -> None:
        if step == 1:
            is_inside.set()
            assert may_leave.wait(60)
            raise RoundAborted("r1 is gone", "r1")

    plane = Plane(lose_the_peer)
    exchange, _, _ = make_exchange(plane)
    posted: queue.SimpleQueue = queue.SimpleQueue()
    exchange.start(order(1), None, posted.put)
    assert is_inside.wait(60)
    alone = threading.Thread(target=exchange.run_alone, args=(order(2), posted.put), name="alone")
    alone.start()
    alone.join(0.2)  # without the lock it has ended by now
    assert alone.is_alive() and plane.rounds == [(1, "fabric-exchange")]
    may_leave.set()
    alone.join(60)
    exchange.close()
    assert plane.rounds == [(1, "fabric-exchange"), (2, "alone")]
    outcomes = {type(event): event for event in (posted.get(timeout=60), posted.get(timeout=60))}
    assert outcomes[io.ExchangeFailed].about == "r1" and outcomes[io.Exchanged].step == 2


def test_a_defect_ends_the_process_and_not_the_users_loop():
    def fail(_: int) -> None:
        raise RuntimeError("the device is lost")

    crashes: list[BaseException] = []
    exchange, _, _ = make_exchange(Plane(fail), crashes.append)
    exchange.run_alone(order(1), lambda event: crashes.append(AssertionError(event)))
    exchange.close()
    assert [str(error) for error in crashes] == ["the device is lost"]


def test_a_member_gives_its_own_values_only_in_the_epochs_in_which_it_is_the_first():
    exchange, gradients, slots = make_exchange(Plane())
    gradients.of_one = frozenset({"bias"})
    posted: list[io.Event] = []
    exchange.gives_in.append(2)
    for epoch, step in ((1, 4), (2, 5), (3, 6)):
        exchange.run_alone(io.StartExchange(Fence("", 1, epoch), step, 1.0), posted.append)
    exchange.close()
    given = []
    for step in (4, 5, 6):
        sums = {name: view for name, _, view in gradients.buckets[0].views(slots.find(step).buffer)}
        given.append((sums["bias"].tolist(), sorted(slots.find(step).absent)))
    assert given == [([0.0, 0.0], ["bias"]), ([2.0, 2.0], []), ([0.0, 0.0], ["bias"])]


def random_gradients(gradients, seed=0):
    torch.manual_seed(seed)
    for _, parameter in gradients.parameters:
        parameter.grad = torch.randn_like(parameter) * 1e3


@pytest.mark.parametrize("weight", [1.0, 7.0, 0.3])
def test_a_sum_that_no_replica_asks_for_stays_in_the_gradients_with_the_same_bits(weight):
    averages = []
    for wanted in (True, False):
        plane = Plane()
        exchange, gradients, slots = make_exchange(plane)
        gradients.of_one = frozenset({"bias"})
        exchange.gives_in.append(1)
        random_gradients(gradients)
        exchange.run_alone(order(4), lambda event: None, wanted)
        exchange.close()
        assert exchange.stays(4) is not wanted and bool(plane.rounds) is wanted
        if wanted:
            gradients.scatter(slots.find(4).buffer, weight)
        else:
            gradients.divide(weight)
        averages.append([p.grad.clone() for _, p in gradients.parameters])
    for scattered, divided in zip(*averages, strict=True):
        assert scattered.view(torch.int32).equal(divided.view(torch.int32))


def test_such_a_sum_goes_to_its_slot_where_a_replica_comes_during_the_round():
    exchange, gradients, slots = make_exchange(Plane())
    posted: list[io.Event] = []
    exchange.run_alone(order(4), posted.append, wanted=False)
    assert exchange.move() and not exchange.stays(4)
    exchange.close()
    (bucket,), slot = gradients.buckets, slots.find(4)
    assert bucket.view(slot.buffer).tolist() == [2.0] * 8 + [1.0] * 2
    # The digest of the bytes goes with the gradient, and the name of the round stays for the members.
    assert slot.bytes_digest == bytes_digest(slot.buffer.numpy().data) != posted[0].gradient_digest


def test_such_a_sum_stays_where_it_is_if_it_cannot_be_moved():
    def lose_the_ring(_: int) -> None:
        raise RoundAborted("the epoch is over")

    exchange, _, _ = make_exchange(Plane(lose_the_ring))
    exchange.run_alone(order(4), lambda event: None, wanted=False)
    assert not exchange.move() and exchange.stays(4)
    exchange.close()


def test_such_a_round_names_a_gradient_that_cannot_be_summed():
    exchange, gradients, _ = make_exchange(Plane())
    weight = gradients.parameters[0][1]
    weight.grad = weight.grad.to_sparse()
    posted: list[io.Event] = []
    exchange.run_alone(order(4), posted.append, wanted=False)
    exchange.close()
    assert [type(event) for event in posted] == [io.LoopRaised] and "sparse" in posted[0].why
    assert not exchange.stays(4)


def test_parameters_that_share_one_gradient_have_it_divided_once():
    model = torch.nn.ParameterList([torch.zeros(2), torch.zeros(2)])
    shared = torch.full((2,), 6.0)
    for parameter in model:
        parameter.grad = shared
    FlatGradients(model.named_parameters()).divide(2.0)
    assert shared.tolist() == [3.0, 3.0]
