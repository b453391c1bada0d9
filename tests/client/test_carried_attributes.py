"""Attributes that forward carries from one micro-batch to the next are found, and others are left alone."""

import pytest
import torch
from torch import nn

from fabric.client.gradients.buffer_choices import choose_buffers
from fabric.client.gradients.carried_attributes import CarriedAttributes
from fabric.errors import ConfigError


class Cell(nn.Module):
    """Base of the modules below: a layer, and the attribute ``kept``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cell = nn.Linear(4, 4), nn.GRUCell(4, 4)
        self.kept = None

    def reset(self) -> None:
        self.kept = None


class Hidden(Cell):
    def forward(self, x):
        if self.kept is None:
            self.kept = torch.zeros_like(x)
        self.kept = self.cell(x, self.kept).detach()
        return self.layer(self.kept)


class HiddenPair(Cell):
    def first(self, x):
        return (x * 0, x * 0) if self.kept is None else self.kept

    def forward(self, x):
        short, long = self.first(x)
        out = self.layer(x + short)
        self.kept = (out.detach(), long + x)
        return out


class InPlace(Cell):
    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(4)

    def forward(self, x):
        out = self.layer(x + self.kept)
        with torch.no_grad():
            self.kept.lerp_(x.mean(0), 0.1)
        return out


class Annealed(Cell):
    def __init__(self):
        super().__init__()
        self.kept = 0

    def forward(self, x):
        self.kept += 1
        return self.layer(x) * min(1.0, self.kept / 100)


class Growing(Cell):
    """Sets its value under a condition, and in each micro-batch."""

    def __init__(self):
        super().__init__()
        self.kept = 0.0

    def forward(self, x):
        x = x - self.kept
        if self.training:
            self.kept = self.kept * 0.9 + float(x.mean())
        return self.layer(x)


class Attention(Cell):
    """Keeps its last map for others to look at."""

    def forward(self, x):
        self.kept = x.softmax(-1)
        return self.layer(self.kept)


class Counted(Cell):
    """Counts its calls and does not use the count."""

    def __init__(self):
        super().__init__()
        self.kept = 0

    def forward(self, x):
        self.kept += 1
        return self.layer(x)


class Cached(Cell):
    """Makes a longer table where an input is longer than all before."""

    def forward(self, x):
        if self.kept is None or len(self.kept) < len(x):
            self.kept = torch.arange(len(x), dtype=x.dtype)
        return self.layer(x + self.kept[: len(x), None])


def run(model: nn.Module, batches: int, between=lambda: None, named=frozenset()) -> None:
    """Go through so many micro-batches, each the only one of its step."""
    watched = CarriedAttributes(model, named)
    for _ in range(batches):
        watched.next_batch()
        between()
        model(torch.randn(2, 4))
        watched.check()


CARRIED = [Hidden, HiddenPair, InPlace, Annealed, Growing]


@pytest.mark.parametrize("kind", CARRIED)
def test_a_value_that_forward_reads_and_changes_is_refused(kind):
    model = nn.Sequential(kind(), nn.Linear(4, 1))
    with pytest.raises(ConfigError, match=r"forward carries '0.kept' .* buffers=\{\"0.kept\": \"ignore\"\}"):
        run(model, 5)


@pytest.mark.parametrize("kind", CARRIED)
def test_a_choice_to_ignore_it_is_taken(kind):
    model = nn.Sequential(kind(), nn.Linear(4, 1))
    run(model, 10, named=choose_buffers(model, {"0.kept": "ignore"}).named)


@pytest.mark.parametrize("kind", [Hidden, HiddenPair])
def test_a_hidden_state_that_the_loop_resets_is_no_fault(kind):
    model = kind()
    run(model, 10, between=model.reset)


def test_a_hidden_state_within_one_micro_batch_is_no_fault():
    model = Hidden()
    watched = CarriedAttributes(model, ())
    for _ in range(4):
        watched.next_batch()
        model.reset()
        for _ in range(3):
            model(torch.randn(2, 4))
        watched.check()


@pytest.mark.parametrize("kind", [Attention, Counted])
def test_a_value_that_forward_does_not_read_is_no_fault(kind):
    run(kind(), 10)


def test_a_cache_that_grows_twice_is_no_fault():
    model = Cached()
    watched = CarriedAttributes(model, ())
    for length in (2, 3, 3, 4, 4, 4):
        watched.next_batch()
        model(torch.randn(length, 4))
        watched.check()


def test_an_evaluation_between_two_micro_batches_carries_nothing():
    model = Hidden()

    def evaluate() -> None:
        model.reset()
        model.eval()
        model(torch.randn(2, 4))
        model.train()
        model.reset()

    run(model, 6, between=evaluate)


def test_the_hooks_are_gone_after_the_first_steps():
    before = len(nn.modules.module._global_forward_hooks)
    run(Hidden().eval(), 7)
    assert len(nn.modules.module._global_forward_hooks) == before + 1
    run(Hidden().eval(), 8)
    assert len(nn.modules.module._global_forward_hooks) == before + 1
    run(nn.Linear(4, 1), 1)
    assert len(nn.modules.module._global_forward_hooks) == before + 1


def test_a_pattern_may_fit_a_buffer_and_an_attribute():
    model = Hidden()
    model.register_buffer("kept_long", torch.zeros(1))
    assert choose_buffers(model, {"kept*": "ignore"}).named == {"kept", "kept_long"}
    with pytest.raises(ConfigError, match="the pattern 'kept', and no buffer"):
        choose_buffers(model, {"kept": "first"})
