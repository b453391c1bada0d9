"""``--adopt`` without services: what is refused, and how a loop goes over steps that the job has made."""

import functools
import gc
import itertools
import os
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import fabric.client
from fabric.client.data.randomness import UpdateRandomness, seed_everything
from fabric.errors import ConfigError
from fabric.integrations.adopt import adopted_loop, adoption
from fabric.integrations.adopt.adopted_data import InputWatch
from fabric.integrations.adopt.adoption import run_adopted


class ScriptedSession(fabric.client.Session):
    """A job whose exchanges return the steps of ``numbers``, the first of them ``replayed``."""

    def __init__(self, numbers=(), replayed=0):
        self.numbers, self.replays, self.made = iter(numbers), replayed, []
        self.skips, self.state = (), {}  # steps without an update, and the shared state beside the model
        self.sampler = None
        self.took, self.closed, self.at = [], False, 0
        self.model = None
        self.randomness = UpdateRandomness([])
        self.handover = SimpleNamespace(resume=self.randomness.begin)

    is_writer = True

    def say_in(self, words):
        pass

    def draw_from(self, sampler):
        self.sampler = sampler

    def metrics(self, **values):
        pass

    def exchange(self, weight=1.0):
        if self.sampler is not None:
            self.took.append((self.at, self.sampler.take(self.at)))
        number = next(self.numbers, self.at)
        replayed = len(self.made) < self.replays
        for parameter in self.model.parameters():
            if replayed or parameter.grad is None:
                parameter.grad = torch.ones_like(parameter)
            if number in self.skips:
                parameter.grad = None
        self.randomness.begin(number)
        self.at = number + 1
        self.made.append((number, weight))
        skipped = number in self.skips
        return SimpleNamespace(number=number, replayed=replayed, skipped=skipped, metrics={})

    def close(self):
        self.closed = True


@pytest.fixture
def adopt(monkeypatch):
    """Runs a script of this file against a scripted job; returns the job."""
    monkeypatch.setenv("FABRIC_REPLICA", "r1")
    monkeypatch.setenv("FABRIC_REPLICAS", "2")
    monkeypatch.setenv("FABRIC_LIGHTHOUSE", "http://127.0.0.1:1")
    monkeypatch.setenv("FABRIC_JOB", "adopted")

    def run(script, session=None):
        session = session or ScriptedSession()

        def attach(model, optimizer, state=None, **_):
            session.model, session.state = model, state
            session.randomness = UpdateRandomness([optimizer])
            session.handover.resume = session.randomness.begin
            return session

        monkeypatch.setattr(fabric.client, "attach", attach)
        # Objects that others have left do not belong to the script: the search does not see frozen ones.
        gc.collect()
        gc.freeze()
        run_adopted(script)
        return session

    return run


def make(width=1):
    model = torch.nn.Linear(2, width)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def data(shuffle=True, size=16, batch_size=2):
    return DataLoader(TensorDataset(torch.randn(size, 2)), batch_size=batch_size, shuffle=shuffle)


def two_models():
    model, optimizer = make()
    other = torch.nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert other


def two_optimizers():
    model, optimizer = make()
    other = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert other


def foreign_parameters():
    model = torch.nn.Linear(2, 1)
    free = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), free])
    model(free).sum().backward()
    optimizer.step()


def closure():
    model, optimizer = make()
    optimizer.step(lambda: model(torch.ones(2)).sum())


def step_without_backward():
    make()[1].step()


def attaches():
    fabric.client.attach(*make())


def nothing():
    pass


def clips_too_early():
    model, optimizer = make()
    for _ in range(2):
        model(torch.ones(2)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def plateau():
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert scheduler


def changes_its_gradient():
    model, optimizer = make()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        model.weight.grad.mul_(0.5 if _ else 1)
        optimizer.step()


def several_loaders():
    model, optimizer = make()
    for (x,), (z,) in zip(data(), data(), strict=True):
        model(x + z).sum().backward()
        optimizer.step()


def another_stage():
    model, optimizer = make()
    for stage in (data(size=4), data(size=8)):
        for (x,) in stage:
            model(x).sum().backward()
            optimizer.step()


def one_batch_of_another():
    model, optimizer = make()
    unlabelled = data(shuffle=False)
    for (x,) in data():
        model(x + next(iter(unlabelled))[0]).sum().backward()
        optimizer.step()


def reads_within_no_grad():
    model, optimizer = make()

    @torch.no_grad()
    def batches():
        yield from data()

    for (x,) in batches():
        model(x).sum().backward()
        optimizer.step()


def iterates_within_no_grad():
    model, optimizer = make()
    loader = data()
    with torch.no_grad():
        whole = iter(loader)
    for (_,), (x,) in zip(loader, whole, strict=False):
        model(x).sum().backward()
        optimizer.step()


def reads_ahead():
    model, optimizer = make()
    batches = iter(data())
    following = next(batches)
    while following is not None:
        (x,), following = following, next(batches, None)
        model(x).sum().backward()
        optimizer.step()


def gives_batches_in_its_own_way():
    class Own(DataLoader):
        def __iter__(self):
            yield (torch.randn(2, 2),)

    model, optimizer = make()
    for (x,) in Own(TensorDataset(torch.randn(4, 2)), shuffle=True):
        model(x).sum().backward()
        optimizer.step()


def reads_all_before_it_trains():
    list(data())


def trains_on_a_batch_again():
    model, optimizer = make()
    (x,) = next(iter(data()))
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()


def fixed_order_beside_another():
    model, optimizer = make()
    validation = data()
    for (x,) in data(shuffle=False):
        model(x).sum().backward()
        optimizer.step()
    assert validation


def length_of_an_evaluation():
    model, optimizer = make()
    train, validation = data(), data(size=8)
    assert len(validation)
    for (x,) in train:
        model(x).sum().backward()
        optimizer.step()


def leaves_the_loader_within_a_step():
    model, optimizer = make()
    dataset = TensorDataset(torch.randn(16, 2))
    loader = DataLoader(dataset, batch_size=2, sampler=SubsetRandomSampler(range(16)))
    for _ in range(2):
        for number, (x,) in enumerate(loader):
            model(x).sum().backward()
            if number == 2:
                break
            if number % 2:
                optimizer.step()


def a_sample_for_two_ranks_among_other_batches():
    model, optimizer = make()
    for number, (x,) in enumerate(data(size=13)):
        model(x).sum().backward()
        if number % 2:
            optimizer.step()


def three_samples_for_two_ranks_among_other_batches():
    model, optimizer = make()
    for number, (x,) in enumerate(data(size=15)):
        model(x).sum().backward()
        if number % 2:
            optimizer.step()


def steps_that_do_not_divide_a_pass():
    model, optimizer = make()
    for number, (x,) in enumerate(data(size=20)):  # five batches a pass
        model(x).sum().backward()
        if number % 2:
            optimizer.step()


def other_steps_later():
    model, optimizer = make()
    for number, (x,) in enumerate(data()):
        model(x).sum().backward()
        if number in (0, 2):
            optimizer.step()


def no_optimizer():
    model = torch.nn.Linear(2, 1)
    for (x,) in data():
        model(x).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad


def updates_by_hand():
    model = torch.nn.Linear(2, 1)
    for (x,) in data():
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)


def too_few_samples():
    len(DataLoader(TensorDataset(torch.randn(3, 2)), batch_size=2, shuffle=True, drop_last=True))


def drops_a_gradient(has_scheduler):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if has_scheduler else None
    for (x,) in data():
        optimizer.zero_grad()
        model(x).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if len(optimizer.state) or has_scheduler:
            continue
        optimizer.step()
    assert scheduler


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (two_models, r"takes a script with one model, and this one has Linear, Linear: change the script"),
        (two_optimizers, "takes a script with one optimizer, and this one has AdamW, SGD: change"),
        (updates_by_hand, "changes parameters by hand between backward passes, and --adopt exchanges at"),
        (no_optimizer, "this one has none: let an optimizer such as torch.optim.SGD change the parameters"),
        (foreign_parameters, "has parameters that Linear has not"),
        (closure, "gives its optimizer a closure"),
        (step_without_backward, "makes a step without a backward pass before it"),
        (attaches, "calls fabric.client.attach already: run it without --adopt"),
        (nothing, "has ended without an optimizer step in this process"),
        (clips_too_early, "another backward pass between the first use of the gradient and its update"),
        (functools.partial(drops_a_gradient, True), "between the first use of the gradient and its update"),
        (plateau, "cannot advance a ReduceLROnPlateau"),
        (changes_its_gradient, "changes its gradients between the backward pass and"),
        (
            several_loaders,
            "trains on batches of the DataLoader over TensorDataset that --adopt does not deal out",
        ),
        (
            another_stage,
            "trains on batches of the DataLoader over TensorDataset that --adopt does not deal out",
        ),
        (
            one_batch_of_another,
            "trains on batches of the DataLoader over TensorDataset that --adopt does not deal out",
        ),
        (
            reads_within_no_grad,
            "trains on batches of the DataLoader over TensorDataset that --adopt does not deal out",
        ),
        (
            iterates_within_no_grad,
            "trains on batches of the DataLoader over TensorDataset that --adopt does not deal out",
        ),
        (reads_ahead, "runs no backward pass before it reads the next batch"),
        (gives_batches_in_its_own_way, "has a Own, which has its own way to give batches"),
        (reads_all_before_it_trains, "runs no backward pass before it reads the next batch"),
        (trains_on_a_batch_again, "a backward pass without a new batch of the DataLoader"),
        (fixed_order_beside_another, "which has a fixed order, and --adopt took another one that shuffles"),
        (length_of_an_evaluation, r"asked for len\(\) of the DataLoader over TensorDataset before the first"),
        (leaves_the_loader_within_a_step, "leaves an iteration of its DataLoader between two batches of one"),
        (
            a_sample_for_two_ranks_among_other_batches,
            "has 1 samples, which 2 ranks cannot share evenly, and the script adds it",
        ),
        (
            three_samples_for_two_ranks_among_other_batches,
            "has 3 samples, which 2 ranks cannot share evenly, and the script adds it",
        ),
        (steps_that_do_not_divide_a_pass, "a step of 2 batches, and a pass over the data has 5"),
        (other_steps_later, "a step of 2 batches after steps of 1"),
        (too_few_samples, "has 3 samples, too few for a batch of 2 on each of 2 ranks"),
    ],
)
def test_a_script_that_cannot_be_adopted_is_refused_by_one_sentence(adopt, script, error):
    backward = torch.autograd.backward
    with pytest.raises(ConfigError, match=error) as refusal:
        adopt(script)
    assert "\n" not in str(refusal.value)
    assert torch.autograd.backward is backward, "nothing stays patched"
    refusal.value.__traceback__ = None
    del refusal


def test_replicas_that_compute_the_same_data_are_refused_by_all():
    model, watches = torch.nn.Linear(2, 1), []
    for inputs in (torch.ones(2), torch.ones(2)):
        watch = InputWatch(model)
        for _ in range(4):
            model(inputs)
            numbers = watch.take()
        watch._hook.remove()
        watches.append(numbers)
    sums = {name: watches[0][name] + watches[1][name] for name in watches[0]}
    others = {**sums, "fabric.squares": sums["fabric.squares"] + 2}
    for metrics in (sums, sums, others, sums, sums, watches[0], sums, sums):
        watch.judge(metrics)  # equal numbers of two steps may be chance, and one replica is alone
    with pytest.raises(ConfigError, match="all replicas train on the same data"):
        watch.judge(sums)


def test_an_input_whose_number_is_zero_is_an_input(monkeypatch):
    monkeypatch.setattr("xxhash.xxh3_64_intdigest", lambda *_: 0)
    model = torch.nn.Linear(2, 1)
    watch = InputWatch(model)
    for _ in range(4):
        model(torch.ones(2))
        numbers = watch.take()
    assert numbers["fabric.inputs"] == 1.0


def test_the_length_after_an_epoch_is_that_of_the_epoch(adopt):
    """Scripts divide the sum of an epoch's losses by the length when their model is still in eval mode."""
    lengths = []

    def script():
        model, optimizer = make()
        train, validation = data(), data(shuffle=False, size=6)
        for _ in range(2):
            model.train()
            for (x,) in train:
                model(x).sum().backward()
                optimizer.step()
            model.eval()
            assert len(list(validation)) == 3
            lengths.append(len(train))
            assert len(list(train)) == 8, "an evaluation on the data of the training"
            lengths.append(len(train))

    adopt(script)
    assert lengths == [4, 8, 4, 8]


def test_the_loop_trains_on_its_part_of_each_step_and_leaves_the_job(adopt):
    seen = []

    def script():
        torch.manual_seed(0)
        model, optimizer = make()
        loader = DataLoader(TensorDataset(torch.arange(16.0)), batch_size=2, shuffle=True)
        assert len(loader) == 4
        for _ in range(2):
            for (x,) in loader:
                seen.append(x.tolist())
                model(torch.ones(2)).sum().backward()
                optimizer.step()

    session = adopt(script)
    assert session.closed and session.took == [(step, True) for step in range(8)]
    assert seen == [session.sampler.indices(step) for step in range(8)]
    assert session.made == [(step, 2.0) for step in range(8)]
    other = fabric.client.StepSampler(16, global_batch_size=4, settings=adoption.config.settings())
    assert seen == [other.indices(step) for step in range(8)]


class DistributedDataParallel(torch.nn.Module):
    """Holds a module, as torch's wrapper of this name does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


@pytest.mark.parametrize("way", ["no_grad", "eval", "eval of the wrapped model"])
@pytest.mark.parametrize("split", [{"shuffle": True}, {"sampler": [1, 3, 5, 7]}, {"shuffle": False}])
def test_an_evaluation_reads_all_of_its_data_on_each_replica(adopt, way, split):
    lengths, rows = [], []

    def evaluate(model, loader):
        model = getattr(model, "module", model)
        model.eval()
        with torch.set_grad_enabled(way != "no_grad"):
            rows.append(sorted(i for (x,) in loader for i in x.tolist()))
            lengths.append(len(loader))
        model.train()

    def script():
        model, optimizer = make()
        if way == "eval of the wrapped model":
            model = DistributedDataParallel(model)
        validation = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, **split)
        evaluate(model, validation)
        for number, (x,) in enumerate(data()):
            if number == 2:
                evaluate(model, validation)
            model(x).sum().backward()
            optimizer.step()
        evaluate(model, validation)

    session = adopt(script)
    assert [taken for _, taken in session.took] == [True] * 4
    expected = split.get("sampler", list(range(8)))
    assert rows == [expected] * 3 and lengths == [len(expected) // 2] * 3


class Batches:
    """Holds an iteration over a DataLoader, as makemore's InfiniteDataLoader does."""

    def __init__(self, loader, begin=iter):
        self.loader, self.begin = loader, begin
        self.batches = begin(loader)

    def next(self):
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = self.begin(self.loader)
            return next(self.batches)


def cycle(loader):
    while True:
        yield from loader


def smoothed(loader):
    mean = torch.zeros(2)
    for (x,) in loader:
        mean = 0.9 * mean + 0.1 * x.mean(0)
        yield (x - mean,)


@pytest.mark.parametrize("begin", [iter, cycle, smoothed])
def test_an_object_may_hold_the_iteration_over_the_data_unless_it_has_a_memory(adopt, begin):
    def script():
        model, optimizer = make()
        draws = torch.utils.data.RandomSampler(range(8), replacement=True, num_samples=10**10)
        batches = Batches(DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2, sampler=draws), begin)
        for _ in range(12):
            (x,) = batches.next()
            model(x).sum().backward()
            optimizer.step()

    if begin is not smoothed:
        assert adopt(script).made == [(step, 2.0) for step in range(12)]
        return
    with pytest.raises(ConfigError, match=r"depends on self.batches, which Batches.next keeps from call to"):
        adopt(script)


def test_a_loop_that_accumulates_makes_steps_of_several_batches(adopt):
    def script():
        model, optimizer = make()
        for number, (x,) in enumerate(data()):
            model(x).sum().backward()
            if number % 2:
                optimizer.step()

    assert adopt(script).made == [(0, 4.0), (1, 4.0)]


def test_a_loop_goes_over_the_jobs_steps_without_computing_them(adopt, capsys):
    forwards, reads, rates = [], [], []

    class Model(torch.nn.Linear):
        def forward(self, x):
            forwards.append(len(rates))
            return super().forward(x)

    class Samples(TensorDataset):
        def __getitem__(self, index):
            reads.append(len(rates))
            return super().__getitem__(index)

    def script():
        model = Model(2, 1)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        loader = DataLoader(Samples(torch.randn(32, 2)), batch_size=2, shuffle=True)
        for _ in range(2):
            for (x,) in loader:
                optimizer.zero_grad()
                loss = model(x).pow(2).mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
                before = model.weight.detach().clone()
                optimizer.step()
                rates.append((optimizer.param_groups[0]["lr"], bool((model.weight != before).any())))
                scheduler.step()
                print("step", len(rates))

    # The first exchange finds the job at step 9; steps 9 and 10 are published gradients.
    session = adopt(script, ScriptedSession([9, 10], replayed=2))
    assert [number for number, _ in session.made] == [9, *range(10, 16)]
    assert [rate for rate, _ in rates] == [0.5**n for n in range(16)]
    assert [n for n, (_, moved) in enumerate(rates) if moved] == list(range(9, 16))
    # It computes again after its first step with the members, to which it contributes nothing.
    assert forwards == [0, 1, *range(12, 16)], "one real pass, one for the outputs to repeat, then its own"
    assert reads == [n for n in (0, *range(12, 16)) for _ in range(2)]
    assert session.took[:4] == [(0, True), (10, False), (11, False), (12, True)]
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if line] == [f"step {n}" for n in range(12, 17)]
    assert "the job is at step 9, and the script's loop goes over 9 steps without computing them" in err


def test_the_script_may_read_and_change_the_gradient_of_a_step_that_its_loop_goes_over(adopt):
    norms, moved, left = [], [], []

    def script():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = DataLoader(TensorDataset(torch.randn(32, 2)), batch_size=2, shuffle=True)
        for _ in range(2):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).pow(2).mean().backward()
                torch.nn.utils.clip_grad_value_(model.parameters(), 100.0)
                norms.append(float(sum(p.grad.norm() for p in model.parameters())))
                model.weight.grad.add_(1.0)
                before = model.weight.detach().clone()
                optimizer.step()
                left.append(model.weight.grad.mul_(0.5).norm().item())
                moved.append(bool((model.weight != before).any()))

    session = adopt(script, ScriptedSession([9, 10], replayed=2))
    assert [number for number, _ in session.made] == [9, *range(10, 16)]
    assert norms[:9] == [0.0] * 9 and all(left)
    assert [n for n, has_moved in enumerate(moved) if has_moved] == list(range(9, 16))


def test_a_gradient_that_the_script_keeps_over_an_update_is_shared_and_outlives_a_step_without_one(adopt):
    left, shared = [], []
    session = ScriptedSession()
    session.skips = (1, 3)

    def script():
        torch.manual_seed(1)
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for number, (x,) in enumerate(data(size=32)):
            if number == 5:
                optimizer.zero_grad()
            model(torch.ones_like(x)).sum().backward()
            shared.append([v.tolist() for v in session.state.get("gradients", model).state_dict().values()])
            optimizer.step()
            left.append(model.weight.grad.tolist())

    adopt(script, session)
    # Backward adds 2. Steps 1 and 3 have no update. Step 5 begins with a cleared gradient.
    assert [values[0][0] for values in left] == [2, 2, 4, 4, 6, 2, 4, 6]
    assert [x[0][0][0] if x else 0 for x in shared[1:]] == [2, 2, 4, 4, 0, 2, 4]
    session.state["gradients"].load_state_dict({"0": torch.full((1, 2), 50.0)})
    session.state["gradients"].put_back()
    assert session.model.weight.grad.tolist() == [[50.0, 50.0]]


def test_an_optimizer_of_the_scripts_own_makes_no_update_in_a_step_that_its_loop_goes_over(adopt):
    class Counting(torch.optim.Optimizer):
        """Takes a gradient of each parameter for granted, and counts its steps."""

        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 1.0})
            self.count = 0

        @torch.no_grad()
        def step(self, closure=None):
            self.count += 1
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad)

    counts = []

    def script():
        model = torch.nn.Linear(2, 1)
        optimizer, loader = Counting(model.parameters()), data(size=32)
        for _ in range(2):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).sum().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                counts.append(optimizer.count)

    adopt(script, ScriptedSession([9, 10], replayed=2))
    assert counts == [*[0] * 9, *range(1, 8)]


def test_what_the_script_changes_by_hand_in_a_step_that_its_loop_goes_over_comes_back(adopt):
    """As a moving average within the model, weights that begin again, and moments that are cleared."""
    averages, moments = [], []

    def script():
        model = torch.nn.Linear(2, 1)
        model.register_buffer("average", torch.zeros(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
        loader = data(size=32)
        for epoch in range(2):
            weight = model.weight.detach().clone()
            if epoch == 1:
                model.reset_parameters()
                optimizer.state.clear()
            for (x,) in loader:
                optimizer.zero_grad()
                (model(x).sum() + weight.sum()).backward()
                optimizer.step()
                model.average += 1.0
                averages.append(model.average.item())
                moments.append(len(optimizer.state))
        assert torch.equal(model.weight, weight)

    adopt(script, ScriptedSession([9, 10], replayed=2))
    assert averages == [*range(1, 10), *range(1, 8)]
    assert moments == [0] * 9 + [2] * 7


def test_a_loop_may_leave_the_update_of_a_step_out(adopt):
    """As where the norm of the gradient, which is equal on all replicas, is not finite."""
    weights = []

    def script():
        model, optimizer = make()
        for number, (x,) in enumerate(data()):
            weights.append(model.weight.detach().clone())
            optimizer.zero_grad()
            model(x).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if number != 1:
                optimizer.step()

    assert [number for number, _ in adopt(script).made] == [0, 1, 2, 3]
    assert [bool((x == y).all()) for x, y in itertools.pairwise(weights)] == [False, True, False]


def test_a_loader_and_its_data_set_may_be_made_again_of_the_same_tensors(adopt):
    x = torch.randn(16, 2)

    def script():
        model, optimizer = make()
        for _ in range(2):
            for (batch,) in DataLoader(TensorDataset(x), batch_size=2, shuffle=True):
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()

    def in_two_lines():
        model, optimizer = make()
        for _ in range(2):
            samples = TensorDataset(x)
            for (batch,) in DataLoader(samples, batch_size=2, shuffle=True):
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()

    assert len(adopt(script).made) == len(adopt(in_two_lines).made) == 8


def test_the_script_may_derive_by_its_input_in_a_step_that_its_loop_goes_over(adopt):
    """As a gradient penalty and an attack on the input do."""
    from torch.autograd import grad  # a name that no patch of torch.autograd changes

    slopes = []

    def script():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = DataLoader(TensorDataset(torch.randn(32, 2)), batch_size=2, shuffle=True)
        for _ in range(2):
            for (x,) in loader:
                x.requires_grad_()
                out = model(x)
                (slope,) = grad(out.sum(), x, create_graph=True)
                optimizer.zero_grad()
                out.retain_grad()
                (out.pow(2).mean() + slope.norm()).backward()
                assert x.grad is not None, "an attack moves the input by it"
                assert out.grad.shape == out.shape
                slopes.append(slope.norm().item())
                optimizer.step()

    session = adopt(script, ScriptedSession([9, 10], replayed=2))
    assert [number for number, _ in session.made] == [9, *range(10, 16)]
    assert [n for n, by_grad in enumerate(slopes) if by_grad] == [0, *range(12, 16)]


def test_numbers_between_an_update_and_the_next_batch_are_those_of_all_replicas(adopt, monkeypatch):
    def draws(replica):
        numbers = []

        def script():
            model, optimizer = make()
            for (x,) in data():
                in_batch = float(torch.rand(()))
                model(x).sum().backward()
                optimizer.step()
                numbers.append((in_batch, float(torch.rand(())), np.random.rand(), random.random()))

        monkeypatch.setenv("FABRIC_REPLICA", replica)
        adopt(script)
        return numbers

    first, second = draws("r0"), draws("r1")
    assert [x[1:] for x in first] == [x[1:] for x in second]
    assert all(x[0] != y[0] for x, y in zip(first[1:], second[1:], strict=True)), "dropout differs"
    assert len(set(first)) == len(first)


def test_a_script_without_a_seed_draws_alike_in_a_job_and_not_in_another(adopt, monkeypatch, tmp_path):
    """A replica that starts again after its token was replaced draws as the others did."""

    def draws(replica, job, token):
        (tmp_path / "token").write_text(token)
        monkeypatch.setenv("FABRIC_TOKEN_FILE", str(tmp_path / "token"))
        numbers = []

        def script():
            numbers.append((float(torch.rand(())), np.random.rand(), random.random()))
            model, optimizer = make()
            for (x,) in data():
                model(x).sum().backward()
                optimizer.step()

        monkeypatch.setenv("FABRIC_REPLICA", replica)
        monkeypatch.setenv("FABRIC_JOB", job)
        adopt(script)
        return numbers

    assert draws("r0", "one", "a" * 32) == draws("r1", "one", "b" * 32) != draws("r1", "other", "b" * 32)


@pytest.mark.parametrize("gradient", ["finite", "infinite"])
def test_after_each_update_the_loop_draws_by_its_step_and_replica(adopt, gradient):
    """With an infinite gradient a scaler makes no step, and the update was seeded all the same."""
    drawn = []

    def script():
        model, optimizer = make()
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        for row in [torch.ones(2)] * 3:
            scaler.scale(model(row).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            drawn.append(float(torch.rand(())))
            optimizer.zero_grad()

    class Overflowing(ScriptedSession):
        def exchange(self, weight=1.0):
            step = super().exchange(weight)
            if gradient == "infinite":
                for parameter in self.model.parameters():
                    parameter.grad.fill_(torch.inf)
            return step

    adopt(script, Overflowing())
    expected = []
    for step in range(3):
        seed_everything(0, step + 1, 1)  # that of data slot 1
        expected.append(float(torch.rand(())))
    assert drawn == expected


def test_a_loop_that_is_ahead_of_the_job_starts_again(adopt):
    def script():
        model, optimizer = make()
        for (x,) in data():
            model(x).sum().backward()
            optimizer.step()

    with pytest.raises(SystemExit) as end:
        adopt(script, ScriptedSession([0, 1, 0]))
    assert end.value.code == 75


def test_a_file_of_this_job_says_at_which_step_the_loop_goes_on(adopt, tmp_path):
    path = tmp_path / "snapshot.pt"

    def script():
        model, optimizer = make()
        if path.exists():
            model.load_state_dict(torch.load(path, weights_only=True))
        for (x,) in data():
            model(x).sum().backward()
            optimizer.step()
        torch.save(model.state_dict(), path)

    assert [n for n, _ in adopt(script).made] == [0, 1, 2, 3]
    assert set(torch.load(path)) == {"weight", "bias"} and [p.name for p in tmp_path.iterdir()] == [path.name]
    again = ScriptedSession()
    again.at = 4
    assert [n for n, _ in adopt(script, again).made] == [4, 5, 6, 7]


def test_a_script_that_finds_its_last_file_ends_as_without_fabric(adopt, tmp_path, capsys):
    path = tmp_path / "snapshot.pt"

    def script():
        model, optimizer = make()
        done = torch.load(path)["epoch"] if path.exists() else 0
        for epoch in range(done, 1):
            for (x,) in data():
                model(x).sum().backward()
                optimizer.step()
            torch.save({"epoch": epoch + 1}, path)

    assert [n for n, _ in adopt(script).made] == [0, 1, 2, 3]
    assert adopt(script).made == []
    assert "has loaded its file of step 4 and has ended without a further step" in capsys.readouterr().err


def test_a_replica_that_does_not_write_leaves_the_file_alone(adopt, tmp_path):
    def script():
        model, optimizer = make()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        torch.save(model.state_dict(), tmp_path / "snapshot.pt")

    session = ScriptedSession()
    session.is_writer = False
    adopt(script, session)
    assert not list(tmp_path.iterdir())


def _saves_as_many_trainers_do(folder):
    """A script that saves, renames, copies, links and removes its files, as many trainers do."""

    def script():
        model, optimizer = make()
        for epoch in range(3):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            new, last, kept = folder / "tmp.pt", folder / "last.pt", folder / f"epoch-{epoch}"
            torch.save(model.state_dict(), new)
            new.replace(last)
            kept.mkdir(exist_ok=True)
            torch.save(model.state_dict(), kept / "model.pt")
            os.link(last, kept / "linked.pt")
            shutil.copy2(last, kept)
            shutil.copyfile(src=last, dst=folder / "best.pt")
            (folder / "best.pt").rename(folder / "best-so-far.pt")
            if epoch:
                (folder / "newest").unlink()
                shutil.rmtree(folder / f"epoch-{epoch - 1}")
            (folder / "newest").symlink_to(f"epoch-{epoch}/model.pt")

    return script


def test_the_writer_renames_copies_and_removes_the_saved_files(adopt, tmp_path):
    adopt(_saves_as_many_trainers_do(tmp_path))
    names = {str(x.relative_to(tmp_path)) for x in tmp_path.rglob("*")}
    kept = {"epoch-2", "epoch-2/model.pt", "epoch-2/last.pt", "epoch-2/linked.pt"}
    assert names == {"last.pt", "best-so-far.pt", "newest", *kept}
    assert torch.load(tmp_path / "newest").keys() == {"weight", "bias"}


def test_a_replica_that_does_not_write_does_not_look_for_the_saved_files(adopt, tmp_path):
    session = ScriptedSession()
    session.is_writer = False
    adopt(_saves_as_many_trainers_do(tmp_path), session)
    assert {x.name for x in tmp_path.iterdir()} == {"epoch-0", "epoch-1", "epoch-2"}


def _loads_its_best_file(path):
    def script():
        model, optimizer = make()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        torch.save({"best": 2.0}, path)
        assert torch.load(path) == {"best": 2.0}

    return script


def test_a_replica_that_does_not_write_waits_for_the_file_that_it_loads(adopt, tmp_path, monkeypatch):
    path, session = tmp_path / "best.pt", ScriptedSession()
    adopt(_loads_its_best_file(path))
    newer = path.rename(tmp_path / "newer.pt")
    torch.save({"best": 1.0}, path)  # an earlier run has left it
    monkeypatch.setattr(adopted_loop.time, "sleep", lambda _: newer.exists() and newer.replace(path))
    session.is_writer = False
    adopt(_loads_its_best_file(path), session)


def test_a_replica_that_saved_alone_loads_what_the_writer_loads_at_that_step(adopt, tmp_path, monkeypatch):
    """A replica that has joined saves at step 2, because its best figure is younger than the writer's."""
    path, writer, joined = tmp_path / "best.pt", ScriptedSession(), ScriptedSession()
    joined.is_writer = False

    def script(saves_at):
        model, optimizer = make()
        for step in range(3):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if step in saves_at:
                torch.save({"step": step}, path)
        assert torch.load(path) == {"step": 0}
        marks.extend(x.read_text() for x in tmp_path.glob(".*"))

    marks: list[str] = []
    adopt(lambda: script([0]), writer)
    assert [x.name for x in tmp_path.iterdir()] == ["best.pt"], "a mark is removed at the end"
    (mark,) = marks
    monkeypatch.setattr(adopted_loop.time, "sleep", lambda _: (tmp_path / ".best.pt.loaded").write_text(mark))
    adopt(lambda: script([0, 1]), joined)
    assert [x.name for x in tmp_path.iterdir()] == ["best.pt"], "also the mark of a writer that was killed"


def test_the_replica_that_writes_may_write_its_file_in_another_way(adopt, tmp_path):
    path = tmp_path / "best.pt"

    def script():
        _loads_its_best_file(path)()
        with path.open("wb") as stream:
            torch.save({"best": 3.0}, stream)
        assert torch.load(path) == {"best": 3.0}

    adopt(script)


def test_a_file_that_no_replica_writes_is_one_sentence(adopt, tmp_path, monkeypatch):
    session = ScriptedSession()
    session.is_writer = False
    monkeypatch.setattr(adopted_loop, "_WRITTEN_S", 0.0)
    with pytest.raises(ConfigError, match="which it saved at step 1, and the replica that writes has not"):
        adopt(_loads_its_best_file(tmp_path / "best.pt"), session)


def test_a_replica_that_writes_from_now_on_finds_no_file_that_the_one_before_has_removed(adopt, tmp_path):
    session = ScriptedSession()
    session.is_writer = False

    def script():
        model, optimizer = make()
        for epoch in range(2):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            torch.save(model.state_dict(), tmp_path / f"{epoch}.pt")
            session.is_writer = True
            if epoch:
                (tmp_path / "0.pt").unlink()
                with pytest.raises(FileNotFoundError):
                    (tmp_path / "1.pt").replace(tmp_path / "nowhere" / "1.pt")
                with pytest.raises(FileNotFoundError):
                    (tmp_path / "unknown.pt").unlink()

    adopt(script, session)
    assert [x.name for x in tmp_path.iterdir()] == ["1.pt"]


def test_disabled_the_script_runs_as_it_is(adopt, monkeypatch):
    monkeypatch.setenv("FABRIC_DISABLE", "1")
    iterate = DataLoader.__iter__

    def script():
        assert DataLoader.__iter__ is iterate and len(data()) == 8
        closure()

    assert adopt(script).made == []
