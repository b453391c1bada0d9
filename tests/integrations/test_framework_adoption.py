"""``--adopt`` with the real frameworks, without services: which class takes over, and what is refused."""

import subprocess
import sys

import accelerate
import pytest
import torch
from test_framework_refusals import DATA, Tiny
from transformers import TrainingArguments
from transformers import trainer as trainer_module

from fabric.errors import ConfigError
from fabric.integrations.accelerate import FabricAccelerator
from fabric.integrations.adopt.adoption import run_adopted
from fabric.integrations.transformers import FabricTrainer


@pytest.fixture(autouse=True)
def replica(monkeypatch, tmp_path):
    """The environment of a replica whose lighthouse does not exist."""
    monkeypatch.setenv("FABRIC_LIGHTHOUSE", "http://127.0.0.1:9")
    monkeypatch.setenv("FABRIC_REPLICA", "r0")
    monkeypatch.setenv("FABRIC_REPLICAS", "3")
    monkeypatch.setenv("FABRIC_RUN_DIR", str(tmp_path / "run"))


def arguments(folder):
    return TrainingArguments(str(folder), report_to="none", use_cpu=True, max_steps=2)


def test_scripts_get_the_adapters_and_what_the_frameworks_make_of_each_other_stays(tmp_path, capsys):
    own, make, backward = trainer_module.Trainer, FabricTrainer.__init__, torch.autograd.backward
    made = []

    def script():
        made.append(trainer_module.Trainer(Tiny(), arguments(tmp_path), train_dataset=DATA))
        assert torch.autograd.backward is backward, "the plain loop's patches are gone"

    with pytest.raises(ConfigError, match="ended without a training by its FabricTrainer"):
        run_adopted(script)
    assert isinstance(made[0], FabricTrainer) and type(made[0].accelerator) is accelerate.Accelerator
    assert trainer_module.Trainer is own and FabricTrainer.__init__ is make, "nothing stays replaced"
    sentence = "adopted the script's transformers.Trainer as FabricTrainer; gradients and updates outside"
    assert capsys.readouterr().err.count(sentence) == 1


def test_a_script_that_imports_the_frameworks_gets_the_adapters(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from transformers import Seq2SeqTrainer, Trainer\n"
        "from accelerate import Accelerator\n"
        "class Own(Trainer):\n"
        "    pass\n"
        "for kind in (Own, Seq2SeqTrainer, Accelerator):\n"
        "    print(*(x.__name__ for x in kind.__mro__ if x.__module__.startswith('fabric.')))\n"
        "import transformers.trainer\n"
        "print(transformers.trainer.Accelerator.__mro__[1].__name__)\n"
    )
    command = [sys.executable, "-m", "fabric", "run", "--adopt", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["FabricTrainer", "FabricTrainer", "FabricAccelerator", "object"]
    assert done.returncode == 1 and "has ended without an optimizer step" in done.stderr


@pytest.mark.parametrize(
    ("ours", "script"),
    [
        ("FabricTrainer", lambda folder: FabricTrainer(Tiny(), arguments(folder))),
        ("FabricAccelerator", lambda folder: FabricAccelerator()),
    ],
)
def test_a_script_that_makes_an_adapter_is_refused(tmp_path, ours, script):
    with pytest.raises(ConfigError, match=f"makes a {ours} already: run it without --adopt"):
        run_adopted(lambda: script(tmp_path))


def test_two_models_are_refused_by_the_adapter():
    def script():
        accelerate.Accelerator().prepare(Tiny(), Tiny())

    with pytest.raises(ConfigError, match="prepares two models"):
        run_adopted(script)


def test_an_optimizer_with_a_closure_is_refused_by_the_adapter():
    def script():
        model = Tiny()
        optimizer = accelerate.Accelerator().prepare(torch.optim.SGD(model.parameters(), 0.1))
        optimizer.step(lambda: None)

    with pytest.raises(Exception, match=r"optimizer.step got a closure"):
        run_adopted(script)


def test_a_second_training_is_refused(monkeypatch, tmp_path):
    attached = []
    monkeypatch.setattr("fabric.client.attach", lambda *_, **__: attached.append(1) or _stop())

    def script():
        for folder in ("first", "second"):
            trainer = trainer_module.Trainer(Tiny(), arguments(tmp_path / folder), train_dataset=DATA)
            try:
                trainer.train()
            except _Attached:
                continue

    with pytest.raises(ConfigError, match="trains a second time in one process, and a job is one training"):
        run_adopted(script)
    assert attached == [1]


class _Attached(Exception):
    pass


def _stop():
    raise _Attached
