"""A table accounts for every argument and overridable method; the rest is refused as unknown."""

import importlib
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pytorch_lightning")

from refusal_pages import refusals

from fabric.errors import ConfigError
from fabric.integrations.arguments import (
    ArgumentTable,
    Row,
    overridable,
    overridden,
    rows_of,
)


class Framework:
    def __init__(self, rate=0.1, seed=0, path=None, fancy=None, new=False):
        self.rate = rate

    def fit(self):
        return self._loop()

    def _loop(self):
        return 0

    @property
    def device(self):
        return "cpu"

    level = 3


@dataclass
class Options:
    names: list = field(default_factory=list)
    rate: float = 0.1
    made: int = field(default=0, init=False)


TABLE = ArgumentTable(
    "Framework",
    "FabricTrainer",
    """
    rate | kept | recipe rates
    seed | refused | each replica would draw other numbers: leave it out
    path | idle | it names a folder
    fancy | refused | it moves the weights: leave it out
    """,
    {"seed": lambda seed: seed == 7},
    methods="""
    fit | kept | recipe rates
    _loop | refused | fabric has a loop of its own: override fit
    """,
)


def test_kept_and_default_values_are_accepted():
    TABLE.check(Framework, {"rate": 3, "path": "x", "seed": 0, "fancy": None, "new": False})
    TABLE.check(Framework, {"seed": 7})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seed": 3}, r"FabricTrainer refuses Framework\(seed=3\), because each replica would draw other"),
        ({"fancy": np.zeros(3)}, r"refuses Framework\(fancy=array\("),
        ({"fancy": "x" * 90}, r"refuses Framework\(fancy=<str>\), because it moves the weights"),
        ({"new": True}, r"FabricTrainer does not know Framework\(new=True\), an argument of a newer release"),
        ({"gone": 1}, r"does not know Framework\(gone=1\)"),
    ],
)
def test_refused_and_unknown_values_are_refused_in_a_sentence(given, words):
    with pytest.raises(ConfigError, match=words):
        TABLE.check(Framework, given)


def test_an_argument_of_a_new_release_is_noticed():
    assert TABLE.unknown(Framework) == ["new"]
    assert TABLE.unknown(Options) == ["names"], "a dataclass has fields, and one that is not given"
    TABLE.check(Options, {"names": [], "rate": 2.0})


def test_methods_and_properties_may_be_overridden_and_other_attributes_are_no_methods():
    assert overridable(Framework) == ["_loop", "device", "fit"]


def test_an_overridden_method_is_looked_up_by_the_class_that_replaces_it():
    class Mixin:
        def fit(self):
            return 1

        level = 4

        def other(self):
            return 1

    class Mine(Mixin, Framework):
        def __init__(self):
            super().__init__()

    assert overridden(Framework, Mine) == {"fit": Mixin}
    TABLE.check_methods(Framework, Mine)

    class Deep(Mine):
        def _loop(self):
            return 2

    with pytest.raises(
        ConfigError, match=r"FabricTrainer refuses Deep._loop, because fabric has a loop of its"
    ):
        TABLE.check_methods(Framework, Deep)

    class Placed(Framework):
        @property
        def device(self):
            return "cuda"

    with pytest.raises(
        ConfigError, match=r"does not know what Placed.device changes, which replaces that of"
    ):
        TABLE.check_methods(Framework, Placed)


def test_a_row_of_text_may_have_several_names_and_lines():
    rows = rows_of(
        """
        rate warmup
            decay | kept | recipe rates
        seed | refused | each replica would draw other
            numbers: leave it out
        path | idle | it names a folder
        """,
        {"seed": lambda seed: seed == 7},
    )
    assert [rows.pop(x) for x in ("rate", "warmup", "decay")] == [Row("kept", "recipe rates")] * 3
    assert rows.pop("path") == Row("idle", "it names a folder")
    seed = rows.pop("seed")
    assert seed.words == "each replica would draw other numbers: leave it out" and not rows
    assert seed.accepts(7) and not seed.accepts(8)


def test_a_page_has_each_refusal_once_and_no_other_name():
    rows = TABLE.rows | {"folder": Row("idle", "it names a folder"), "also": TABLE.rows["fancy"]}
    assert refusals({"Framework": rows, "nothing": {}}).splitlines() == [
        "| of | refused | because, and instead |",
        "|---|---|---|",
        "| Framework | `seed` | each replica would draw other numbers: leave it out |",
        "|  | `also`, `fancy` | it moves the weights: leave it out |",
    ]


TESTS = Path(__file__).parent.parent
SOURCES = [x.read_text() for x in TESTS.glob("**/test_*.py")]


def shown(name, where):
    """Whether the test that a row names exists, or its recipe, in which the argument occurs."""
    kind, _, recipe = where.partition("recipe ")
    if kind:
        return any(f"def {where}(" in x for x in SOURCES)
    path = TESTS / "conformance" / "recipes" / f"{recipe}.py"
    return path.exists() and re.search(rf"\b{name}\b", path.read_text()) is not None


def rows_in(value):
    """Yield the rows of all tables in a value of a module, also of those in tuples and dictionaries."""
    if isinstance(value, ArgumentTable):
        yield from (*value.rows.items(), *value.methods.items())
    elif isinstance(value, dict):
        yield from (x for x in value.items() if isinstance(x[1], Row))
    if isinstance(value, dict | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from rows_in(part)


def kept(*modules):
    """Yield the name and the test of each kept row of the tables of these modules."""
    for module in modules:
        for value in vars(importlib.import_module(module)).values():
            yield from ((name, x.words) for name, x in rows_in(value) if x.kind == "kept")


HOME = "fabric.integrations"
KEPT = sorted(
    {
        *kept(f"{HOME}.huggingface.arguments", f"{HOME}.huggingface.trl", f"{HOME}.lightning.arguments"),
        *kept(f"{HOME}.accelerate.arguments", f"{HOME}.training_data"),
    }
)


def test_a_test_or_a_recipe_shows_what_is_kept():
    assert [row for row in KEPT if not shown(*row)] == []


def test_the_tables_of_hooks_and_handlers_are_among_those_that_need_a_test():
    assert {"on_fit_start", "LambdaCallback", "interval", "GradScalerKwargs", "num_steps"} <= {
        name for name, _ in KEPT
    }
