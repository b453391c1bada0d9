"""The states of callbacks, averages and hooks as shared state: a replica that joins has those of the job."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("pytorch_lightning")
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging

from fabric.integrations.lightning import arguments
from fabric.integrations.lightning.run_files import CallbackStates, RunFiles, averaged_models, hook_states


def states(*callbacks):
    trainer = SimpleNamespace(callbacks=list(callbacks), loggers=[])
    return CallbackStates(trainer, RunFiles(trainer))


class Counting(Callback):
    """A user's callback with a state."""

    count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def stopping():
    changed = EarlyStopping("loss", patience=3)
    changed.wait_count, changed.best_score = 2, torch.tensor(0.5)
    return changed, EarlyStopping("loss", patience=3)


def counting():
    changed = Counting()
    changed.count = 7
    return changed, Counting()


def averaging():
    changed = WeightAveraging()
    changed._latest_update_step = 5
    return changed, WeightAveraging()


def checkpoint():
    changed, fresh = (ModelCheckpoint(dirpath=f"/tmp/{x}", monitor="loss", save_top_k=2) for x in ("a", "b"))
    changed.best_k_models = {"/tmp/a/one.ckpt": torch.tensor(0.5), "/tmp/a/two.ckpt": torch.tensor(0.7)}
    changed.best_model_path, changed.kth_best_model_path = "/tmp/a/one.ckpt", "/tmp/a/two.ckpt"
    changed.best_model_score = changed.current_score = torch.tensor(0.5)
    changed.kth_value = torch.tensor(0.7)
    return changed, fresh


CASES = {
    "EarlyStopping": stopping,
    "Callback": counting,
    "WeightAveraging": averaging,
    "ModelCheckpoint": checkpoint,
}
ALIKE = {
    "Checkpoint": "Callback",
    "EMAWeightAveraging": "WeightAveraging",
}  # whose states another's case shows


@pytest.mark.parametrize("name", CASES)
def test_a_callback_that_has_loaded_a_state_has_it(name):
    changed, fresh = CASES[name]()
    assert states(fresh).state_dict() != states(changed).state_dict()
    states(fresh).load_state_dict(states(changed).state_dict())
    assert states(fresh).state_dict() == states(changed).state_dict()


def test_each_shipped_callback_that_is_kept_and_has_a_state_has_a_case():
    shipped = {
        name: getattr(arguments._pl.callbacks, name)
        for name in arguments.CALLBACKS
        if name not in ("SpikeDetection", "SaveConfigCallback")
    }
    kept = {name for name, row in arguments.CALLBACKS.items() if row.kind == "kept"}
    stateful = {
        name for name in kept if "state_dict" in {x for y in shipped[name].__mro__[:-2] for x in vars(y)}
    }
    assert stateful <= {*CASES, *ALIKE}


def test_a_checkpoint_callback_has_its_paths_in_its_own_folder():
    changed, fresh = checkpoint()
    states(fresh).load_state_dict(states(changed).state_dict())
    assert fresh.best_model_path == "/tmp/b/one.ckpt" and fresh.dirpath == "/tmp/b"
    assert list(fresh.best_k_models) == ["/tmp/b/one.ckpt", "/tmp/b/two.ckpt"]


def test_the_model_of_an_average_is_shared_state():
    callback = WeightAveraging()
    callback._average_model = torch.nn.Linear(1, 1)
    assert averaged_models(SimpleNamespace(callbacks=[Counting(), callback])) == {
        "average 1": callback._average_model
    }


class Keeping(LightningModule):
    stage = 0

    def on_save_checkpoint(self, checkpoint):
        checkpoint["stage"] = self.stage

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["state_dict"] == {} and checkpoint["global_step"] == 0
        self.stage = checkpoint["stage"]


class Data(LightningDataModule):
    def state_dict(self):
        return {"place": 3}


def test_what_hooks_save_is_shared_state():
    trainer, module = Trainer(accelerator="cpu", logger=False), Keeping()
    trainer.strategy._lightning_module, trainer.datamodule = module, Data()
    found = hook_states(trainer)
    assert found["data module"].state_dict() == {"place": 3}
    module.stage = 4
    saved = found["module hooks"].state_dict()
    module.stage = 0
    found["module hooks"].load_state_dict(saved)
    assert saved == {"stage": 4} and module.stage == 4


def test_modules_without_hooks_of_their_own_add_nothing():
    trainer = Trainer(accelerator="cpu", logger=False)
    trainer.strategy._lightning_module, trainer.datamodule = LightningModule(), LightningDataModule()
    assert hook_states(trainer) == {}
