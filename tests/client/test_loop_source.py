"""A loop that reads what only its micro-batches set is refused before its first step, and no other loop."""

import ast
import contextlib
import inspect
import itertools
import linecache
import re
import textwrap
from pathlib import Path

import numpy
import pytest
import torch

import fabric.client
from fabric.client.loop.loop_source import StepLoop, check_exchange_loop
from fabric.client.loop.user_functions import search
from fabric.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
SCRIPTS = [
    *(ROOT / "examples").glob("*.py"),
    *(ROOT / "tests" / "conformance" / "recipes").glob("*.py"),
    *(ROOT / "tests" / "integration").glob("*_trainer.py"),
]

INNER = "for x in step:\n    loss = f(x)\n    step.backward(loss)\n"

ALARMS = {
    "read": INNER + "print(loss.item())",
    "every few steps": INNER + "if step.number % 5 == 0:\n    print(loss)",
    "after some steps": INNER + "if step.number > 5:\n    print(loss)",
    "a flag of the user": INNER + "if args.verbose:\n    print(loss)",
    "the writer alone": INNER + "if session.is_writer:\n    print(loss)",
    "the loop's variable": INNER + "print(x)",
    "del": INNER + "del loss",
    "augmented": INNER + "loss += 1",
    "own value": INNER + "loss = loss / 2",
    "with": INNER + "with open(p) as file:\n    file.write(loss)",
    "in a branch that a for-else has": INNER + "else:\n    print(loss)",
    "two inner loops": INNER + "for y in step:\n    second = y\nprint(second)",
    "enumerate": "for i, x in enumerate(step):\n    loss = x\nprint(loss)",
    "starred": "for a, *b in step:\n    pass\nprint(b)",
    "walrus": "for x in step:\n    f(y := x)\nprint(y)",
    "match": INNER + "match kind:\n    case 1:\n        print(loss)",
    "pattern": "for x in step:\n    match x:\n        case [head, *_]:\n            pass\nprint(head)",
    "a try for another error": INNER + "try:\n    print(loss)\nexcept OSError:\n    pass",
    "first iterable of a comprehension": "for x in step:\n    all_ = [x]\nprint([y for y in all_])",
    "inner loop in with": "with scope():\n    for x in step:\n        loss = x\nprint(loss)",
    "set too late": INNER + "print(loss)\nloss = None",
    "or": INNER + "ready = step.number % 5 == 0 and print(loss)",
    "skipped": INNER + "if not step.skipped:\n    print(loss)",
}

QUIET = {
    "nothing read": INNER + "optimizer.step()",
    "contributed": INNER + "if step.contributed:\n    print(loss)",
    "not replayed": INNER + "if not step.replayed:\n    print(loss)",
    "metrics": INNER + "if step.metrics:\n    print(loss)",
    "conditional expression": INNER + "print(loss if step.contributed else 0)",
    "and": INNER + "step.contributed and print(loss)",
    "continue": INNER + "if not step.contributed:\n    continue\nprint(loss)",
    "continue in with": INNER + "with a:\n    if step.replayed:\n        continue\nprint(loss)",
    "assert": INNER + "assert step.contributed\nprint(loss)",
    "the name itself": INNER + "if 'loss' in locals():\n    print(loss)",
    "a derived flag": INNER + "fresh = step.contributed\nif fresh:\n    print(loss)",
    "a flag of the inner loop": "seen = 0\n"
    + "for x in step:\n    seen = 1\n    loss = x\nif seen:\n    print(loss)",
    "a question about the step": INNER + "if has_any(step):\n    print(loss)",
    "a list of the inner loop": "for x in step:\n    many.append(x)\n    loss = x\nif many:\n    print(loss)",
    "an attribute": "for x in step:\n    self.seen = True\n    loss = x\nif self.seen:\n    print(loss)",
    "first step": INNER + "if step.number == 0:\n    print(loss)",
    "first step by name": INNER + "n = step.number\nif n == 0:\n    print(loss)",
    "caught": INNER + "try:\n    print(loss)\nexcept NameError:\n    pass",
    "caught by all": INNER + "try:\n    print(loss)\nexcept:\n    pass",
    "caught, then left": INNER + "try:\n    a = loss\nexcept NameError:\n    continue\nprint(loss)",
    "suppressed": INNER + "with suppress(NameError):\n    print(loss)",
    "set before": "loss = 0\n" + INNER + "print(loss)",
    "set in between": INNER + "loss = 1\nprint(loss)",
    "may be set": INNER + "if a:\n    loss = 1\nprint(loss)",
    "set by else": INNER + "else:\n    loss = 1\nprint(loss)",
    "set by with": INNER + "with f() as loss:\n    print(loss)",
    "set by import": "for x in step:\n    m = x\nimport m\nprint(m)",
    "set by an exception": INNER + "try:\n    g()\nexcept OSError as loss:\n    print(loss)",
    "set by a while": INNER + "while a:\n    if b:\n        print(loss)\n    loss = 1",
    "set by a pattern": INNER + "match f():\n    case [loss, *_]:\n        print(loss)",
    "set by walrus": INNER + "print(loss) if (loss := g()) else 0",
    "set by def": INNER + "def loss(): pass\nprint(loss)",
    "function": INNER + "def show():\n    print(loss)",
    "lambda": INNER + "show = lambda: loss",
    "comprehension": INNER + "print([loss for _ in range(0)])",
    "own loop variable": INNER + "print([x for x in range(3)])",
    "global": INNER + "def g():\n    global loss\n    loss = 1\ng()\nprint(loss)",
    "exec": INNER + "exec('loss = 1')\nprint(loss)",
    "other loop": "for x in more(step):\n    loss = x\nprint(loss)",
    "known": INNER + "print(model)\nfor x in step:\n    model = 1",
    "after a break": INNER + "break\nprint(loss)",
}


def unbound_names(source, line, bound):
    loop = StepLoop.at(source, line)
    return list(loop.unbound(bound)) if loop is not None else []


def carried_names(source, line):
    loop = StepLoop.at(source, line)
    return list(loop.that_train(loop.carried)) if loop is not None else []


def in_loop(body, head="for step in session.steps(data, until=9):"):
    return head + "\n" + textwrap.indent(body, "    ")


@pytest.mark.parametrize("body", ALARMS.values(), ids=ALARMS)
def test_a_name_that_a_bare_step_does_not_set_is_named(body):
    assert unbound_names(in_loop(body), 1, {"model", "print"})


@pytest.mark.parametrize("body", QUIET.values(), ids=QUIET)
def test_a_loop_that_may_be_right_is_left_alone(body):
    assert unbound_names(in_loop(body), 1, {"model", "print"}) == []


@pytest.mark.parametrize("body", ALARMS.values(), ids=ALARMS)
def test_each_alarm_is_an_error_of_python_in_a_step_without_micro_batches(body):
    """Run the body with an empty step: where the branch is taken, the name is missing."""

    class Anything:
        number, skipped = 10, False

        def __getattr__(self, _):
            return Anything()

        def __call__(self, *_):
            return Anything()

        def __iter__(self):
            return iter(())

        __enter__ = __call__

        def __exit__(self, *_):
            return None

    names = {"step": Anything(), "kind": 1, "p": 0, **dict.fromkeys(("args", "session", "scope"), Anything())}
    with pytest.raises(NameError):
        exec(body, {**names, "open": Anything()})


@pytest.mark.parametrize(
    ("head", "is_found"),
    [
        ("for i, step in enumerate(session.steps(d, 9)):", True),
        ("for step in tqdm(session.steps(d, 9), total=9):", True),
        ("for step in steps:", True),
        ("for step in next(steps):", False),
        ("for a, step in zip(b, session.steps(d, 9)):", False),
    ],
)
def test_heads_of_the_loop(head, is_found):
    assert bool(unbound_names(in_loop(INNER + "print(loss)", head), 1, set())) is is_found


@pytest.mark.parametrize("source", ["", "for step in", "x = 1", "for a in b: c\n\0"])
def test_a_source_that_says_nothing_is_left_alone(source):
    assert unbound_names(source, 1, set()) == []


def blocks():
    yield from ((p.name, p.read_text()) for p in SCRIPTS)
    for page in PAGES:
        found = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
        yield from ((page.name, text) for text in found)


def loops(source: str) -> list[ast.For]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    return [x for x in ast.walk(tree) if isinstance(x, ast.For) and ".steps(" in ast.unparse(x.iter)]


def test_scripts_and_pages_of_the_project_are_left_alone():
    read = {
        (name, loop.lineno): unbound_names(source, loop.lineno, set())
        for name, source in blocks()
        if "``" not in source and name != "bare_step.py"
        for loop in loops(source)
    }
    assert len(read) > 20
    assert {place: names for place, names in read.items() if names} == {}


def test_scripts_and_pages_of_the_project_carry_nothing_that_moves_the_training():
    read = {
        (name, loop.lineno): carried_names(source, loop.lineno)
        for name, source in blocks()
        if "``" not in source and name != "own_count.py"
        for loop in loops(source)
    }
    assert len(read) > 20
    assert {place: names for place, names in read.items() if names} == {}


TRAIN = "for x in step:\n    loss = f(x) * beta\n    step.backward(loss)\n"
CARRIED = {
    "a count": "beta = g(it)\n" + TRAIN + "it += 1",
    "a count by assignment": "beta = g(it)\n" + TRAIN + "it = it + 1",
    "the factor itself": TRAIN + "beta *= 0.9",
    "a count of micro-batches": "for x in step:\n    it += 1\n    step.backward(f(x) * g(it))",
    "a condition": TRAIN + "if a:\n    beta = beta / 2",
    "a loop of a name": "for x in step:\n    for y in cut(x, it):\n        step.backward(f(y))\nit += 1",
    "a loss of a framework": "for x in step:\n    (f(x) * it).backward()\nit += 1",
    "a scaled loss": "for x in step:\n    step.backward(scaler.scale(f(x) * it))\nit += 1",
    "a weight": "for x in step:\n    step.backward(f(x), weight=n)\nn += 1",
    "a hidden state": "for x in step:\n    y, hidden = net(x, hidden)\n    step.backward(y)",
    "a limit for the gradient": TRAIN + "it += 1\nclip_grad_norm_(model.parameters(), 1 / it)",
    "a named limit for the gradient": TRAIN + "it += 1\nclip_grad_value_(model.parameters(), clip_value=it)",
    "a gradient that is set": TRAIN + "it += 1\nfor p in group:\n    p.grad = p.grad * it",
    "a gradient that is changed in place": TRAIN
    + "it += 1\nfor p in group:\n    p.grad.data.add_(p, alpha=it)",
    "a gradient that is multiplied": TRAIN + "it += 1\nfor p in group:\n    p.grad *= it",
    "a rate under a test of the best": TRAIN + "v = judge()\nif v < best:\n    best = v\nelse:\n"
    "    for group in optimizer.param_groups:\n        group['lr'] *= 0.5",
    "weights that are loaded under a test": TRAIN + "it += 1\nif it > 9:\n    model.load_state_dict(first)",
    "a learning rate of update": TRAIN
    + "it += 1\nfor group in optimizer.param_groups:\n    group.update(lr=1 / it)",
    "a learning rate": TRAIN + "it += 1\nfor group in optimizer.param_groups:\n    group['lr'] = 1 / it",
}
NOT_CARRIED = {
    "a count that is printed": TRAIN + "it += 1\nif it % 10 == 0:\n    print(it)",
    "an average that is printed": TRAIN + "mean = 0.9 * mean + 0.1 * step.metrics['loss']\nprint(mean)",
    "a sum that each step begins": "total = 0\nfor x in step:\n    total += f(x)\n    step.backward(total)",
    "a loss of two parts": "for x in step:\n    loss = f(x)\n    loss = loss + g(x)\n    step.backward(loss)",
    "an augmented loss": "for x in step:\n    loss = f(x)\n    loss += g(x)\n    step.backward(loss)",
    "a step's number": "beta = g(step.number)\n" + TRAIN,
    "a count from a step's number": "it = step.number\nbeta = g(it)\nit += 1\n" + TRAIN,
    "a fresh value in both branches": "if a:\n    b = 1\nelse:\n    b = 2\nb += 1\nbeta = b\n" + TRAIN,
    "a gradient of the job": TRAIN + "for p in group:\n    p.grad = p.grad * 2\n    p.grad.mul_(2)\n"
    "    p.grad *= 2\nmodel.weight.grad += 1",
    "a norm that is averaged for prints": TRAIN + "norm = clip_grad_norm_(model.parameters(), 1.0)\n"
    "mean = 0.9 * mean + 0.1 * norm\nif norm > top:\n    top = norm\nprint(mean, top)",
    "a bound of the step's own value": "beta = g()\n" + TRAIN + "if beta > 1:\n    beta = 1",
    "a function": TRAIN + "def count(it):\n    it += 1",
    "a place": "for x in step:\n    w = w.to(x.device).float()\n    step.backward(f(x, w))",
    "set in a try": "for x in step:\n    try:\n        y = f(x)\n    except OSError:\n        continue\n"
    "    y = y / 4\n    step.backward(y)",
    "set in a loop": "for x in step:\n    for z in x:\n        y = f(z)\n    y = y / 4\n    step.backward(y)",
    "set in branches": "for x in step:\n    if a:\n        y = f(x)\n    elif b:\n        y = g(x)\n"
    "    y = y / 4\n    step.backward(y)",
    "set in a case": "for x in step:\n    match a:\n        case 1:\n            y = f(x)\n"
    "            y = y / 4\n    step.backward(y)",
}


@pytest.mark.parametrize("body", CARRIED.values(), ids=CARRIED)
def test_a_name_that_the_loop_carries_into_the_training_is_found(body):
    assert carried_names(in_loop(body), 1)


@pytest.mark.parametrize("body", NOT_CARRIED.values(), ids=NOT_CARRIED)
def test_a_name_that_moves_no_training_is_left_alone(body):
    assert carried_names(in_loop(body), 1) == []


def test_the_index_of_enumerate_is_carried_too():
    head = "for i, step in enumerate(session.steps(data, until=9)):"
    assert carried_names(in_loop("beta = g(i)\n" + TRAIN, head), 1) == [("i", 1)]
    assert carried_names(in_loop(TRAIN + "print(i)", head), 1) == []


def test_a_count_that_begins_at_the_committed_step_is_left_alone():
    body = in_loop("beta = g(it)\n" + TRAIN + "it += 1")
    assert carried_names(body, 1)
    assert carried_names("it = session.committed_step\n" + body, 2) == []
    assert carried_names("global it\n" + body, 2) == []


def test_the_first_call_refuses_a_count_on_which_the_loss_depends(monkeypatch):
    model, session, data = session_of(monkeypatch)
    count = 0
    with pytest.raises(ConfigError, match=r"depends on count, which test_loop_source.py:\d+ carries"):
        for step in session.steps(data, until=2):
            for x in step:
                step.backward(model(x).sum() * min(1.0, count / 20))
            count += 1


class Counting:
    """A collate function with a memory."""

    calls = 0

    def __call__(self, samples):
        self.calls += 1
        return torch.stack(samples) * self.calls


def test_a_loop_of_exchanges_refuses_a_collate_function_with_a_memory():
    with pytest.raises(ConfigError, match=r"the data depend on self.calls, which Counting.__call__ keeps"):
        exchange_once("model(x).backward()", Counting())


class Owner:
    """Has a count of its own, and may be an object of the shared state."""

    count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    def train(self, session, model, data):
        for step in session.steps(data, until=2):
            for x in step:
                step.backward(model(x).sum() * min(1.0, self.count / 20))
            self.count += 1


def test_a_count_in_an_attribute_is_refused_unless_its_object_is_shared_state(monkeypatch):
    owner = Owner()
    model, session, data = session_of(monkeypatch)
    with pytest.raises(ConfigError, match=r"depends on self.count, which test_loop_source.py:\d+ carries"):
        owner.train(session, model, data)
    model, session, data = session_of(monkeypatch, state={"owner": owner})
    owner.train(session, model, data)
    assert owner.count == 2


def exchange_once(body, collate_fn=None):
    """Run a loop with this body up to its first exchange."""
    model, n, average = torch.nn.Linear(2, 1), 0, 0.0
    data = torch.utils.data.DataLoader([torch.ones(2)], collate_fn=collate_fn)

    class Session:
        committed_step = 0

        def exchange(self):
            check_exchange_loop(inspect.currentframe(), [])

    path = Path(__file__).with_name("loop_of_a_test.py")
    text = textwrap.indent(textwrap.dedent(body), " " * 4)
    source = f"for epoch in range(2):\n  for x in data:\n{text}\n    session.exchange()\n"
    linecache.cache[str(path)] = (len(source), None, source.splitlines(keepends=True), str(path))
    names = {"model": model, "data": data, "n": n, "average": average, "session": Session()}
    exec(compile(source, str(path), "exec"), names)


@pytest.mark.parametrize(
    ("name", "body"),
    {
        "n": "(model(x) * min(1, n / 9)).backward()\nn += 1",
        "average": "loss = model(x)\naverage = average + float(loss)\n(loss / (1 + average)).backward()",
    }.items(),
)
def test_a_loop_of_exchanges_refuses_what_it_carries_into_the_loss(name, body):
    with pytest.raises(ConfigError, match=f"the training depends on {name}, which loop_of_a_test.py:"):
        exchange_once(body)


@pytest.mark.parametrize(
    "body",
    [
        "model(x).backward()\nn += 1\nif n % 10 == 0: print(n)\nif n > 20: break",
        "n = session.committed_step\n(model(x) * n).backward()\nn += 1",
        "loss = model(x)\nloss = loss / 2\nloss.backward()\naverage = average + float(loss)",
    ],
)
def test_a_loop_of_exchanges_may_count_for_prints(body):
    exchange_once(body)


def session_of(monkeypatch, **arguments):
    monkeypatch.setenv("FABRIC_DISABLE", "1")
    model = torch.nn.Linear(2, 1)
    session = fabric.client.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)
    data = session.loader(torch.arange(8.0).view(4, 2), global_batch_size=4, micro_batch_size=2)
    return model, session, data


loss = "set in the module, which is another variable than the function's"


def test_the_first_call_refuses_such_a_loop_before_its_first_step(monkeypatch):
    model, session, data = session_of(monkeypatch)
    with pytest.raises(ConfigError, match=r"test_loop_source.py:\d+ reads loss, which only the loop over"):
        for step in session.steps(data, until=2):
            for x in step:
                loss = model(x).sum()
                step.backward(loss)
            print(loss)
    assert session.committed_step == 0


def test_a_loop_that_breaks_off_counts_the_step_that_it_has_made(monkeypatch):
    model, session, data = session_of(monkeypatch)
    for step in session.steps(data, until=5):
        for x in step:
            step.backward(model(x).sum())
        assert session.committed_step == step.number + 1, "as in a job"
        if step.number == 2:
            break
    assert session.committed_step == 3


def tqdm(steps):
    for step in steps:
        yield step
        assert step.done


def test_a_progress_bar_around_the_steps_hides_nothing(monkeypatch):
    _, session, data = session_of(monkeypatch)
    with pytest.raises(ConfigError, match="reads last"):
        for step in tqdm(session.steps(data, until=2)):
            for x in step:
                last = x
            print(last)


def test_a_name_that_is_set_before_the_loop_is_no_mistake(monkeypatch):
    _, session, data = session_of(monkeypatch)
    last = None
    for step in session.steps(data, until=2):
        for x in step:
            last = x
        assert last is not None
    assert session.committed_step == 2


def test_an_adapter_that_asks_for_steps_one_by_one_is_not_read(monkeypatch):
    _, session, data = session_of(monkeypatch)
    steps = session.steps(data, until=2)
    assert next(steps).number == 0


PREPARED = """
class Balance:
    mean = 1.0
    calls = 0
    def __call__(self, loss):
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        return loss / self.mean
    def update(self, loss):
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
    def timed(self, loss):
        self.calls += 1
        return loss
    def state_dict(self): return {"mean": self.mean}
    def load_state_dict(self, state): self.mean = state["mean"]
balance, kept = Balance(), Balance()
other = torch.nn.Linear(2, 1)
count = 0
def warmed(loss):
    global count
    count += 1
    return loss * min(1, count / 20)
table, bank, replay, cache, grown = torch.ones(4), torch.ones(4, 2), [], {}, []
class Scaled(torch.nn.Module):
    factor, shown = 1.0, 0
    def forward(self, x): return self.scaled(x)
    def scaled(self, x): return x * self.factor
    def extra_repr(self): return str(self.shown)
class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))
    def forward(self, loss):
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean
class Centre(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.centre = torch.zeros(1)
    def forward(self, out):
        with torch.no_grad():
            self.centre += 0.1 * (out.mean(0) - self.centre)
        return (out - self.centre).pow(2).mean()
class Focal(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.shown = 0, 0.0
    def forward(self, out):
        self.calls += 1
        loss = out.pow(2).mean()
        self.shown = loss.item()
        return loss
class Bank:
    def __init__(self): self.rows, self.count, self.row = torch.zeros(4, 1), 0, torch.zeros(2, 2)
    def put(self, i, out):
        self.rows.index_add_(0, torch.tensor([i]), 0.1 * (out.detach()[:1] - self.rows[i]))
    def of(self, out): return (out - self.rows[0]).pow(2).mean()
    def warmed(self, out): return out.pow(2).mean() * min(1, self.count / 9)
    def filled(self, x): return self.row.copy_(x)
rows, drawn = Bank(), {}
norm, centre, focal = Norm(), Centre(), Focal()
norms, slow, best, kept_weights = [], None, 9.0, None
groups = [{'lr': 1.0}]
drop, scaled = torch.nn.Dropout(0.5), Scaled()
buffer, figures, shared = torch.zeros(2, 2), {"loss": 0.0}, {"table": torch.ones(4)}
numbers, more = itertools.cycle([1.0, 2.0]), torch.utils.data.DataLoader([torch.ones(2)])
reading = iter(more)
def all_reduce(value): return value
held, of_state = torch.nn.Linear(2, 1), torch.Generator()
model, session, data = attached(shared=shared, kept=kept, held=held, of_state=of_state)
before, old, target, baseline, loss = None, model.weight.detach().clone(), torch.nn.Linear(2, 1), 0.0, 0.0
own, rng = torch.Generator(), numpy.random.default_rng(0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
"""
KEPT = {
    "table, which": "for x in step:\n    step.backward((table[:2] * model(x)).sum())\n"
    "    table[:2] = 0.5 * table[:2] + 1",
    "bank, which": "for x in step:\n    loss = (model(x) * bank[0, 0]).sum()\n"
    "    step.backward(loss)\n    bank[:2] = model(x).detach()",
    "replay, which": "for x in step:\n    replay.append(x)\n    step.backward(model(replay[-1]).sum())",
    "figures, which": "for x in step:\n    step.backward(model(x).sum() * figures['loss'])\n"
    "figures['loss'] += 1",
    "numbers, an iterator that": "for x in step:\n    step.backward(model(x).sum() * next(numbers))",
    "reading, an iterator that": "for x in step:\n    try:\n        u = next(reading)\n"
    "    except StopIteration:\n        u = model(x)\n    step.backward(model(u).sum())",
    "i \\(": "for i, x in enumerate(step):\n    step.backward(model(x).sum() / (1 + i))",
    "u \\(": "for x, u in zip(step, more):\n    step.backward(model(x).sum() + model(u).sum())",
    "norms, which": "for x in step:\n    step.backward(model(x).sum())\n"
    "norms.append(float(model.weight.grad.norm()))\n"
    "torch.nn.utils.clip_grad_norm_(model.parameters(), sum(norms) / len(norms))",
    "slow, which": "for x in step:\n    step.backward(model(x).sum())\n"
    "if slow is None:\n    slow = {n: p.grad.clone() for n, p in model.named_parameters()}\n"
    "for n, p in model.named_parameters():\n    slow[n] = 0.9 * slow[n] + p.grad\n    p.grad = slow[n] * 1",
    "drop.p, which": "for x in step:\n    step.backward(model(drop(x)).sum())\ndrop.p *= 0.9",
    "scaled.factor, which": "for x in step:\n    step.backward(scaled(model(x)).sum())\n"
    "scaled.factor = scaled.factor * 0.9",
    "best, which": "for x in step:\n    step.backward(model(x).sum())\nvalue = model.weight.sum().item()\n"
    "if value > best: groups[0]['lr'] *= 0.5\nbest = min(best, value)",
    "self.mean, which Balance.update keeps": "for x in step:\n    loss = model(x).sum()\n"
    "    step.backward(loss / balance.mean)\n    balance.update(loss)",
    "self.mean, which Balance.__call__ keeps": "for x in step:\n    step.backward(balance(model(x).sum()))",
    "self.rows, which Bank.put keeps": "for x in step:\n    out = model(x)\n"
    "    step.backward(rows.of(out))\n    rows.put(0, out)",
    "drawn, which": "for x in step:\n    if 'p' not in drawn:\n        drawn['p'] = torch.randn(2, 2)\n"
    "    step.backward(model(x @ drawn['p']).sum())",
    "rows.count, which": "for x in step:\n    step.backward(rows.warmed(model(x)))\nrows.count += 1",
    "self.mean, which Norm.forward keeps": "for x in step:\n    step.backward(norm(model(x).sum()))",
    "self.centre, which Centre.forward keeps": "for x in step:\n    step.backward(centre(model(x)))",
    "count, which warmed keeps": "for x in step:\n    loss = warmed(model(x).sum())\n    step.backward(loss)",
}
LATER = {
    "the batch before": "for x in step:\n    loss = model(x).sum()\n    if before is not None:\n"
    "        loss = loss + model(before).sum()\n    step.backward(loss)\n    before = x",
    "weights of some steps ago": "for x in step:\n    loss = model(x).sum() + (model.weight - old).sum()\n"
    "    step.backward(loss)\nif step.number % 10 == 9:\n    old = model.weight.detach().clone()",
    "a target network": "for x in step:\n    with torch.no_grad():\n        wanted = target(x)\n"
    "    step.backward((model(x) - wanted).sum())\n"
    "if step.number % 10 == 0:\n    target.load_state_dict(model.state_dict())",
    "a generator": "for x in step:\n    step.backward(model(x).sum())\n"
    "model.weight.grad.add_(torch.randn(1, 2, generator=own))",
    "a generator of numpy": "for x in step:\n    step.backward((model(x) * rng.standard_normal()).sum())",
    "a baseline of its own old value": "for x in step:\n    step.backward((model(x) - baseline).sum())\n"
    "    session.metrics(r=1.0)\nbaseline = 0.9 * baseline + 0.1 * step.metrics['r']",
    "an index that leaves batches out": "for i, x in enumerate(step):\n    if i > 2:\n        continue\n"
    "    step.backward(model(x).sum())",
    "an index that ends the micro-batches": "for i, x in enumerate(step):\n"
    "    step.backward(model(x).sum())\n    if i == 2:\n        break",
}
NOT_LATER = {
    "the weights before this step": "for x in step:\n"
    "    step.backward(model(x).sum() + (model.weight - old).sum())\nold = model.weight.detach().clone()",
    "sums of the step before": "for x in step:\n    step.backward((model(x) - baseline).sum())\n"
    "    session.metrics(r=1.0)\nbaseline = step.metrics['r']",
    "a loss that is printed before it is set": "if step.number:\n    print(loss)\nfor x in step:\n"
    "    loss = model(x).sum()\n    step.backward(loss)",
    "a target network in state": "for x in step:\n    with torch.no_grad():\n        wanted = held(x)\n"
    "    step.backward((model(x) - wanted).sum())\n"
    "if step.number % 10 == 0:\n    held.load_state_dict(model.state_dict())",
    "a generator in state": "for x in step:\n    step.backward(model(x).sum())\n"
    "model.weight.grad.add_(torch.randn(1, 2, generator=of_state))",
    "a generator of a validation": "for x in step:\n    step.backward(model(x).sum())\n"
    "print(rng.standard_normal(), torch.rand(2, generator=own))",
    "an index that is printed at times": "for i, x in enumerate(step):\n    if i % 2 == 0:\n"
    "        print(i)\n    step.backward(model(x).sum())",
}
MOVED = {
    "a tensor": "for x in step:\n    step.backward((model(x) * buffer.mean()).sum())\nbuffer.mul_(0.9)",
    "a network": "for x in step:\n    step.backward((model(x) - other(x)).sum())\n"
    "for p in other.parameters():\n    p.data.mul_(0.9)",
    "a network's weight": "for x in step:\n    step.backward((model(x) - other(x)).sum())\n"
    "other.weight.data *= 0.9",
}
COPIED = {
    "its data": "for p, t in zip(model.parameters(), other.parameters()):\n        t.data.copy_(p.data)",
    "its tensors": "for i, t in enumerate(other.parameters()):\n        t.detach().copy_(model.weight)",
    "other data": "for (_, t), p in zip(other.named_parameters(), model.parameters()):\n"
    "        t.data = p.data.clone()",
    "its weight": "other.weight.data.copy_(model.weight.data)",
    "its weight's data": "other.weight.data = model.weight.data.clone()",
    "its state": "for name, t in other.state_dict().items():\n        t.copy_(model.state_dict()[name])",
}
MOVED |= {
    f"a target network, {name}": "for x in step:\n    step.backward((model(x) - other(x)).sum())\n"
    f"if step.number % 10 == 0:\n    {copy}"
    for name, copy in COPIED.items()
}
NOT_MOVED = {
    "a weight that each step fills": "with torch.no_grad():\n    other.weight.copy_(model.weight)\n"
    "for x in step:\n    step.backward((model(x) - other(x)).sum())",
    "a network that each step fills": "for t, p in zip(other.parameters(), model.parameters()):\n"
    "    t.data.copy_(p.data)\nfor x in step:\n    step.backward((model(x) - other(x)).sum())",
    "the model": "for x in step:\n    step.backward(model(x).sum())\n"
    "for p in model.parameters():\n    p.data.clamp_(-1, 1)\n    p.grad.mul_(0.5)",
    "a network that no loss has": "for x in step:\n    step.backward(model(x).sum())\n"
    "for p in other.parameters():\n    p.data.mul_(0.9)",
    "a tensor that each step fills": "buffer.zero_()\nfor x in step:\n    buffer.add_(x.mean())\n"
    "    step.backward((model(x) * buffer.mean()).sum())",
    "the batch": "for x in step:\n    x.mul_(0.5)\n    step.backward(model(x).sum())",
}
NOT_KEPT = {
    "a buffer that each call fills": "for x in step:\n    step.backward(model(rows.filled(x)).sum())",
    "a count of a method for prints": "for x in step:\n    step.backward(rows.of(model(x)))\n"
    "rows.count += 1\nprint(rows.count)",
    "a loss that counts its calls for prints": "for x in step:\n    step.backward(focal(model(x)))",
    "state": "for x in step:\n    step.backward((shared['table'][:2] * model(x)).sum())\n"
    "shared['table'][:2] = 0.5 * shared['table'][:2] + 1\nshared['table'] = shared['table'] + 1",
    "an object of state that is told": "for x in step:\n    loss = model(x).sum()\n"
    "    step.backward(loss / kept.mean)\n    kept.update(loss)",
    "an object that is told for prints": "for x in step:\n    loss = model(x).sum()\n"
    "    step.backward(loss)\n    balance.update(loss)\nprint(balance.mean)",
    "an object of state": "for x in step:\n    step.backward(kept(model(x).sum()))",
    "a filled buffer": "for x in step:\n    buffer[:] = x\n    step.backward(model(buffer).sum())",
    "a cache": "for x in step:\n    key = int(x[0, 0])\n    if key not in cache:\n"
    "        cache[key] = model(x)\n"
    "    step.backward(model(x).sum() + cache[key].detach().sum())",
    "figures that are printed": "for x in step:\n    loss = model(x).sum()\n    step.backward(loss)\n"
    "    figures['loss'] += loss.item()\n    grown.append(loss.item())\nprint(figures, sum(grown))",
    "a list that each step empties": "for x in step:\n    grown.append(model(x))\n"
    "    step.backward(grown[-1].sum())\ngrown.clear()",
    "a list of each step": "parts = []\nfor x in step:\n    parts.append(model(x))\n"
    "    parts[0] = parts[0] * 2\n"
    "    step.backward(sum(parts[-1:]).sum())",
    "part of the batch": "for x in step:\n    x[0] = x[0] * 2\n    x[1] += 1\n"
    "    step.backward(model(x).sum())",
    "a batch that is drawn in each micro-batch": "for x in step:\n    u = next(iter(more))\n"
    "    step.backward(model(x).sum() + model(u).sum())",
    "an index that is printed": "for i, x in enumerate(step):\n"
    "    step.backward(model(x).sum())\n    print(i)",
    "an attribute that forward does not read": "for x in step:\n"
    "    step.backward(scaled(model(x)).sum())\nscaled.shown += 1",
    "a rate of dropout by the step": "drop.p = 0.5 * 0.9**step.number\n"
    "for x in step:\n    step.backward(model(drop(x)).sum())",
    "a count of calls": "for x in step:\n    step.backward(balance.timed(model(x).sum()))",
    "a parameter": "for x in step:\n    step.backward(model(x).sum())\n"
    "with torch.no_grad():\n    model.weight[0] = model.weight[0] * 0.9",
}


LOCAL = {
    "a rate": "total = 0.0\nfor x in step:\n    loss = model(x).sum()\n    step.backward(loss)\n"
    "    total += loss.item()\ngroups[0]['lr'] = 1 / (1 + total)",
    "a limit": "worst = 0.0\nfor x in step:\n    loss = model(x).sum()\n    step.backward(loss)\n"
    "    worst = max(worst, loss.item())\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1 + worst)",
    "an update": "total = 0.0\nfor x in step:\n    loss = model(x).sum()\n    step.backward(loss)\n"
    "    total += loss.item()\nif total < 3: optimizer.step()",
    "an end": "total = 0.0\nfor x in step:\n    loss = model(x).sum()\n    step.backward(loss)\n"
    "    total += loss.item()\nif step.contributed and total < 3: break",
    "a plateau": "total = 0.0\nfor x in step:\n    loss = model(x).sum()\n    step.backward(loss)\n"
    "    total += loss.item()\nplateau.step(total)",
    "a meter": "for x in step:\n    loss = model(x).sum()\n    step.backward(loss)\n"
    "    balance.update(loss)\n"
    "if balance.mean < 3: groups[0]['lr'] = 0.1",
}
NOT_LOCAL = {
    "the sums of the job": "for x in step:\n    loss = model(x).sum()\n    step.backward(loss)\n"
    "    session.metrics(loss=loss.item())\nloss = step.metrics['loss']\ngroups[0]['lr'] = 1 / (1 + loss)\n"
    "if loss < -1e9: break",
    "the average gradient": "for x in step:\n    step.backward(model(x).sum())\n"
    "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\nif norm < 3: optimizer.step()",
    "a test for health": "total = 0.0\nfor x in step:\n    loss = model(x).sum()\n    step.backward(loss)\n"
    "    total += loss\nif torch.isfinite(total): optimizer.step()",
    "a collective": "total = 0.0\nfor x in step:\n    loss = model(x).sum()\n    step.backward(loss)\n"
    "    total += loss\ntotal = all_reduce(total)\nif total < 3: optimizer.step()",
    "prints and an end of the micro-batches": "total = 0.0\nfor x in step:\n    loss = model(x).sum()\n"
    "    step.backward(loss)\n    total += loss.item()\n    if total > 1e9: print(total)\n"
    "if total > 3: print(total)",
}


def run_steps(monkeypatch, tmp_path, body):
    """Run two steps of a loop with this body."""
    path, loop = tmp_path / "script.py", "for step in session.steps(data, until=2):\n"
    path.write_text(PREPARED + loop + textwrap.indent(body, "    "))
    linecache.checkcache(str(path))

    def attached(**state):
        return session_of(monkeypatch, state=state)

    names = {"torch": torch, "numpy": numpy, "itertools": itertools, "attached": attached}
    exec(compile(path.read_text(), str(path), "exec"), names)


@pytest.mark.parametrize(("sentence", "body"), KEPT.items(), ids=KEPT)
def test_the_first_call_refuses_what_a_loop_keeps_to_train_by(monkeypatch, tmp_path, sentence, body):
    with pytest.raises(ConfigError, match=f"the training (depends on|reads) {sentence}.*script.py:"):
        run_steps(monkeypatch, tmp_path, body)


def test_the_first_call_refuses_best_weights_that_the_loop_keeps(monkeypatch, tmp_path):
    body = "for x in step:\n    step.backward(model(x).sum())\nvalue = model.weight.sum().item()\n"
    body += "if value < best: best, kept_weights = value, dict(model.state_dict())\n"
    run_steps(monkeypatch, tmp_path, body)
    with pytest.raises(
        ConfigError, match=r"kept_weights at script.py:\d+ keeps weights by best, and a replica"
    ):
        run_steps(monkeypatch, tmp_path, body + "if step.number == 1: model.load_state_dict(kept_weights)")


@pytest.mark.parametrize("body", [*MOVED.values(), *NOT_MOVED.values()], ids=[*MOVED, *NOT_MOVED])
def test_the_first_call_refuses_what_a_loop_changes_in_place_to_train_by(monkeypatch, tmp_path, body):
    refuses = pytest.raises(ConfigError, match=r"the training depends on \w+, which script.py:\d+ changes")
    with refuses if body in MOVED.values() else contextlib.nullcontext():
        run_steps(monkeypatch, tmp_path, "with torch.no_grad(): pass\n" + body)


@pytest.mark.parametrize("body", LATER.values(), ids=LATER)
def test_the_first_call_refuses_what_a_step_sets_or_draws_for_the_training_of_later_ones(
    monkeypatch, tmp_path, body
):
    with pytest.raises(ConfigError, match=r"the training depends on \w+(, | \()"):
        run_steps(monkeypatch, tmp_path, body)


@pytest.mark.parametrize("body", NOT_LATER.values(), ids=NOT_LATER)
def test_what_a_replica_that_joins_sets_alike_is_left_alone(monkeypatch, tmp_path, body):
    run_steps(monkeypatch, tmp_path, body)


@pytest.mark.parametrize("body", LOCAL.values(), ids=LOCAL)
def test_the_first_call_refuses_an_update_that_goes_by_the_micro_batches_of_one_replica(
    monkeypatch, tmp_path, body
):
    with pytest.raises(ConfigError, match=r"the update depends on \w+ \(script.py:\d+\), which goes by"):
        run_steps(monkeypatch, tmp_path, body)


@pytest.mark.parametrize("body", NOT_LOCAL.values(), ids=NOT_LOCAL)
def test_an_update_that_goes_by_what_all_replicas_share_is_left_alone(monkeypatch, tmp_path, body):
    run_steps(monkeypatch, tmp_path, body)


@pytest.mark.parametrize("body", NOT_KEPT.values(), ids=NOT_KEPT)
def test_what_a_loop_keeps_for_itself_is_left_alone(monkeypatch, tmp_path, body):
    run_steps(monkeypatch, tmp_path, body)


def test_a_search_that_fails_ends_no_training(caplog):
    @search("")
    def broken():
        raise RecursionError

    @search("")
    def refusing():
        raise ConfigError("a sentence")

    assert broken() == ""
    assert "does not check it" in caplog.text
    with pytest.raises(ConfigError, match="a sentence"):
        refusing()
