"""Runs an example of a framework (TEST_EXAMPLE) as it is, and notes in TEST_NOTES what its Trainer logs.

``TEST_PLAIN=1`` runs the example with the framework's own class: its one changed line taken back.
"""

import json
import os
import sys
import time
import types
from pathlib import Path

import transformers.trainer
from job import EXAMPLES
from transformers import TrainerCallback

CHANGED = {
    "transformers_trainer": (
        "from fabric.integrations.transformers import FabricTrainer as Trainer\n",
        "from transformers import Trainer\n",
    ),
}


def plain(name: str) -> str:
    """Return the example with the framework alone."""
    text = (EXAMPLES / f"{name}.py").read_text()
    with_fabric, without = CHANGED[name]
    assert text.count(with_fabric) == 1
    return text.replace(with_fabric, without)


class Notes(TrainerCallback):
    def on_log(self, args, state, control, logs, **_):
        note = {"step": state.global_step, "writes": state.is_world_process_zero, **logs}
        with Path(os.environ["TEST_NOTES"]).open("a") as file:
            file.write(json.dumps(note) + "\n")


class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == int(os.environ["TEST_RAISE_AT"]):
            raise RuntimeError("a callback that fails")


class Waits(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        while (
            state.global_step == int(os.environ["TEST_GATE_AT"])
            and not Path(os.environ["TEST_GATE"]).exists()
        ):
            time.sleep(0.01)


def main() -> None:
    transformers.trainer.DEFAULT_CALLBACKS.append(Notes)
    if "TEST_RAISE_AT" in os.environ:
        transformers.trainer.DEFAULT_CALLBACKS.append(Fails)
    if "TEST_GATE" in os.environ:
        transformers.trainer.DEFAULT_CALLBACKS.append(Waits)
    name = os.environ["TEST_EXAMPLE"]
    if "TEST_PLAIN" in os.environ:
        module = types.ModuleType(name)
        exec(compile(plain(name), name, "exec"), module.__dict__)
    else:
        __import__(name)
        module = sys.modules[name]
    module.main()
