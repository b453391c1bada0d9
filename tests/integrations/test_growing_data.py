"""With --adopt, a data set that grows in a loop is refused before the first step, by its source."""

import contextlib
import sys
from types import SimpleNamespace

import pytest

from fabric.errors import ConfigError
from fabric.integrations.adopt.adopted_data import refuse_other_data

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
