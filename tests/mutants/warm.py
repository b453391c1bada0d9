"""Imports once, before any process is forked, all that the tests which notice the mutants need."""

import gc
import importlib
import sys
from pathlib import Path

import conftest  # noqa: F401
import pytest_asyncio  # noqa: F401
import torch._dynamo  # noqa: F401  (a second of the first optimizer of a process)
from mutants.protocol_rules import RULES
from mutants.shells import SHELLS

TESTS = Path(__file__).parents[1]

for file in sorted(
    {TESTS / x.noticed_by.partition("::")[0] for x in (*RULES, *SHELLS) if "::" in x.noticed_by}
):
    sys.path.insert(0, str(file.parent))
    importlib.import_module(file.stem)  # pytest uses the same name

gc.freeze()  # so that no collection in a child copies the memory of these objects
