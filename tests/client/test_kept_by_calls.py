"""A result that depends on earlier calls is named; caches and counts for prints are left alone."""

import linecache
import textwrap

import pytest
import torch

import fabric.client
from fabric.client.loop.user_functions import kept_by_calls
from fabric.errors import ConfigError

BASE = """
import functools
import itertools
import torch
from torch.utils.data import Dataset, default_collate

def load(i): return [i]
def mask(x, k=1): return x
"""
KEPT = {
    "a count in a collator": """
        class Mask:
            n = 0
            def __call__(s, b):
                s.n += 1
                x, y = default_collate(b)
                x = x.clone()
                x[:, : min(5, s.n // 6)] = 0
                return x, y
        thing = Mask()
        # s.n, which Mask.__call__ keeps
    """,
    "a count by assignment, under a condition": """
        class Mask:
            n = 0
            def __call__(self, b):
                self.n = self.n + 1
                if self.n > 100:
                    b = mask(b)
                return b
        thing = Mask()
        # self.n, which
    """,
    "a result in a branch": """
        class Mask:
            n = 0
            def __call__(self, b):
                self.n += 1
                if self.n > 100:
                    return mask(b)
                return b
        thing = Mask()
        # self.n, which
    """,
    "a count in a helper": """
        class Mask:
            n = 0
            def __call__(self, b): return mask(b, self.level())
            def level(self):
                self.n += 1
                return self.n // 6
        thing = Mask()
        # self.n, which Mask.level keeps
    """,
    "a property": """
        class Mask:
            n = 0
            @property
            def level(self): return self.n // 6
            def __call__(self, b):
                self.n += 1
                return mask(b, self.level)
        thing = Mask()
        # self.n, which Mask.__call__ keeps
    """,
    "an item of a data set": """
        class Data(Dataset):
            n = 0
            def __len__(self): return 9
            def __getitem__(self, i):
                self.n += 1
                return i + self.n
        thing = torch.utils.data.Subset(Data(), [1, 2])
        # self.n, which Data.__getitem__ keeps
    """,
    "a transform of a data set": """
        class Grow:
            n = 0
            def __call__(self, x):
                self.n += 1
                return x * self.n
        class Data(Dataset):
            def __init__(self): self.transforms = [str, Grow()]
            def __getitem__(self, i): return i
        thing = Data()
        # self.n, which Grow.__call__ keeps
    """,
    "a global count": """
        n = 0
        def thing(b):
            global n
            n += 1
            return mask(b, n)
        # n, which thing keeps
    """,
    "a count of the function itself": """
        def thing(b):
            thing.n += 1
            return mask(b, thing.n)
        # thing.n, which thing keeps
    """,
    "a count in a closure": """
        def make():
            n = 0
            def collate(b):
                nonlocal n
                n += 1
                return mask(b, n)
            return collate
        thing = make()
        # n, which collate keeps
    """,
    "a count in a dict of the module": """
        state = {"n": 0}
        def thing(b):
            state["n"] += 1
            return mask(b, state["n"])
        # state, which thing keeps
    """,
    "a lambda and a partial function": """
        class Mask:
            n = 0
            def __call__(self, b, k):
                self.n += k
                return mask(b, self.n)
        masker = Mask()
        thing = lambda b: functools.partial(masker, k=2)(b)
        # self.n, which Mask.__call__ keeps
    """,
    "a method of another object": """
        class Mask:
            n = 0
            def apply(self, b):
                self.n += 1
                return mask(b, self.n)
        class Collator:
            def __init__(self): self.masker = Mask()
            def __call__(self, b): return self.masker.apply(b)
        thing = Collator()
        # self.n, which Mask.apply keeps
    """,
    "a bound method": """
        class Mask:
            n = 0
            def collate(self, b):
                self.n += 1
                return mask(b, self.n)
        thing = Mask().collate
        # self.n, which Mask.collate keeps
    """,
    "the batch before": """
        class Mix:
            last = None
            def __call__(self, b):
                before, self.last = self.last, b
                mixed = b if before is None else b + before
                self.last = b
                return mixed
        thing = Mix()
        # self.last, which Mix.__call__ keeps
    """,
    "the rest of a packed batch": """
        class Pack:
            def __init__(self): self.buffer = []
            def __call__(self, b):
                self.buffer.extend(b)
                out = self.buffer[:8]
                self.buffer = self.buffer[8:]
                return out
        thing = Pack()
        # self.buffer, which Pack.__call__ keeps
    """,
    "a count for each index": """
        class Data(Dataset):
            def __init__(self): self.reads = [0] * 9
            def __getitem__(self, i):
                if isinstance(self.reads[i], int):
                    self.reads[i] = self.reads[i] + 1
                return i, self.reads[i]
        thing = Data()
        # self.reads, which Data.__getitem__ keeps
    """,
    "a few counts for each index": """
        class Data(Dataset):
            def __init__(self): self.reads, self.full = [0] * 9, [False] * 9
            def __getitem__(self, i):
                if not self.full[i]:
                    self.reads[i] = self.reads[i] + 1
                    self.full[i] = self.reads[i] > 4
                return i, self.reads[i]
        thing = Data()
        # self.reads, which Data.__getitem__ keeps
    """,
    "an item of the newest images": """
        class Data(Dataset):
            def __init__(self): self.images, self.newest = [None] * 9, []
            def __getitem__(self, i):
                if self.images[i] is None:
                    self.images[i] = load(i)
                    self.newest.append(i)
                return self.images[i], self.newest[0]
        thing = Data()
        # self.newest, which Data.__getitem__ keeps
    """,
    "a queue": """
        class Pack:
            def __init__(self): self.buffer = []
            def __call__(self, b):
                self.buffer.append(b)
                return self.buffer[-2:]
        thing = Pack()
        # self.buffer, which Pack.__call__ keeps
    """,
    "an iterator": """
        class Names(Dataset):
            def __init__(self): self.numbers = itertools.count()
            def __getitem__(self, i): return i, next(self.numbers)
        thing = Names()
        # self.numbers, which Names.__getitem__ keeps
    """,
}
LEFT_ALONE = {
    "attributes of the samples, which no name holds": """
        def thing(b):
            b[0].y = torch.stack([x.x for x in b])
            first = b[0].y
            b[0].y = first + 1
            return b[0]
    """,
    "a table that each call moves to the device of its samples": """
        class Noise:
            table = torch.ones(4)
            def __call__(self, b):
                self.table = self.table.to(device=b[0].device)
                return torch.stack(b) * self.table
        thing = Noise()
    """,
    "a count for prints": """
        class Mask:
            n = 0
            def __call__(self, b):
                self.n += 1
                if self.n % 100 == 0:
                    print("batch", self.n)
                return mask(b)
        thing = Mask()
    """,
    "a count of errors": """
        class Data(Dataset):
            errors = 0
            def __getitem__(self, i):
                try:
                    return load(i)
                except OSError:
                    self.errors += 1
                    if self.errors > 10:
                        raise
                    return load(i + 1)
        thing = Data()
    """,
    "a cache": """
        class Data(Dataset):
            def __init__(self): self.cache, self.hits = {}, 0
            def __getitem__(self, i):
                if i not in self.cache:
                    self.cache[i] = load(i)
                else:
                    self.hits += 1
                return self.cache[i]
        thing = Data()
    """,
    "a cache of limited size": """
        class Data(Dataset):
            def __init__(self): self.cache, self.order, self.size = {}, [], 0
            def __getitem__(self, i):
                if i not in self.cache:
                    self.cache[i] = load(i)
                    self.order.append(i)
                    self.size += 1
                    if self.size > 100:
                        del self.cache[self.order.pop(0)]
                        self.size -= 1
                    if len(self.order) > 100:
                        self.cache = {}
                return self.cache[i]
        thing = Data()
    """,
    "the newest part of a file": """
        class Data(Dataset):
            part, data = -1, None
            def __getitem__(self, i):
                if self.part != i // 1000:
                    self.data = load(i // 1000)
                self.part = i // 1000
                return self.data[i % 1000]
        thing = Data()
    """,
    "a file that is opened once": """
        class Data(Dataset):
            file = None
            def __getitem__(self, i):
                if self.file is None:
                    self.file = open(i)
                self.file.seek(i)
                return self.file.read(4)
        thing = Data()
    """,
    "a sum of each call": """
        class Pad:
            def __call__(self, b):
                self.total = 0
                for x in b:
                    self.total += len(x)
                self._begin()
                for x in b:
                    self._add(x)
                return self.total, self.longest
            def _begin(self): self.longest = 0
            def _add(self, x): self.longest = max(self.longest, len(x))
        thing = Pad()
    """,
    "local sums": """
        def thing(b):
            total, parts = 0, []
            for x in b:
                total += len(x)
                parts.append(x)
                parts[0] = parts[0] + 1
            rest = iter(parts)
            return next(rest), parts, total
    """,
    "what an epoch sets": """
        class Data(Dataset):
            epoch = 0
            def set_epoch(self, epoch): self.epoch = epoch
            def advance(self): self.epoch += 1
            def __getitem__(self, i): return i, self.epoch
        thing = Data()
    """,
    "an index that is cut": """
        class Data(Dataset):
            def __init__(self, of): self.of = of
            def __getitem__(self, i):
                x = torch.tensor(self.of[i])
                x[0] = 0
                x.mul_(2)
                return x
        thing = Data([[1.0]] * 9)
    """,
    "a timer": """
        class Data(Dataset):
            seconds, times = 0.0, []
            def __getitem__(self, i):
                x = load(i)
                self.seconds += 0.1
                self.times.append(0.1)
                return x
        thing = Data()
    """,
    "a part that shows no attributes": """
        class Closed:
            def __getattribute__(self, name):
                if name == "__dict__": raise RuntimeError(name)
                return object.__getattribute__(self, name)
        class Data(Dataset):
            def __init__(self): self.part = Closed()
            def __getitem__(self, i): return self.part.of(i)
        thing = Data()
    """,
    "an item that is decoded once": """
        class Data(Dataset):
            def __init__(self): self.items, self.is_decoded = list("abc"), [False] * 3
            def __getitem__(self, i):
                if not self.is_decoded[i]:
                    self.items[i] = mask(self.items[i])
                    self.is_decoded[i] = True
                return self.items[i]
        thing = Data()
    """,
    "an item that is decoded once, by a set of the decoded": """
        class Data(Dataset):
            def __init__(self): self.items, self.decoded = list("abc"), set()
            def __getitem__(self, i):
                if i not in self.decoded:
                    self.items[i] = mask(self.items[i])
                    self.decoded.add(i)
                return self.items[i]
        thing = Data()
    """,
    "a path that is replaced by its image": """
        class Data(Dataset):
            def __init__(self): self.items = list("abc")
            def __getitem__(self, i):
                if isinstance(self.items[i], str):
                    self.items[i] = load(self.items[i])
                return self.items[i]
        thing = Data()
    """,
    "images in lists, of which the newest are kept": """
        class Data(Dataset):
            def __init__(self): self.images, self.sizes, self.newest = [None] * 9, [None] * 9, []
            def image(self, i):
                image = self.images[i]
                if image is None:
                    image = load(i)
                    self.images[i], self.sizes[i] = image, len(image)
                    self.newest.append(i)
                    if 1 < len(self.newest) >= 4:
                        j = self.newest.pop(0)
                        self.images[j], self.sizes[j] = None, None
                    return image, len(image)
                return self.images[i], self.sizes[i]
            def __getitem__(self, i): return self.image(i)
        thing = Data()
    """,
    "a library's collator": """
        thing = default_collate
    """,
}


def thing_of(text, tmp_path):
    """Run a script, and return what it calls ``thing``."""
    path = tmp_path / "script.py"
    path.write_text(BASE + textwrap.dedent(text))
    linecache.checkcache(str(path))
    names = {"__name__": "script"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names["thing"]


@pytest.mark.parametrize("text", KEPT.values(), ids=KEPT)
def test_what_a_result_takes_from_earlier_calls_is_named(text, tmp_path):
    expected = text.rpartition("# ")[2].strip()
    kept = kept_by_calls([thing_of(text, tmp_path)])
    assert kept.startswith(expected)
    assert "(script.py:" in kept


@pytest.mark.parametrize("text", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_changes_no_result_is_left_alone(text, tmp_path):
    assert kept_by_calls([thing_of(text, tmp_path)]) == ""


class Masker:
    """A collate function with a memory."""

    def __init__(self):
        self.calls = 0

    def __call__(self, samples):
        self.calls += 1
        return torch.stack(samples) * min(self.calls, 9)


def test_the_first_call_of_steps_refuses_a_collate_function_with_a_memory(monkeypatch):
    monkeypatch.setenv("FABRIC_DISABLE", "1")
    model = torch.nn.Linear(2, 1)
    session = fabric.client.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sizes = {"global_batch_size": 4, "micro_batch_size": 2}
    data = session.loader(torch.arange(8.0).view(4, 2), **sizes, collate_fn=Masker())
    sentence = r"the data depend on self.calls, which Masker.__call__ keeps from call to call \(test_kept_by"
    with pytest.raises(ConfigError, match=sentence):
        next(session.steps(data, until=2))
    assert session.committed_step == 0
