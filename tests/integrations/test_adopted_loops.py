"""``--adopt`` without services: what is refused, and how a loop goes over steps that the job has made."""

import copy
import gc
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fabric.client
from fabric.errors import ConfigError
from fabric.integrations.adopt import adoption
from fabric.integrations.adopt.adopted_data import InputWatch
from fabric.integrations.adopt.adoption import run_adopted


class ScriptedSession(fabric.client.Session):
    """A job whose exchanges return the steps of ``numbers``, the first of them ``replayed``."""

    def __init__(self, numbers=(), replayed=0):
        self.numbers, self.replays, self.made = iter(numbers), replayed, []
        self.sampler = None
        self.took, self.closed, self.at = [], False, 0
        self.model = None
        self.handover = SimpleNamespace(resume=lambda step: None)  # no other member draws random numbers

    is_writer = True

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
        self.at = number + 1
        self.made.append((number, weight))
        return SimpleNamespace(number=number, replayed=replayed, metrics={})

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

        def attach(model, optimizer, **_):
            session.model = model
            return session

        monkeypatch.setattr(fabric.client, "attach", attach)
        # Objects that others have left do not belong to the script: the search does not see frozen ones.
        gc.collect()
        gc.freeze()
        try:
            run_adopted(script)
        finally:
            gc.unfreeze()
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


def train(loader, steps=100, before=lambda model: None):
    """Train on ``loader`` for at most ``steps`` steps; return the batches that the loop got."""
    model, optimizer = make()
    before(model)
    seen = []
    for x, *_ in itertools.islice(loader, steps):
        seen.append(x.tolist())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    return seen


def several_loaders():
    model, optimizer = make()
    for loader in (data(), data()):
        for (x,) in loader:
            model(x).sum().backward()
            optimizer.step()


def statistics_with_gradients_on():
    sum(x.mean() for (x,) in data())


def a_model_in_eval_mode():
    train(data(), before=lambda model: model.eval())


def batches_of_the_data_set():
    train(DataLoader(TensorDataset(torch.randn(4, 2, 2)), batch_size=None, shuffle=True))


def a_fixed_order_with_a_rest():
    train(data(shuffle=False, size=18))


def a_length_before_a_fixed_order():
    loader = data(shuffle=False)
    schedule = len(loader)
    assert train(loader), schedule


def a_subclass_with_an_order_of_its_own():
    class Reversed(DataLoader):
        def __iter__(self):
            return reversed(list(super().__iter__()))

    train(Reversed(TensorDataset(torch.randn(16, 2)), batch_size=2, shuffle=True))


def as_they_are_ready():
    train(DataLoader(TensorDataset(torch.randn(16, 2)), batch_size=2, shuffle=True, in_order=False))


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


def too_few_samples():
    len(data(size=3))


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (two_models, r"takes a script with one model, and this one has Linear, Linear: change the script"),
        (two_optimizers, "takes a script with one optimizer, and this one has AdamW, SGD: change"),
        (foreign_parameters, "has parameters that Linear has not"),
        (closure, "gives its optimizer a closure"),
        (step_without_backward, "makes a step without a backward pass before it"),
        (attaches, "calls fabric.client.attach already: run it without --adopt"),
        (nothing, "has ended without an optimizer step in this process"),
        (clips_too_early, "another backward pass between the first use of the gradient and its update"),
        (plateau, "cannot advance a ReduceLROnPlateau"),
        (changes_its_gradient, "changes its gradients between the backward pass and"),
        (several_loaders, "over TensorDataset for training, and trains on the one over TensorDataset"),
        (statistics_with_gradients_on, "has read two batches of .* without a backward pass between them"),
        (a_model_in_eval_mode, "trains on a DataLoader while its model is in eval mode"),
        (batches_of_the_data_set, "over TensorDataset has batch_size=None"),
        (a_fixed_order_with_a_rest, "has 18 positions in a fixed order, and the last 2 fill no batch of 2"),
        (a_length_before_a_fixed_order, "it got 8, and a pass has 4 batches on each replica"),
        (a_subclass_with_an_order_of_its_own, "does not know what Reversed.__iter__ changes"),
        (as_they_are_ready, "come as they are ready have no order"),
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
    with pytest.raises(ConfigError, match="all replicas train on the same data"):
        watch.judge(sums)
    watch.judge(watches[0])  # one replica alone
    watch.judge({**sums, "fabric.squares": sums["fabric.squares"] + 2})


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


class Weights(torch.utils.data.Sampler):
    """Batches of unequal lengths."""

    def __iter__(self):
        return iter([[0], [1, 2], [3, 4, 5], [6], [7, 8], [9, 10, 11]])

    def __len__(self):
        return 6


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": torch.utils.data.SubsetRandomSampler(range(0, 24, 2))},
        {"sampler": torch.utils.data.WeightedRandomSampler([1.0] + 23 * [9.0], 12)},
        {"sampler": torch.utils.data.RandomSampler(range(24), replacement=True, num_samples=12)},
        {"sampler": [5, 3, 1, 0, 2, 4, 20, 22, 21, 23, 11, 12]},
        {"shuffle": False},
        {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
        {"batch_sampler": Weights()},
    ],
    ids=["subset", "weighted", "replacement", "list", "in order", "own generator", "batches"],
)
def test_the_replicas_share_each_batch_of_the_samplers_order(adopt, monkeypatch, options):
    """Block j of a pass is what one process would read with a batch for both replicas."""
    sizes = {} if "batch_sampler" in options else {"batch_size": 2}
    parts = []
    for replica in ("r0", "r1"):
        monkeypatch.setenv("FABRIC_REPLICA", replica)
        seen = []

        def script(seen=seen):
            torch.manual_seed(1)
            loader = DataLoader(TensorDataset(torch.arange(24.0)), **sizes, **copy.deepcopy(options))
            seen += train(loader)

        session = adopt(script)
        assert seen == [session.sampler.indices(step) for step in range(len(seen))]
        assert session.made == [(step, float(len(batch))) for step, batch in enumerate(seen)]
        parts.append(seen)
    entries = [batch for pair in zip(*parts, strict=True) for batch in pair]
    given = options.get("sampler", options.get("batch_sampler", range(24)))
    if "batch_sampler" in options:
        assert entries == list(given)
    else:
        together = [int(i) for batch in entries for i in batch]
        assert len(together) == len(given)
        if isinstance(given, list | range):
            expected = list(given) if options.get("shuffle") is not True else sorted(together)
            assert (together if options.get("shuffle") is not True else sorted(together)) == expected
        if isinstance(given, torch.utils.data.SubsetRandomSampler):
            assert sorted(together) == list(range(0, 24, 2))


@pytest.mark.parametrize("way", ["no_grad", "eval"])
@pytest.mark.parametrize("split", [{"shuffle": True}, {"sampler": [1, 3, 5, 7]}, {"shuffle": False}])
def test_an_evaluation_reads_all_of_its_data_on_each_replica(adopt, way, split):
    lengths, rows = [], []

    def evaluate(model, loader):
        model.eval()
        with torch.set_grad_enabled(way == "eval"):
            rows.append(sorted(i for (x,) in loader for i in x.tolist()))
            lengths.append(len(loader))
        model.train()

    def script():
        model, optimizer = make()
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


def test_a_dataloader_made_for_each_pass_goes_on_in_the_order(adopt):
    sampler, seen = torch.utils.data.SubsetRandomSampler(range(0, 24, 2)), []

    def script(datasets):
        model, optimizer = make()
        for dataset in datasets:
            for (x,) in DataLoader(dataset, batch_size=2, sampler=sampler):
                seen.append(x.tolist())
                model(torch.ones(2)).sum().backward()
                optimizer.step()

    dataset = TensorDataset(torch.arange(24.0))
    session = adopt(lambda: script([dataset] * 3))
    assert len(seen) == 9 and seen == [session.sampler.indices(step) for step in range(9)]
    with pytest.raises(ConfigError, match="trains on the one over TensorDataset already"):
        adopt(lambda: script([dataset, TensorDataset(torch.arange(24.0))]))


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


def test_disabled_the_script_runs_as_it_is(adopt, monkeypatch):
    monkeypatch.setenv("FABRIC_DISABLE", "1")
    iterate = DataLoader.__iter__

    def script():
        assert DataLoader.__iter__ is iterate and len(data()) == 8
        closure()

    assert adopt(script).made == []
