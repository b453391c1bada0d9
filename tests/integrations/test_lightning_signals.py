"""In a Trainer SIGTERM is a notice to the session, unless the script has a handler of its own."""

import signal

import pytest

pytest.importorskip("pytorch_lightning")
from pytorch_lightning import Trainer
from test_lightning_refusals import DATA, Net
from torch.utils.data import DataLoader

from fabric.integrations.lightning import FabricStrategy

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}


class Attached(Exception):
    """The training has begun: it joins its job."""


@pytest.fixture
def found(monkeypatch, tmp_path):
    """Fit until the job is joined; return a function that returns SIGTERM's handler at that moment."""
    handlers = []

    def attach(*_, **__):
        handlers.append(signal.getsignal(signal.SIGTERM))
        raise Attached

    def fit():
        trainer = Trainer(strategy=FabricStrategy(), accelerator="cpu", enable_checkpointing=False, **QUIET)
        with pytest.raises(Attached):
            trainer.fit(Net(), DataLoader(DATA, batch_size=2))
        return handlers[-1]

    monkeypatch.setattr("fabric.client.attach", attach)
    monkeypatch.setenv("FABRIC_LIGHTHOUSE", "http://127.0.0.1:9")
    monkeypatch.setenv("FABRIC_REPLICA", "r0")
    monkeypatch.setenv("FABRIC_REPLICAS", "3")
    monkeypatch.setenv("FABRIC_RUN_DIR", str(tmp_path / "run"))
    before = signal.getsignal(signal.SIGTERM)
    yield fit
    signal.signal(signal.SIGTERM, before)


def test_the_session_takes_sigterm_in_place_of_lightnings_handler(found):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert found() is signal.SIG_DFL


def test_a_handler_of_the_script_is_still_called(found):
    called = []

    def handle(number, _):
        called.append(number)

    signal.signal(signal.SIGTERM, handle)
    found()(signal.SIGTERM, None)
    assert called == [signal.SIGTERM]
