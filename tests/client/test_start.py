"""A trainer's start: its incarnation and its first messages."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from forked_processes import TORCH, run_python, run_with_torch
from long_runs import first_here

from fabric.client.attach import attach
from fabric.client.loop import shutdown, start
from fabric.client.process.incarnation_lock import ProcessIdentity, claim, claim_above
from fabric.model import DataPlan
from fabric.runtime import driver
from fabric.runtime.config import Settings

CLAIM = """
import json, sys
from pathlib import Path
from fabric.client.process.incarnation_lock import claim
print(json.dumps(claim(Path(sys.argv[1]))))
"""


def claimed_elsewhere(home):
    """Return the incarnations that another process, now ended, got from the lock file."""
    said = run_with_torch("-c", CLAIM, str(home))
    incarnation, before = json.loads(said.stdout)
    return incarnation, tuple(before)


def test_a_host_names_the_processes_that_ran_on_it_and_no_others(tmp_path):
    """r0 ran twice on host A and moved to host B, where it lives; then it is started on A once more."""
    a, b = tmp_path / "hostA", tmp_path / "hostB"
    first, before = claimed_elsewhere(a)
    assert before == ()
    second, before = claimed_elsewhere(a)
    assert before == (first,)
    alive, before = claim(b)
    assert before == () and alive > second
    newest, before = claimed_elsewhere(a)
    assert before == (second, first) and newest > alive


def test_the_lock_file_of_an_older_version_names_its_newest_process(tmp_path):
    (tmp_path / "trainer.lock").write_bytes(b"7000\n".ljust(24))
    incarnation, before = claim(tmp_path)
    assert before == (7000,) and incarnation > 7000


def test_the_lock_file_remembers_a_bounded_number_of_processes(tmp_path):
    (tmp_path / "trainer.lock").write_bytes(b"".join(f"{n}\n".encode().ljust(32) for n in range(90, 60, -1)))
    _, before = claim(tmp_path)
    assert before == tuple(range(90, 74, -1))


def test_the_next_process_claims_an_incarnation_above_the_one_that_a_lighthouse_named(tmp_path):
    own, _ = claim(tmp_path)
    named = own + 86_400_000
    claim_above(named)
    newest, before = claim(tmp_path)
    assert newest > named and before == (own,), "nobody here saw the named process end"


def test_a_damaged_note_of_an_incarnation_is_passed_over(tmp_path):
    (tmp_path / "claim_above").write_text("not a number")
    incarnation, _ = claim(tmp_path)
    assert incarnation > 0


def test_a_member_begins_by_the_clock_that_its_driver_has(monkeypatch):
    assert start.seconds_since_boot is driver.seconds_since_boot
    monkeypatch.setattr(start, "seconds_since_boot", lambda: 5e6)
    begun = []
    engine = SimpleNamespace(listen=lambda bind, ports: 1, begin=begun.append)
    handle = SimpleNamespace(url="http://a", sizes=(), held_by=lambda ranks: ())
    durable = SimpleNamespace(find=lambda: ())
    parts = SimpleNamespace(
        settings=Settings(job="job", replica="r0"),
        process=ProcessIdentity(9, (8, 7)),
        exchange=SimpleNamespace(retain=True, lanes=None),
        gradients=SimpleNamespace(layout="", described=(), nbytes=0),
        plane=SimpleNamespace(kind=""),
        handle=handle,
        durable=durable,
    )
    start.begin(engine, parts, start.TrainingSetup(DataPlan(1), "", ""))
    (member,) = begun
    assert member.session.contact.last == 5e6 and member.context.identity.predecessors == (8, 7)


UNGUARDED = """
import multiprocessing
import sys
import pytest
import torch
import fabric.client

model = torch.nn.Linear(2, 1)
fabric.client.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
if multiprocessing.parent_process() is None:
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=print)
    worker.start()
    worker.join()
    print("worker ended with", worker.exitcode)
"""


@pytest.mark.parametrize("method", first_here("client/test_start.py", ["spawn", "forkserver"]))
def test_a_script_without_a_main_guard_is_told_of_it_by_its_worker(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("FABRIC_")}
    variables = {**plain, "FABRIC_DISABLE": "1"}
    done = run_python(str(script), method, imports=TORCH, environment=variables)
    assert done.stdout == "worker ended with 1\n"
    assert 'put the training of the script below `if __name__ == "__main__":`' in done.stderr


def test_a_second_training_of_one_process_in_an_ended_job_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(shutdown, "_ended", set())
    parts = SimpleNamespace(
        handle=SimpleNamespace(finish=lambda *_: None, close=lambda: None),
        journal=SimpleNamespace(close=lambda: None),
        durable=SimpleNamespace(await_last=lambda _: None),
    )
    named = {"job": "folds", "lighthouse": ("http://127.0.0.1:9",)}
    ended = SimpleNamespace(
        _debug_endpoint=SimpleNamespace(close=lambda: None),
        _settings=SimpleNamespace(orphan_s=1.0, **named),
        _unheard=None,
        _parts=parts,
        _watch_no_more=lambda: None,
    )
    shutdown.Shutdown.end(ended, finished=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SystemExit) as end:
        attach(model, optimizer, replica="r0", replicas="1", **named)
    assert end.value.code == 1
    assert "trains a second time in job folds, which has ended" in capsys.readouterr().err
