"""A loop of accelerate that trains by the number of a batch gets no batches of a dead replica."""

import textwrap

import pytest

BASE = """
import torch
from fabric.integrations.accelerate.replica import _fixed_batches

model = torch.nn.Linear(2, 1)
found = []

class Data(list):
    def __iter__(self):
        found.append(_fixed_batches())
        return super().__iter__()

class Accelerator:
    sync_gradients = True
    def accumulate(self): pass
    def backward(self, loss): loss.backward()
    def clip_grad_norm_(self, parameters, limit): pass
    def print(self, *words): pass

data, accelerator, n = Data([torch.ones(2)]), Accelerator(), 0
"""
FIXED = {
    "a loss by the number": (
        """
        for i, x in enumerate(data):
            accelerator.accumulate()
            accelerator.backward(model(x).sum() * i)
        """,
        "counts its batches in i",
    ),
    "a term of the loss at times": (
        """
        for i, x in enumerate(data):
            accelerator.accumulate()
            loss = model(x).sum()
            if i % 16 == 0:
                loss = loss + model.weight.square().sum()
            accelerator.backward(loss)
        """,
        "counts its batches in i",
    ),
    "a rate by a count": (
        """
        for x in data:
            accelerator.accumulate()
            accelerator.backward(model(x).sum())
            for group in [{}]: group["lr"] = 0.1 / (1 + n)
            n += 1
        """,
        "counts its batches in n",
    ),
    "torch's clipping": (
        """
        for x in data:
            accelerator.accumulate()
            accelerator.backward(model(x).sum())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        """,
        "changes gradients after each batch",
    ),
}
FREE = {
    "a log at times": """
        for i, x in enumerate(data):
            accelerator.accumulate()
            loss = model(x).sum()
            accelerator.backward(loss)
            if i % 100 == 0:
                shown = loss.item()
                accelerator.print(i, shown)
        """,
    "a count of steps": """
        for x in data:
            accelerator.accumulate()
            accelerator.backward(model(x).sum() * n)
            if accelerator.sync_gradients:
                n += 1
        """,
    "clipping once a step": """
        for x in data:
            accelerator.accumulate()
            accelerator.backward(model(x).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            if accelerator.sync_gradients:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        """,
}


@pytest.mark.parametrize("name", [*FIXED, *FREE])
def test_a_loop_that_trains_by_the_number_of_a_batch_is_told(name, tmp_path):
    text, expected = FIXED.get(name) or (FREE[name], "")
    path, names = tmp_path / "script.py", {"__name__": "script"}
    path.write_text(BASE + textwrap.dedent(text))
    exec(compile(path.read_text(), str(path), "exec"), names)
    told = names["found"][0]
    assert expected in told and bool(told) == bool(expected)
