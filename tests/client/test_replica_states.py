"""States of each replica's own, without services: rows, hand-over and refusals."""

import random

import pytest
import torch

from fabric.client.gradients.forward_buffers import ROW_BYTES, ReplicaStates
from fabric.errors import ConfigError


class Counter:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value, "generator": torch.ones(3)}

    def load_state_dict(self, state):
        self.value = state["value"]


def states(slot, counter):
    return ReplicaStates({"data": counter}, slot, 3, torch.device("cpu"))


def test_a_commit_has_the_states_of_all_that_contributed_and_a_newcomer_takes_its_slots():
    members = [states(slot, Counter(10 + slot)) for slot in (0, 1)]
    for member in members:
        member.contribute()
    total = sum(member.stand_ins[0][1].grad for member in members)
    for member in members:
        member.stand_ins[0][1].grad = total / 7.0  # the exchange divides by the weight
        member.commit(7.0)
    assert torch.equal(members[0].state_dict()["rows"], members[1].state_dict()["rows"])
    for slot, value in ((1, 11), (2, 0)):  # no replica had slot 2
        counter = Counter()
        newcomer = states(slot, counter)
        newcomer.load_state_dict(members[0].state_dict())
        assert counter.value == value and newcomer.handed_over == 1


@pytest.mark.parametrize(("workers", "bytes_of_one"), [(4, 16_000), (16, 16_000)])
@pytest.mark.parametrize("weight", [1.0, 7.0, 1e-3, 3_000_003.0])
def test_the_states_of_many_loader_workers_fit_and_arrive_unchanged(workers, bytes_of_one, weight):
    """As each worker of a StatefulDataLoader has the state of a generator, which does not compress."""
    states_of_workers = [random.randbytes(bytes_of_one // 2).hex() for _ in range(workers)]
    source, target = Counter(states_of_workers), Counter()
    source.num_workers = target.num_workers = workers
    sender, newcomer = states(1, source), states(1, target)
    sender.contribute()
    sender.stand_ins[0][1].grad = sender.stand_ins[0][1].grad / weight
    sender.commit(weight)
    newcomer.load_state_dict(sender.state_dict())
    assert target.value == states_of_workers


def test_a_loader_goes_on_where_the_hand_over_has_put_it():
    class Numbers(Counter):
        def __iter__(self):
            while self.value < 9:
                self.value += 1
                yield self.value

    numbers = Numbers()
    own = states(0, numbers)
    batches = own.batches(numbers)
    assert [next(batches), next(batches)] == [1, 2]
    numbers.value = 6
    own.hand_over()
    assert next(batches) == 7


def test_batches_of_a_loader_that_is_no_local_state_are_refused():
    """A replica that joins would read its data from the beginning."""
    own = ReplicaStates({}, 0, 3, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"none is given: give attach local_state="):
        next(own.batches([1, 2]))


def test_a_state_that_is_too_large_or_no_state_is_refused():
    large = Counter([random.random() for _ in range(ROW_BYTES // 8)])
    with pytest.raises(ConfigError, match=r"local_state has \d+ bytes after compression, and 65536 fit"):
        states(0, large).contribute()
    with pytest.raises(ConfigError, match=r"local_state\['data'\] is a object without state_dict"):
        states(0, object())
