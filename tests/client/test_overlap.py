"""Buckets are handed over when their gradients are final, and each later change of one is noticed."""

import numpy as np
import pytest
import torch
from ftar.gathering import gather
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from fabric.client.gradients.bucket_stream import Overlap
from fabric.errors import ConfigError, RoundAborted
from fabric.ftar.buckets import FlatGradients
from fabric.ftar.host.exchange_buffers import raw_to_read


@pytest.fixture(scope="module")
def one_rank():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Loop:
    """A trainer's loop without a job. ``order`` makes one order, and returns what ``end_order`` said."""

    def __init__(
        self,
        model: nn.Module,
        late: tuple = (),
        inputs: torch.Tensor = torch.ones(2, 4),  # noqa: B008
    ) -> None:
        self.model, self.inputs = model, inputs
        self.gradients = FlatGradients(
            [*model.named_parameters(), *late], bucket_bytes=1, late=[name for name, _ in late]
        )
        self.announced: list[int] = []
        self.overlap = Overlap(self.gradients, lambda step, _: self.announced.append(step))
        self.sent = torch.zeros(self.gradients.nbytes, dtype=torch.uint8)

    def gather_final(self) -> list[str]:
        """Gather the buckets that are final now, as the exchange thread does; return their parameters."""
        stream, found = self.overlap.stream, []
        if stream is None:
            return []
        stream.abort(1, "not final")
        for bucket in self.gradients.buckets:
            try:
                stream.wait(bucket, 1)
            except RoundAborted:
                continue
            self.gradients.gather_bucket(bucket, self.sent)
            found += [name for name, _ in bucket.parameters]
        return found

    def order(
        self, *, micro_batches: int = 2, after=lambda: None, settle=lambda: None, chunks=0, weight=1.0
    ) -> str:
        """``chunks``: so many backward passes in each micro-batch, as of a pipeline schedule, that no call of
        ``step.backward`` announces."""
        for left in reversed(range(micro_batches)):
            with self.overlap.micro_batch(step := len(self.announced), last=left == 0):
                for _ in range(chunks):
                    self.model(self.inputs).sum().backward()
                if not chunks:
                    self.overlap.backward(step, 1.0, self.model(self.inputs).sum().backward)
        after()
        self.gather_final()
        self.gradients.settle()
        settle()
        return self.overlap.end_order(weight)

    def holds(self) -> bool:
        """Whether what was sent are the gradients as they are now."""
        flat = torch.zeros_like(self.sent)
        gather(self.gradients, flat)
        return torch.equal(flat, self.sent)


def layers(sharded: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model


def final_during_backward(loop: Loop, chunks: int = 0) -> list[str]:
    """Return the parameters whose buckets are final when backward is at the model's second layer."""
    found: list[list[str]] = []
    hook = loop.model[2].register_full_backward_hook(lambda *_: found.append(loop.gather_final()))
    assert not loop.order(chunks=chunks)
    hook.remove()
    return found[-1]


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_what_is_final_during_backward_is_sent_and_stays_equal(one_rank, sharded, micro_batches):
    loop = Loop(layers(sharded))
    assert not loop.order(micro_batches=micro_batches)
    for _ in range(3):
        loop.model.zero_grad()
        assert final_during_backward(loop)[:2] == ["3.bias", "3.weight"]
        assert loop.holds()
        assert not loop.order(micro_batches=micro_batches) and loop.holds()
    assert loop.overlap._usable and len(loop.announced) >= 6


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.grad.mul_(2.0),
        lambda p: torch._foreach_mul_([p.grad], 2.0),
        lambda p: getattr(p.grad, "_local_tensor", p.grad).add_(1.0),
        lambda p: getattr(p.grad, "_local_tensor", p.grad).data.mul_(2.0),
        lambda p: np.multiply(array := getattr(p.grad, "_local_tensor", p.grad).numpy(), 2, out=array),
        lambda p: nn.utils.clip_grad_norm_([p], 1e-3),
        lambda p: setattr(p, "grad", p.grad.clone()),
        lambda p: setattr(p, "grad", None),
    ],
    ids=[
        *("in place", "foreach", "this rank's part", "by .data", "by numpy"),
        *("clipped", "another tensor", "none"),
    ],
)
@pytest.mark.parametrize("when", ["backward", "order"])
def test_each_change_after_a_gradient_was_sent_is_noticed(one_rank, sharded, change, when):
    loop = Loop(layers(sharded))
    loop.order()
    changed = loop.model[3].weight
    if when == "order":
        assert "was changed" in loop.order(after=lambda: change(changed))
    else:

        def in_backward(*_) -> None:
            if loop.overlap.stream is not None:
                change(changed)

        hook = loop.model[2].register_full_backward_hook(in_backward)
        assert "was changed" in loop.order()
        hook.remove()
    announced = len(loop.announced)
    assert not loop.order() and len(loop.announced) == announced, "overlap is off from now on"


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_what_other_code_than_fabric_adds_is_sent_when_it_is_final(one_rank, sharded, micro_batches):
    loop = Loop(layers(sharded))
    assert not loop.order(micro_batches=micro_batches, chunks=3) and not loop.announced[1:]
    for _ in range(3):
        loop.model.zero_grad()
        assert final_during_backward(loop, chunks=3)[:2] == ["3.bias", "3.weight"]
        assert loop.holds()
        assert not loop.order(micro_batches=micro_batches, chunks=3) and loop.holds()
    assert loop.overlap._usable and len(loop.announced) >= 6


@pytest.mark.parametrize(
    "how",
    [
        {"chunks": 4, "micro_batches": 1},
        {"after": lambda loop: loop.model[3].weight.grad.mul_(2.0)},
        {"after": lambda loop: loop.model[0].weight.grad.data.mul_(2.0)},
        {"weight": 0.0},
    ],
    ids=["one more addition", "in place", "by .data", "no weight"],
)
def test_each_change_of_what_other_code_has_added_is_noticed(one_rank, how):
    loop = Loop(layers(False))
    assert not loop.order(chunks=3)
    after = how.pop("after", lambda _: None)
    assert "was changed" in loop.order(**{"chunks": 3, **how}, after=lambda: after(loop))
    announced = len(loop.announced)
    assert not loop.order(chunks=3) and len(loop.announced) == announced, "overlap is off from now on"


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp2"])
def test_memory_that_a_round_reads_in_place_outlives_a_change(one_rank, sharded):
    """The round is redone then, but its thread may read until it hears of that."""
    loop = Loop(layers(sharded))
    loop.order()
    changed, read = loop.model[3].weight, []

    def send_and_change() -> None:
        (bucket,) = (x for x in loop.gradients.buckets if x.parameters[0][1] is changed)
        own, presence = loop.gradients.gather_bucket(bucket, loop.sent, in_place=True)
        read.extend([own, raw_to_read(own), presence])
        read.append(bytes(read[1]))
        changed.grad.zero_()

    streams = []
    loop.model.zero_grad()
    assert "was changed" in loop.order(after=lambda: [streams.append(loop.overlap.stream), send_and_change()])
    own, place, _, before = read
    others = [torch.full_like(own, 7.0) for _ in range(100)]  # they would take freed memory
    assert bytes(place) == before and any(before) and not changed.grad.any() and others


def test_a_sparse_gradient_is_refused_where_it_is_gathered_and_not_in_backward():
    table = nn.Embedding(8, 4, sparse=True)
    loop = Loop(nn.Sequential(table, nn.Linear(4, 4), nn.Linear(4, 2)), inputs=torch.arange(2))
    with pytest.raises(ConfigError, match="sparse"):
        loop.order()


def test_a_gradient_is_final_when_backward_has_added_to_it_as_often_as_before():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(torch.utils.checkpoint.checkpoint(self.layer, self.layer(x), use_reentrant=True))

    loop = Loop(Twice())
    for _ in range(3):
        assert not loop.order() and loop.holds()
    assert len(loop.announced) == 3


def test_a_backward_that_adds_more_often_than_the_one_before_is_noticed():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head, self.times = nn.Linear(4, 4), nn.Linear(4, 2), 1

        def forward(self, x):
            for _ in range(self.times):
                x = torch.utils.checkpoint.checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
            return self.head(x)

    loop = Loop(Recurrent())
    loop.order()
    loop.model.times = 2
    assert "was changed" in loop.order(micro_batches=1)


def test_an_addition_that_ddp_reports_once_more_than_before_is_noticed():
    loop = Loop(layers(False))
    loop.overlap.unwatch()
    parameters = list(loop.model.parameters())
    for reported in (parameters, [*parameters, parameters[0]]):
        loop.overlap.micro_batch(0, last=reported is not parameters)
        loop.overlap.backward(0, 1.0, lambda r=reported: [loop.overlap.ready(p, version=False) for p in r])
    assert loop.announced and "was changed" in loop.overlap.end_order(1.0)


def test_late_values_are_final_when_the_order_ends():
    late = nn.Parameter(torch.zeros(3))
    loop = Loop(layers(False), late=(("buffer", late),))
    assert [b.parameters[0][0] for b in loop.gradients.buckets][-1] == "buffer"
    loop.order()
    held: list[list[str]] = []

    def put_in() -> None:
        held.append(loop.gather_final())
        late.grad = torch.ones(3)

    stream_of: list = []
    assert not loop.order(after=lambda: stream_of.append(loop.overlap.stream), settle=put_in)
    assert "buffer" not in held[-1] and len(held[-1]) == 6
    stream_of[0].wait(loop.gradients.buckets[-1], 1)
    assert loop.overlap._usable


def test_an_abort_ends_the_waits_of_its_epoch_and_not_of_a_later_one():
    loop = Loop(layers(False))
    loop.overlap.micro_batch(0, last=False)
    loop.overlap.backward(0, 1.0, lambda: None)
    loop.overlap.micro_batch(0, last=True)
    bucket = loop.gradients.buckets[0]

    def last_backward() -> None:
        stream = loop.overlap.stream
        assert stream is not None
        stream.abort(3, "r1 is gone")
        with pytest.raises(RoundAborted, match="r1 is gone"):
            stream.wait(bucket, 3)
        stream._changed.wait = lambda: stream.finish(bucket)  # it becomes final while the later round waits
        stream.wait(bucket, 4)

    loop.overlap.backward(0, 1.0, last_backward)
