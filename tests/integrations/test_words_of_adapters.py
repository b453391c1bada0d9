"""A user of an adapter reads its framework's words, also in the sentence of the job that ends a process."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("pytorch_lightning")
from fabric.client.data import loader, sample_plan
from fabric.client.loop import unshared_objects
from fabric.client.loop.shutdown import Shutdown
from fabric.integrations.accelerate import replica
from fabric.integrations.adopt import adopted_loop
from fabric.integrations.huggingface import job
from fabric.integrations.lightning.job import _WORDS
from fabric.protocol.leader import job_endings
from fabric.protocol.member import ending
from fabric.protocol.rules import compatibility

ALL = (_WORDS, replica._WORDS, adopted_loop._WORDS, job._WORDS)


def test_each_replaced_word_is_one_of_a_sentence():
    modules = (job_endings, ending, compatibility, loader, sample_plan)
    sources = [Path(x.__file__).read_text() for x in modules]
    sources += [unshared_objects.ADVICE, unshared_objects.MORE_OPTIMIZERS]
    lines = " ".join(" ".join(sources).replace('"\n', "").split())
    sentences = lines.replace(' f"', "").replace(' "', "")
    for words in ALL:
        assert [x for x in words if x not in sentences] == []


def test_what_is_said_instead_names_nothing_of_a_session():
    assert not [x for words in ALL for x in words.values() if "session" in x]


def test_a_process_ends_with_the_words_of_its_adapter():
    ended = []
    parts = SimpleNamespace(journal=SimpleNamespace(write=lambda *_, **named: ended.append(named["reason"])))
    shutdown = SimpleNamespace(
        words=dict(_WORDS),
        end=lambda finished: None,
        _process=SimpleNamespace(rank=0),
        _engine=SimpleNamespace(close=lambda: None),
        _say=ended.append,
        _parts=parts,
    )
    with pytest.raises(SystemExit):
        Shutdown.leave(
            shutdown, f"the job is complete at step 9, and this loop ended at step 5: {ending._ADVICE}", 1
        )
    assert len(set(ended)) == 1 and "session" not in ended[0]
    assert "this Trainer stopped at step 5: let Trainer.should_stop follow a figure" in ended[0]
