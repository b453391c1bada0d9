"""Attributes that forward carries from one micro-batch to the next are found, and others are left alone."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fabric.client.gradients.carried_attributes import CarriedAttributes
from fabric.client.gradients.forward_buffers import choose_buffers
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


class InPart(Cell):
    """Keeps a list of tensors, and writes into one of them."""

    def __init__(self):
        super().__init__()
        self.kept = [torch.zeros(4), torch.zeros(4)]

    def forward(self, x):
        out = self.layer(x + self.kept[0])
        self.kept[0].data[:] = x.detach().mean(0)
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


class Seeded(Cell):
    """Sets its value in both branches before it reads it."""

    def seed(self):
        if torch.cuda.is_available():
            self.kept = float(torch.rand(()))
        else:
            self.kept = float(torch.randn(()))
        return self.kept

    def forward(self, x):
        return self.layer(x) + self.seed() * 1e-3


class Decoding(Cell):
    """Keeps a value for a later decoding, as Qwen2-VL keeps rope_deltas."""

    def forward(self, x, decodes=False):
        if self.kept is None or not decodes:
            self.kept = x.detach().mean(0)
        else:
            x = x + self.kept
        return self.layer(x)


class Lengths(Cell):
    """Keeps a table for the last length, as the conformers do."""

    def __init__(self):
        super().__init__()
        self.kept, self.length = None, None

    def table(self, x):
        length = len(x)
        if length == self.length and self.kept is not None:
            return self.kept
        self.length = length
        self.kept = torch.arange(length, dtype=x.dtype)
        return self.kept

    def forward(self, x):
        return self.layer(x + self.table(x)[:, None])


class Counted(Cell):
    """Counts its calls and does not use the count."""

    def __init__(self):
        super().__init__()
        self.kept = 0

    def forward(self, x):
        self.kept += 1
        return self.layer(x)


class Sized(Cell):
    """Keeps a table for the last size, which is a tuple."""

    def __init__(self):
        super().__init__()
        self.kept, self.size = None, ()

    def forward(self, x):
        if self.size != x.shape:
            self.kept = torch.arange(len(x), dtype=x.dtype)
            self.size = x.shape
        return self.layer(x + self.kept[:, None])


class Calling(Cell):
    """Calls itself for the children of a node."""

    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(4)

    def forward(self, x, depth=2):
        self.kept = self.kept.to(x.dtype)
        x = self.layer(x + self.kept)
        return self(x, depth - 1) if depth else x


class Narrow(Cell):
    """Keeps a tensor of 8-bit floats."""

    def forward(self, x):
        if self.kept is None:
            self.kept = torch.zeros(4).to(torch.float8_e4m3fn)
        return self.layer(x + self.kept.to(x.dtype))


class Cached(Cell):
    """Makes a longer table where an input is longer than all before."""

    def forward(self, x):
        if self.kept is None or len(self.kept) < len(x):
            self.kept = torch.arange(len(x), dtype=x.dtype)
        return self.layer(x + self.kept[: len(x), None])


class Collecting(Cell):
    """Collects its losses for the end of an epoch, as modules of Lightning do."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        out = self.layer(x)
        self.kept.append(out.detach().mean())
        return out


class Stepping(Cell):
    """As a module of Lightning: its training_step counts, and steers by the count."""

    def __init__(self):
        super().__init__()
        self.kept = 0

    def forward(self, x):
        return self.layer(x)

    def training_step(self, x):
        out = self(x)
        self.kept = self.kept + 1
        return out.mean() * min(1.0, self.kept / 100)


def run(model: nn.Module, batches: int, between=lambda: None, named=frozenset()) -> None:
    """Go through so many micro-batches, each the only one of its step."""
    watched = CarriedAttributes(model, named)
    for _ in range(batches):
        watched.next_batch()
        between()
        model(torch.randn(2, 4))
        watched.check()


CARRIED = [Hidden, HiddenPair, InPlace, InPart, Annealed, Growing]


@pytest.mark.parametrize("kind", CARRIED)
def test_a_value_that_forward_reads_and_changes_is_refused(kind):
    model = nn.Sequential(kind(), nn.Linear(4, 1))
    words = r"the model carries '0.kept' .* buffers=\{\"0.kept\": \"ignore\"\}"
    with pytest.raises(ConfigError, match=words):
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


@pytest.mark.parametrize("kind", [Attention, Seeded, Decoding, Counted, Collecting, Calling, Narrow])
def test_a_value_that_forward_does_not_read_is_no_fault(kind):
    run(kind(), 10)
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize("kind", [Cached, Lengths, Sized])
def test_a_cache_that_follows_the_length_is_no_fault(kind):
    model = kind()
    watched = CarriedAttributes(model, ())
    for length in (2, 3, 3, 4, 4, 4, 5):
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


def test_a_model_that_only_reads_its_attributes_is_not_watched():
    class Sized(Cell):
        def forward(self, x):
            return self.layer(x) * self.size

    model = Sized()
    model.size = 2.0
    before = len(nn.modules.module._global_forward_hooks)
    CarriedAttributes(model, ())
    assert len(nn.modules.module._global_forward_hooks) == before


def test_the_hooks_are_gone_after_the_first_steps():
    before = len(nn.modules.module._global_forward_hooks)
    run(Hidden().eval(), 7)
    assert len(nn.modules.module._global_forward_hooks) == before + 1
    run(Hidden().eval(), 8)
    assert len(nn.modules.module._global_forward_hooks) == before + 1
    run(nn.Linear(4, 1), 1)
    assert len(nn.modules.module._global_forward_hooks) == before + 1


def test_a_training_step_is_not_watched_after_the_first_steps():
    modes = []

    class Constant(Stepping):
        def training_step(self, x):
            self.kept = self.kept.to(x.dtype)
            modes.append(_get_current_dispatch_mode())
            return (self(x) * self.kept).mean()

    model = Constant()
    model.kept = torch.ones(4)
    watched = CarriedAttributes(model, ())
    for _ in range(10):
        watched.next_batch()
        with watched.method_of(model):
            model.training_step(torch.randn(2, 4))
        watched.check()
    assert modes[7] is not None
    assert modes[8:] == [None, None]


def test_a_pattern_may_fit_a_buffer_and_an_attribute():
    model = Hidden()
    model.register_buffer("kept_long", torch.zeros(1))
    assert choose_buffers(model, {"kept*": "ignore"}).named == {"kept", "kept_long"}
    with pytest.raises(ConfigError, match="the pattern 'kept', and no buffer"):
        choose_buffers(model, {"kept": "first"})


def test_a_training_step_that_carries_a_count_is_refused():
    model = Stepping()
    watched = CarriedAttributes(model, ())
    with pytest.raises(ConfigError, match="the model carries 'kept'"):
        for _ in range(3):
            watched.next_batch()
            with watched.method_of(model):
                model.training_step(torch.randn(2, 4))
            watched.check()
