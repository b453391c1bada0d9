"""Every replica that computes a micro-batch draws the same."""

import random

import numpy as np
import pytest
import torch

import fabric.client
from fabric.client.data.randomness import UpdateRandomness, micro_batch_seed, seed_everything


def draw():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


def test_a_micro_batch_draws_the_same_again_and_other_micro_batches_differ():
    seed_everything(1, 2, 3)
    first = draw()
    draw()
    seed_everything(1, 2, 3)
    assert draw() == first
    seeds = {micro_batch_seed(a, b, c) for a in range(3) for b in range(20) for c in range(20)}
    assert len(seeds) == 3 * 20 * 20 and max(seeds) < 2**63


def test_ranks_that_the_script_has_seeded_differently_draw_differently():
    drawn = []
    for draws in (0, 1, 1):
        randomness = UpdateRandomness([], draws)
        seed_everything(1, 2, 3, draws)
        in_batch = draw()
        randomness.begin(11)
        drawn.append((in_batch, draw()))
    assert drawn[1] == drawn[2]
    assert drawn[0][0] != drawn[1][0] and drawn[0][1] != drawn[1][1]


def model_and_optimizers(count: int = 1):
    torch.manual_seed(3)
    model = torch.nn.Linear(2, count)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(count)]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return model, optimizers


def test_an_update_draws_the_same_after_any_number_of_draws():
    """A member has drawn for one micro-batch, another for five, and a newcomer for none."""
    drawn = []
    for micro_batches in (1, 5, 0):
        randomness = UpdateRandomness([])
        randomness.follow_steps(7)
        for micro_batch in range(micro_batches):
            seed_everything(7, 11, micro_batch)
            draw()
        randomness.begin(11)
        drawn.append(draw())
    assert drawn[0] == drawn[1] == drawn[2]
    randomness.begin(12)
    assert draw() != drawn[0]


def test_a_loop_of_the_users_own_gets_its_generators_back_from_the_first_optimizers_step():
    _, optimizers = model_and_optimizers(2)
    randomness = UpdateRandomness(optimizers)
    seed_everything(1, 1, 1)
    expected = [draw() for _ in range(2)]
    seed_everything(1, 1, 1)
    for number in range(2):
        randomness.begin(number)
        in_update = draw()
        for optimizer in optimizers:
            optimizer.step()
        assert draw() == expected[number] != in_update


class Noisy(torch.optim.SGD):
    """Adds noise of all three generators in its step."""

    def step(self, closure=None):
        self.drawn = draw()
        return super().step(closure)


def test_every_optimizers_step_draws_the_same_on_all_members_and_otherwise_than_the_others():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    by_member = []
    for member in range(2):
        optimizers = [Noisy([p], lr=0.1) for p in parameters]
        randomness = UpdateRandomness(optimizers)
        seed_everything(9, 0, member)  # as a user who seeds each replica by its number
        randomness.begin(4)
        for optimizer in optimizers:
            optimizer.step()
        by_member.append([optimizer.drawn for optimizer in optimizers])
    assert by_member[0] == by_member[1]
    assert len({str(x) for x in by_member[0]}) == 3


def test_the_optimizers_of_a_loop_that_has_not_exchanged_yet_draw_as_the_user_has_seeded():
    optimizer = Noisy([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    UpdateRandomness([optimizer])
    seed_everything(5, 5, 5)
    expected = draw()
    seed_everything(5, 5, 5)
    optimizer.step()
    assert optimizer.drawn == expected


@pytest.mark.parametrize("loop", ["steps", "exchange"])
def test_disabled_an_update_draws_by_seed_and_step_too(loop):
    drawn = []
    for extra in (0, 3):
        model, (optimizer,) = model_and_optimizers()
        session = fabric.client.attach(model, optimizer, job="j", replica="r0", disable=True)
        torch.manual_seed(extra)
        torch.rand(extra)
        if loop == "steps":
            data = session.loader(range(8), global_batch_size=4, micro_batch_size=2, seed=6)
            for step in session.steps(data, until=2):
                for batch in step:
                    torch.rand(extra)
                    step.backward(model(batch[:, None].float().expand(-1, 2)).mean())
                drawn.append(draw())
        else:
            session.sampler(8, global_batch_size=4, seed=6)
            for _ in range(2):
                session.exchange()
                drawn.append(draw())
    assert drawn[:2] == drawn[2:] and drawn[0] != drawn[1]
