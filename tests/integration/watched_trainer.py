"""Runs an example of a framework (TEST_EXAMPLE) as it is, and notes in TEST_NOTES what a Trainer logs.

``TEST_PLAIN=1`` runs the example with the framework's own class: its one changed line taken back. The members
leave a replica that is away the time to come back, see ``pace``.
"""

import json
import os
import sys
import time
import types
from pathlib import Path

import transformers.trainer
from pace import waiting
from plain_examples import plain
from transformers import TrainerCallback

from fabric.integrations.training_data import StepFeed


class Notes(TrainerCallback):
    def on_init_end(self, args, state, control, **_):
        args.logging_steps = int(os.environ.get("TEST_LOG_EVERY", args.logging_steps))

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
    if "TEST_PATIENT" in os.environ:
        StepFeed.advance = waiting(StepFeed.advance)
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
