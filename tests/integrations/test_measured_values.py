"""A loop that ends by what it measures, or trains by its past, is named; other loops are left alone."""

import textwrap

import pytest

BASE = """
import sys
import math
import torch
from fabric.integrations.user_source import measured_value

model = torch.nn.Linear(2, 1)
found = []

class Stopper:
    stop = False
    def __call__(self, value, model): pass

class Meter:
    def update(self, value): pass
    def log_every(self, data): return data

def evaluate(model, data): return 1.0

def environment(action): return torch.ones(2)

def criterion(output): return output.sum()

class Data(list):
    def __iter__(self):
        found.append(measured_value(sys._getframe(1)))
        return super().__iter__()

data = Data([torch.ones(2)])
stopper, meter, n, best, bad = Stopper(), Meter(), 0, 9.0, 0
"""
NAMED = {
    "patience": (
        """
        for epoch in range(1):
            for x in data:
                loss = criterion(model(x))
                loss.backward()
            value = evaluate(model, data)
            if value < best: best, bad = value, 0
            else: bad += 1
            if bad >= 3: break
        """,
        "the loop ends at script.py:39 by bad, which is measured",
    ),
    "an object that judges": (
        """
        for epoch in range(1):
            for x in data: loss = criterion(model(x))
            stopper(evaluate(model, data), model)
            if stopper.stop: break
        """,
        "by stopper",
    ),
    "a target": (
        """
        def train():
            for epoch in range(1):
                for x in data: loss = criterion(model(x))
                losses = []
                losses.append(loss.item())
                if sum(losses) < 0.1: return
        train()
        """,
        "by loss",
    ),
    "a while loop": (
        """
        value = 1.0
        while value > 0.5 and not found:
            for x in data: value = model(x).item()
        """,
        "by value",
    ),
    "an outer function": (
        """
        def one(model):
            for x in data: criterion(model(x)).backward()
        def outer():
            for epoch in range(1):
                one(model)
                if evaluate(model, data) > 2: break
                value = evaluate(model, data)
                if value > 2: break
        outer()
        """,
        "by value",
    ),
    "a weight of the loss's past": (
        """
        average = 1.0
        for x in data:
            loss = criterion(model(x))
            average = 0.9 * average + 0.1 * loss.item()
            (loss * average).backward()
        """,
        "the training depends on average, which script.py:35 carries from what is measured",
    ),
    "a weight by the last evaluation": (
        """
        weight = 1.0
        for epoch in range(1):
            for x in data:
                loss = criterion(model(x)) * weight
                loss.backward()
            weight = evaluate(model, data)
        """,
        "the training depends on weight, which script.py:37 measures for the next pass",
    ),
    "a hidden state that the model gives": (
        """
        class Pair(torch.nn.Linear):
            def forward(self, x, hidden): return super().forward(x), x
        pair = Pair(2, 1)
        for epoch in range(1):
            hidden = None
            for x in data:
                output, hidden = pair(x, hidden)
                criterion(output).backward()
                hidden = hidden.detach()
        """,
        "the training depends on hidden, which script.py:38 measures for the next pass",
    ),
    "a part of the loss that begins when the last pass was good": (
        """
        share = 0.0
        for epoch in range(1):
            right = 0
            for x in data:
                output = model(x)
                loss = criterion(output)
                if share > 0.8: loss = loss + output.norm()
                loss.backward()
                right += (output > 0).sum().item()
            share = right / len(data)
        """,
        "the training depends on share, which script.py:41 measures for the next pass",
    ),
    "a distance from the weights at the begin of a pass": (
        """
        for epoch in range(1):
            anchor = [p.detach().clone() for p in model.parameters()]
            for x in data:
                loss = criterion(model(x))
                for p, old in zip(model.parameters(), anchor): loss = loss + (p - old).norm()
                loss.backward()
        """,
        "the training depends on anchor, in which script.py:33 keeps weights",
    ),
    "the same in attributes of the parameters": (
        """
        for epoch in range(1):
            for p in model.parameters(): p.anchor = p.detach().clone()
            for x in data:
                loss = criterion(model(x))
                for p in model.parameters(): loss = loss + (p - p.anchor).norm()
                loss.backward()
        """,
        "the training depends on p.anchor, in which script.py:33 keeps weights",
    ),
    "an output that is reset at times": (
        """
        old = None
        for n, x in enumerate(data):
            if n % 5 == 0: old = None
            output = model(x) + (0 if old is None else old)
            criterion(output).backward()
            old = output.detach()
        """,
        "the training depends on old, which script.py:37 measures for the next pass",
    ),
    "an average that an object is told and then asked for": (
        """
        class Average:
            value = 1.0
            def update(self, loss): self.value = 0.9 * self.value + 0.1 * loss
            @property
            def scale(self): return 1 / self.value
        average = Average()
        for x in data:
            loss = criterion(model(x))
            average.update(loss.item())
            (loss * average.scale).backward()
        """,
        "the training depends on self.value, which Average.update keeps from call to call (script.py:34)",
    ),
    "an object that judges what a function of the script measures": (
        """
        class Patience:
            bad = 0
            def is_over(self, value): return value > 3
        patience = Patience()
        def validate():
            total = 0.0
            for x in [torch.ones(2)]: total += criterion(model(x)).item()
            return total / 2
        for epoch in range(1):
            for x in data: criterion(model(x)).backward()
            if patience.is_over(validate()): break
        """,
        "the loop ends at script.py:42 by what it measures",
    ),
    "a clock in a function": (
        """
        import time
        def is_late(started): return time.time() - started > 60
        for epoch in range(1):
            for x in data: criterion(model(x)).backward()
            if is_late(0.0): break
        """,
        "the loop ends at script.py",
    ),
    "a rate by the loss of the batch": (
        """
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for x in data:
            loss = criterion(model(x))
            for group in optimizer.param_groups: group["lr"] = min(1.0, loss.item())
            loss.backward()
        """,
        "the update depends on what script.py:35 measures in one replica",
    ),
    "an update where the loss is small": (
        """
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for x in data:
            loss = criterion(model(x))
            loss.backward()
            if loss.item() < 3.0: optimizer.step()
        """,
        "the update depends on what script.py:36 measures in one replica",
    ),
    "a clock": (
        """
        import time
        started = time.time()
        while time.time() - started < 60 and not found:
            for x in data: criterion(model(x)).backward()
        """,
        "the loop ends at script.py:34 by what it measures",
    ),
    "a share of right answers": (
        """
        for epoch in range(1):
            for x in data: criterion(model(x)).backward()
            right = (model(torch.ones(2)) > 0).float().mean().item()
            if right > 0.9: break
        """,
        "by right, which is measured",
    ),
    "limits for the gradient by the norms before": (
        """
        norms = []
        for x in data:
            criterion(model(x)).backward()
            norm = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5
            norms.append(norm.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), sum(norms) / len(norms))
        """,
        "the training depends on norms, which script.py:36 carries from what is measured",
    ),
    "a limit by the norm that clipping gives": (
        """
        limit = 1.0
        for x in data:
            criterion(model(x)).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            limit = 0.9 * limit + 0.1 * float(norm)
        """,
        "the training depends on limit, which script.py:36 carries from what is measured",
    ),
    "a slow average of the gradients": (
        """
        slow = {}
        for x in data:
            criterion(model(x)).backward()
            for k, p in model.named_parameters():
                slow[k] = slow[k] * 0.9 + p.grad if k in slow else p.grad.clone()
                p.grad.add_(slow[k])
        """,
        "the training depends on slow, which script.py:36 carries from what is measured",
    ),
    "a rate that falls when an evaluation is worse": (
        """
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for epoch in range(1):
            for x in data: criterion(model(x)).backward()
            value = evaluate(model, data)
            if value > best: optimizer.param_groups[0]["lr"] *= 0.5
            best = min(best, value)
        """,
        "the training depends on best, which script.py:37 carries from what is measured",
    ),
    "a way back to the best file": (
        """
        for epoch in range(1):
            for x in data: criterion(model(x)).backward()
            value = evaluate(model, data)
            if value < best:
                best = value
                torch.save(model.state_dict(), "/dev/null")
            else:
                model.load_state_dict(torch.load("/dev/null"))
        """,
        "the training depends on best, which script.py:35 carries from what is measured",
    ),
    "averages that an object keeps of the losses": (
        """
        class Balance:
            mean = 1.0
            def __call__(self, loss):
                self.mean = 0.9 * self.mean + 0.1 * loss.item()
                return loss / self.mean
        balance = Balance()
        for x in data:
            loss = balance(criterion(model(x)))
            loss.backward()
        """,
        "the training depends on self.mean, which Balance.__call__ keeps from call to call (script.py:35)",
    ),
    "the best weights, which the script loads at its end": (
        """
        import copy
        for epoch in range(1):
            for x in data: criterion(model(x)).backward()
            value = evaluate(model, data)
            if value < best: best, kept = value, copy.deepcopy(model.state_dict())
        model.load_state_dict(kept)
        """,
        "at script.py:36 keeps the weights that measure best",
    ),
}
LEFT_ALONE = {
    "an object that keeps losses for prints": """
        class Shown:
            mean = 1.0
            def __call__(self, loss):
                self.mean = 0.9 * self.mean + 0.1 * loss.item()
                print(self.mean)
                return loss
        shown = Shown()
        for x in data:
            loss = shown(criterion(model(x)))
            loss.backward()
        """,
    "an object that counts for a weight of the loss": """
        class Ramp:
            n = 0
            def tick(self): self.n += 1
            def weight(self): return min(1.0, self.n / 20)
        ramp = Ramp()
        for x in data:
            loss = criterion(model(x)) * ramp.weight()
            loss.backward()
            ramp.tick()
        """,
    "an object that is told the losses, and weighs by the epoch": """
        class Meter:
            total, weight = 0.0, 1.0
            def update(self, loss): self.total += loss
            def text(self): return f"{self.total}"
        losses = Meter()
        for x in data:
            loss = criterion(model(x)) * losses.weight
            loss.backward()
            losses.update(loss.item())
            print(losses.text(), losses.total)
        """,
    "a function of the script that trains and counts": """
        def one_pass():
            global n
            for x in data:
                loss = criterion(model(x))
                loss.backward()
                n += 1
            print(loss.item())
            return n
        def outer():
            while True:
                model.float()
                if one_pass() >= 1: break
                seen = one_pass()
                if seen >= 1: break
        outer()
        """,
    "a clock for prints and files": """
        import time
        last, total = time.time(), 0.0
        for epoch in range(1):
            for x in data:
                criterion(model(x)).backward()
                total += time.time() - last
                if time.time() - last > 60:
                    torch.save(model.state_dict(), "/dev/null")
                    last = time.time()
                n += 1
                if n > 9: break
            print(total)
        """,
    "an evaluation of which the next pass prints": """
        value = 1.0
        for epoch in range(1):
            for x in data:
                print(f"last {value}")
                shown = value * 2
                loss = criterion(model(x))
                loss.backward()
            value = evaluate(model, data)
        """,
    "the best weights in a file": """
        for epoch in range(1):
            for x in data: criterion(model(x)).backward()
            value = evaluate(model, data)
            if value < best:
                best = value
                torch.save(model.state_dict(), "/dev/null")
        """,
    "a hidden state of parts of one batch": """
        class Pair(torch.nn.Linear):
            def forward(self, x, hidden): return super().forward(x), x
        pair = Pair(2, 1)
        for x in data:
            hidden = None
            for part in x:
                output, hidden = pair(x, hidden)
            criterion(output).backward()
        """,
    "an output in two ways, and a print of the last loss": """
        for n, x in enumerate(data):
            if n: print(loss)
            if n % 2: output = model(x)
            else: output = model(x + 1)
            loss = criterion(output)
            loss.backward()
        """,
    "a copy of the weights for a print, and a list of the parameters": """
        for epoch in range(1):
            before = [p.detach().clone() for p in model.parameters()]
            parameters = list(model.parameters())
            for x in data:
                (criterion(model(x)) + sum(p.norm() for p in parameters)).backward()
            print(sum((p - old).norm() for p, old in zip(model.parameters(), before)))
        """,
    "an output and its loss in one line": """
        for x in data:
            output, other = model(x), 0; loss = criterion(output) + other; loss.backward()
        """,
    "the state of an environment": """
        state = torch.ones(2)
        for episode in range(1):
            for x in data:
                action = model(state)
                criterion(action).backward()
                state = environment(action.detach())
        """,
    "sums for prints": """
        total = 0.0
        for epoch in range(1):
            for x in data:
                loss = criterion(model(x))
                loss.backward()
                total += loss.item()
                n += 1
                meter.update(loss.item())
                if n == 100: break
            if total > 3: print(total / len(data))
            if n >= 100: break
        """,
    "a test for nan": """
        for x in data:
            loss = criterion(model(x))
            if not math.isfinite(loss): break
            loss.backward()
        """,
    "the best weights": """
        for epoch in range(1):
            for x in data: criterion(model(x)).backward()
            value = evaluate(model, data)
            if value < best: best, kept = value, model.state_dict()
        """,
    "an inner loop that ends": """
        for epoch in range(1):
            for x in data: criterion(model(x)).backward()
            for y in [1]:
                value = evaluate(model, data)
                if value > 2: break
        """,
    "batches of a judging object, moved in a tuple": """
        def train():
            for x in meter.log_every(data):
                x, y = x.to("cpu"), x.to("cpu")
                loss = criterion(model(x))
                loss.backward()
                meter.update(loss.item())
        train()
        """,
    "a count that a function with the model goes on with": """
        def one(model, step):
            for x in data: criterion(model(x)).backward()
            return 1.0, step + 1
        def outer():
            step = 0
            for epoch in range(3):
                loss, step = one(model, step)
                if step >= 2: break
        outer()
        """,
    "norms for prints, and limits by the epoch": """
        norms, top = [], 0.0
        limit = 1.0
        for epoch in range(1):
            for x in data:
                criterion(model(x)).backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
                for p in model.parameters(): p.grad.mul_(limit)
                norms.append(norm.item())
                if norm > top: top = norm
            limit *= 0.5
            print(sum(norms), top)
        """,
    "an update where the norm or the loss is finite, a rate by the norm": """
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for x in data:
            loss = criterion(model(x))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups: group["lr"] = 1 / (1 + norm.item())
            if norm < 3.0: optimizer.step()
            if torch.isfinite(loss): optimizer.step()
        """,
    "a rate by the epoch": """
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for epoch in range(1):
            for x in data: criterion(model(x)).backward()
            n += 1
            if n > 3: optimizer.param_groups[0]["lr"] *= 0.5
        """,
    "a count and a norm": """
        while n < 1:
            for x in data:
                loss = criterion(model(x)) / 4
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            model.train()
            n += 1
        """,
}


@pytest.fixture
def search(tmp_path):
    def run(text):
        path, names = tmp_path / "script.py", {"__name__": "script"}
        path.write_text(BASE + textwrap.dedent(text))
        exec(compile(path.read_text(), str(path), "exec"), names)
        return names["found"][0]

    return run


@pytest.mark.parametrize("name", NAMED)
def test_a_measured_value_that_steers_a_loop_is_named(search, name):
    text, expected = NAMED[name]
    assert expected in search(text)


TARGET = """
    import copy
    from fabric.integrations.user_source import carried_network
    target, shared = copy.deepcopy(model), [model]
    {}
    class Looked(list):
        def __iter__(self):
            found.insert(0, carried_network(sys._getframe(1), shared))
            return super().__iter__()
    for n in range(2):
        for x in Looked(data):
            criterion(model(x) - {}(x)).backward()
        if n % 10 == 0:
            {}
"""
COPIES = [
    "target.load_state_dict(model.state_dict())",
    "for p, t in zip(model.parameters(), target.parameters()): t.data.copy_(p.data)",
]


@pytest.mark.parametrize("copy", COPIES)
def test_a_target_network_is_named(search, copy):
    assert "depends on the network target, which script.py:" in search(TARGET.format("", "target", copy))


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize(("shares", "read"), [("shared.append(target)", "target"), ("", "model")])
def test_a_network_that_is_shared_or_that_no_loss_reads_is_left_alone(search, copy, shares, read):
    assert search(TARGET.format(shares, read, copy)) == ""


def test_a_network_that_is_set_when_its_own_figure_says_so_is_left_alone(search):
    copy = "score = target(x).mean()\n            if score < 1: target.load_state_dict(model.state_dict())"
    assert search(TARGET.format("", "model", copy)) == ""


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_a_loop_that_counts_is_left_alone(search, name):
    assert search(LEFT_ALONE[name]) == ""
