"""With --adopt, data that all replicas draw alike are refused before the first step, by their source."""

import contextlib
import sys
import textwrap
from types import SimpleNamespace

import pytest

from fabric.errors import ConfigError
from fabric.integrations.adopt.adopted_data import refuse_other_data, refuse_same_data

BASE = """
import random
import torch
from torch.utils.data import IterableDataset
model = torch.nn.Linear(4, 1)
stream = None
"""
ALIKE = {
    "a stream with a generator of its own": """
        class Numbers(IterableDataset):
            def __iter__(self):
                drawn = torch.Generator().manual_seed(7)
                while True: yield torch.randn(4, generator=drawn)
        stream = Numbers()
    """,
    "a stream that holds its generator": """
        class Numbers(IterableDataset):
            def __init__(self, seed): self.drawn = random.Random(seed)
            def __iter__(self):
                for _ in range(9): yield self.item()
            def item(self): return torch.tensor([self.drawn.random() for _ in range(4)])
        stream = Numbers(3)
    """,
    "a stream of numbers": """
        class Numbers(IterableDataset):
            def __iter__(self):
                for i in range(9): yield torch.ones(4) * i
        stream = Numbers()
    """,
}
OTHERS = {
    "a stream by torch's generator": """
        class Numbers(IterableDataset):
            def __iter__(self):
                while True: yield torch.randn(4)
        stream = Numbers()
    """,
    "a stream by the replica's name": """
        import os
        class Numbers(IterableDataset):
            def __init__(self): self.seed = len(os.environ.get("FABRIC_REPLICA", ""))
            def __iter__(self):
                drawn = torch.Generator().manual_seed(self.seed)
                while True: yield torch.randn(4, generator=drawn)
        stream = Numbers()
    """,
    "a stream of another object": """
        class Source:
            def draw(self): return torch.randn(4)
        class Numbers(IterableDataset):
            def __init__(self): self.source = Source()
            def __iter__(self):
                while True: yield self.source.draw()
        stream = Numbers()
    """,
    "a stream of a function": """
        def draw(): return torch.randn(4)
        class Numbers(IterableDataset):
            def __iter__(self):
                while True: yield draw()
        stream = Numbers()
    """,
    "a stream whose generator has a seed by chance": """
        class Numbers(IterableDataset):
            def __init__(self):
                self.drawn = torch.Generator()
                self.drawn.seed()
            def __iter__(self):
                while True: yield torch.randn(4, generator=self.drawn)
        stream = Numbers()
    """,
    "a stream by the system's chance": """
        class Numbers(IterableDataset):
            def __iter__(self):
                drawn = random.Random()
                while True: yield torch.tensor(drawn.random())
        stream = Numbers()
    """,
    "a stream by Python's random numbers": """
        class Numbers(IterableDataset):
            def __iter__(self):
                for _ in range(9): yield torch.tensor(random.random())
        stream = Numbers()
    """,
    "a stream with a seed of Python's random numbers": """
        class Numbers(IterableDataset):
            def __iter__(self):
                drawn = random.Random(random.random())
                while True: yield torch.tensor(drawn.random())
        stream = Numbers()
    """,
    "a stream that is filled in place": """
        class Numbers(IterableDataset):
            def __iter__(self):
                while True: yield torch.zeros(4).uniform_()
        stream = Numbers()
    """,
    "torch's generator by name": """
        class Numbers(IterableDataset):
            def __init__(self): self.drawn = torch.default_generator
            def __iter__(self):
                while True: yield torch.randn(4, generator=self.drawn)
        stream = Numbers()
    """,
    "a stream of a library": """
        from torch.utils.data import ChainDataset
        stream = ChainDataset([])
    """,
}


@pytest.fixture
def adopt(tmp_path):
    def run(text, replicas=2):
        path, names = tmp_path / "script.py", {"__name__": "script"}
        path.write_text(BASE + textwrap.dedent(text))
        exec(compile(path.read_text(), str(path), "exec"), names)
        refuse_same_data(names["stream"], replicas)

    return run


@pytest.mark.parametrize("text", ALIKE.values(), ids=ALIKE)
def test_data_that_are_alike_by_the_source_are_refused_before_the_first_step(adopt, text):
    with pytest.raises(ConfigError, match="all replicas train on the same data"):
        adopt(text)
    adopt(text, replicas=1)


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_data_that_may_differ_are_left_to_the_watch(adopt, text):
    adopt(text)


GROWING = {
    "a list that gives the length": ("data.items += [1]", True),
    "a method that adds": ("data.add(1)", True),
    "a list of figures": ("data.losses.append(0.5)", False),
    "a method that notes figures": ("data.note(0.5)", False),
    "a method that calls itself": ("data.again(2)", False),
    "a count": ("data.reads += 1", False),
    "weights in place": ("data.weights *= 0.9", False),
}


@pytest.mark.parametrize("name", GROWING)
def test_only_what_gives_the_length_of_a_data_set_makes_it_grow(tmp_path, name):
    line, grows = GROWING[name]
    path, refused = tmp_path / "script.py", []
    path.write_text(
        "import torch\nclass Data:\n"
        "    def __init__(self):\n        self.items, self.losses, self.reads = [0], [], 0\n"
        "        self.weights = torch.ones(2)\n"
        "    def __len__(self): return len(self.items)\n    def add(self, x): self.items.append(x)\n"
        "    def note(self, x): self.losses.append(x)\n"
        "    def again(self, n): return n and self.again(n - 1)\n"
        f"data = Data()\nfor number in range(2):\n    look(data)\n    {line}\n"
    )

    def look(data):
        with contextlib.suppress(ConfigError):
            refuse_other_data(sys._getframe(1), SimpleNamespace(dataset=data))
            return
        refused.append(True)

    exec(compile(path.read_text(), str(path), "exec"), {"look": look})
    assert bool(refused) == grows
