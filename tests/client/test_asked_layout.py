"""A script asks for its layout before it makes the model, and refuses one that it cannot build."""

import os

import pytest
from forked_processes import run_with_torch

ASK = """
import fabric.client
layout = fabric.client.layout()
if layout.tensor_parallel > 2:
    fabric.client.refuse_layout("its attention has two heads")
print(layout, layout.data_parallel, layout.stages)
"""
SESSION = """
import torch
import fabric.client
model = torch.nn.Linear(2, 2)
session = fabric.client.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
print(session.layout)
"""


@pytest.fixture
def run(monkeypatch):
    for name in [x for x in os.environ if x.startswith("FABRIC_")]:
        monkeypatch.delenv(name)
    return lambda script, **environment: run_with_torch("-c", script, FABRIC_DISABLE="1", **environment)


@pytest.mark.parametrize(
    ("environment", "code", "out", "err"),
    [
        ({}, 0, "ranks=1 1 1\n", ""),
        ({"WORLD_SIZE": "4", "FABRIC_LAYOUT": "tp=2"}, 0, "ranks=4,tp=2 2 1\n", ""),
        (
            {"WORLD_SIZE": "4", "FABRIC_LAYOUT": "ranks=4,tp=4"},
            78,
            "",
            "fabric: this script cannot build the layout ranks=4,tp=4: its attention has two heads\n",
        ),
        (
            {"WORLD_SIZE": "2", "FABRIC_LAYOUT": "4"},
            1,
            "",
            'fabric: FABRIC_LAYOUT is "ranks=4" and this replica has 2 ranks: start 4, or leave `ranks=` '
            "away\n",
        ),
    ],
)
def test_a_script_gets_its_layout_or_refuses_it(run, environment, code, out, err):
    done = run(ASK, **environment)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_a_session_has_the_same_layout(run):
    assert run(SESSION).stdout == "ranks=1\n"
    refused = run(SESSION, FABRIC_LAYOUT="tp=2")
    assert refused.returncode == 1 and "this replica has 1 ranks: give it a multiple of 2" in refused.stderr
