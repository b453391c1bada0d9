"""A user's mistake leads to one sentence that says what to do, exit code 1 and no half-applied step, and the
other replicas finish.
"""

import http.server
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from corrupting_proxy import CorruptingProxy
from forked_processes import run_python
from job import SHORT_CONTACT, Job
from test_failures import finals, finish_and_check

HERE = Path(__file__).parent


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def odd(what: str, **more: str) -> dict[str, str]:
    return {"TEST_TRAINER": "odd_trainer", "ODD": what, **more}


def sentence(job: Job, replica: str) -> str:
    """Check a trainer's output: one line for the user, and no traceback."""
    said = job.said(replica)
    lines = said.splitlines()
    assert len(lines) == 1 and lines[0].startswith("fabric: "), said
    return lines[0]


def refused(job: Job, replica: str = "r0", **environment: str) -> str:
    """Start one trainer that must end with exit code 1; return its sentence."""
    job.starts.pop(
        replica, None
    )  # each is a launcher's first start: a restarted process waits for a lighthouse
    job.start(replica, **{"FABRIC_JOURNAL": "", **environment})
    job.wait_for(lambda: job.ended(replica) is not None, f"the end of {replica}")
    assert job.ended(replica) == 1, job.logs()
    return sentence(job, replica)


def forget(job: Job, replica: str) -> None:
    """Forget a replica that has ended as expected, so that ``finish`` ignores it."""
    job.pids.pop(replica)


@pytest.fixture(scope="module")
def idle(zygote, tmp_path_factory):
    """A lighthouse whose jobs never start, shared by the tests."""
    with Job(zygote, tmp_path_factory.mktemp("idle"), replicas=1) as job:
        yield job


@pytest.fixture(autouse=True)
def fresh_log(request):
    if "idle" in request.fixturenames:
        job = request.getfixturevalue("idle")
        (job.folder / "r0.log").unlink(missing_ok=True)


def leaves_nothing(job: Job) -> None:
    """Check that no checkpoint server outlives a process that never joined the job."""
    job.wait_for(lambda: not job.server_pids(), "the end of the checkpoint server")


# --- settings ---------------------------------------------------------------------------------------

SETTINGS = [
    ({"FABRIC_LIGHTHOUSE": ""}, "no lighthouse is named: set FABRIC_LIGHTHOUSE"),
    ({"FABRIC_LIGHTHOUSE": "localhost:8600"}, "give URLs such as http://host:port"),
    ({"FABRIC_REPLICAS": "0"}, 'FABRIC_REPLICAS is "0": give a count'),
    ({"FABRIC_REPLICAS": "3:2"}, "the first number must not exceed the second"),
    ({"FABRIC_REPLICA": ""}, 'FABRIC_REPLICA is "": give a name'),
    ({"FABRIC_REPLICA": "../r0"}, "give a name of 1 to 64 letters"),
    ({"FABRIC_JOB": "a/b"}, 'FABRIC_JOB is "a/b": give a name'),
    ({"FABRIC_EXCHANGE_S": "soon"}, 'FABRIC_EXCHANGE_S is "soon"'),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 and torch.distributed is not initialized"),
    ({"FABRIC_BIND": "192.0.2.1"}, "bind to an address of this machine"),
    ({"FABRIC_BIND": "127.0.0.1:many"}, 'FABRIC_BIND is "127.0.0.1:many": give an address'),
    ({"FABRIC_DISABLE": "maybe"}, 'FABRIC_DISABLE is "maybe": it must be 1'),
    ({"FABRIC_TOKEN_FILE": "{folder}/no-such-token"}, "cannot be read (No such file or directory)"),
    ({"FABRIC_TOKEN_FILE": "{folder}/empty"}, "is empty: write the job's token into it"),
    ({"FABRIC_TOKEN_FILE": "{folder}/binary"}, "must hold one line"),
    ({"FABRIC_JOURNAL": "/proc/no/journal"}, "the journal /proc/no/journal cannot be written"),
    ({"FABRIC_RUN_DIR": "{folder}/token"}, "cannot be used (File exists): name one of this user"),
    ({"FABRIC_RUN_DIR": "/proc/no"}, "the folder /proc/no cannot be used"),
]


def refused_together(job: Job, starts: dict[str, dict[str, str]]) -> dict[str, str]:
    """Start one trainer for each mistake, all at once; each must end with code 1. Return the sentences."""
    for name, environment in starts.items():
        job.start(name, **{"FABRIC_REPLICA": "r0", "FABRIC_JOURNAL": "", **environment})
    job.wait_for(lambda: all(job.ended(name) is not None for name in starts), "the end of all trainers")
    assert {name: job.ended(name) for name in starts} == dict.fromkeys(starts, 1), job.logs()
    return {name: sentence(job, name) for name in starts}


def unexpected(said: dict[str, str], expected: list[str]) -> list[str]:
    """Return the sentences that lack what is expected of them."""
    return [line for line, words in zip(said.values(), expected, strict=True) if words not in line]


def test_each_setting_that_cannot_be_is_refused(idle):
    (idle.folder / "empty").write_text("\n")
    (idle.folder / "binary").write_bytes(b"\xff\x00\xfe\n")
    starts = {
        f"setting{number}": {name: value.format(folder=idle.folder) for name, value in environment.items()}
        for number, (environment, _) in enumerate(SETTINGS)
    }
    said = refused_together(idle, starts)
    assert unexpected(said, [words for _, words in SETTINGS]) == []
    leaves_nothing(idle)


def test_a_port_that_is_taken(idle):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port} on 127.0.0.1 is taken by another process" in refused(
            idle, FABRIC_BIND=f"127.0.0.1:{port}"
        )
    leaves_nothing(idle)


def test_a_wrong_lighthouse_address(idle):
    url = f"http://127.0.0.1:{closed_port()}"
    said = refused(idle, FABRIC_LIGHTHOUSE=url, **SHORT_CONTACT)
    assert f"no lighthouse was found within 1 s ({url} cannot be reached" in said
    assert "check FABRIC_LIGHTHOUSE" in said
    leaves_nothing(idle)


@contextmanager
def another_service():
    """An HTTP server in place of a lighthouse."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_address_where_something_else_answers(idle):
    with another_service() as url:
        said = refused(idle, FABRIC_LIGHTHOUSE=url, **SHORT_CONTACT)
    assert f"{url} is not a lighthouse: check FABRIC_LIGHTHOUSE" in said
    leaves_nothing(idle)


@pytest.mark.parametrize("given", ["another-token", None])
def test_a_token_that_does_not_match(idle, given):
    path = idle.folder / "another"
    path.write_text("another-token\n")
    path.chmod(0o600)
    said = refused(idle, FABRIC_TOKEN_FILE=str(path) if given else "")
    assert "refused the token: give FABRIC_TOKEN_FILE the job's token" in said
    assert "a-test-token" not in said and "another-token" not in said
    leaves_nothing(idle)


# --- what is given to attach and to the session -------------------------------------------------------

ARGUMENTS = {
    "a state with a function": "scheduler.schedule.rule is a builtins.function and cannot be serialised",
    "a state without state_dict": "without state_dict and load_state_dict: give an object that has both",
    "a state named model": 'state has the name "model", which is taken',
    "batch norm": "forward changes the buffer '1.running_mean' differently on every replica",
    "another word for buffers": 'buffers is \'averaged\': it must be "average", "first" or "ignore"',
    "an unknown setting": "unknown setting lighthouses: known are adapt, advertise,",
    "no gradients": "the model has no parameter that requires a gradient",
    "sizes that do not divide": "global_batch_size 24 must be a multiple of micro_batch_size 5",
    "no micro-batch": "must be a multiple of micro_batch_size 0",
    "no data": "the data set is empty",
    "a scheduler outside the state": "a LambdaLR steers the optimizer and is not in state=, so a",
    "another word for unshared": 'unshared is "warn": it must be "refuse" or "ignore"',
    "a negative step": "step is -1: give the number of optimizer steps",
    "ddp of a plain model": "wrapped in DistributedDataParallel, and this is a Sequential: wrap it",
}


def test_each_argument_that_cannot_be_is_refused(idle):
    # Each trainer has a replica of its own, because several get as far as their run folder.
    starts = {f"argument{n}": odd(what, FABRIC_REPLICA=f"a{n}") for n, what in enumerate(ARGUMENTS)}
    assert unexpected(refused_together(idle, starts), list(ARGUMENTS.values())) == []
    leaves_nothing(idle)


@pytest.mark.parametrize("what", ["sizes that do not divide", "the inner loop left early"])
def test_users_mistakes_are_named_with_fabric_disabled_too(idle, what):
    assert refused(idle, **odd(what, FABRIC_DISABLE="1"))


def test_buffers_may_stay_local(zygote, tmp_path):
    """BatchNorm's statistics differ between the replicas, and are outside of the shared state."""
    environment = odd("batch norm ignored", TINY_STEPS="15")
    with Job(zygote, tmp_path, replicas=2, environment=environment) as job:
        job.start_all()
        finish_and_check(job, 15)


def test_a_step_of_total_weight_0_has_no_update_and_is_reported(zygote, tmp_path):
    with Job(zygote, tmp_path, replicas=1, environment=odd("an empty step")) as job:
        job.start_all()
        job.finish()
        assert job.codes == {"r0": 0}, job.logs()
        said = job.said("r0")
        steps = [line for line in said.splitlines() if line.startswith("step ")]
        assert steps == [f"step {i} {i == 2} {i == 2}" for i in range(4)], said
        assert "r0: step 2 was committed with total weight 0, as no member had data" in said
        (told,) = job.told("empty step")
        assert told["why"] == "step 2 was committed with total weight 0: no member had data for it"
        assert [e["weight"] for e in job.events("r0", "commit")] == [1.0, 1.0, 0.0, 1.0]


# --- one wrong replica among right ones ---------------------------------------------------------------


@pytest.fixture(scope="module")
def waiting_pair(zygote, tmp_path_factory):
    """Two replicas that stand in a step while the tests start a third one, and then go on to their end."""
    environment = {"TINY_STEPS": "30", "TINY_STEP_S": "0.005"}
    with Job(zygote, tmp_path_factory.mktemp("pair"), replicas=2, environment=environment) as job:
        hold = job.folder / "go-on"
        job.start_all({"r0": f"forward@20=wait:{hold}"})
        job.wait_for(lambda: job.events("r1", "commit"), "the first step")
        yield job
        hold.touch()
        finish_and_check(job, 30)
        # All commits belong to one epoch: the job had no restart.
        assert {e["epoch"] for r in ("r0", "r1") for e in job.events(r, "commit")} == {1}
        assert job.starts["r0"] == job.starts["r1"] == 1


@pytest.fixture
def pair(waiting_pair):
    """The two replicas; the process that a test starts besides them is forgotten, and so is its log."""
    job, processes, servers = waiting_pair, dict(waiting_pair.pids), set(waiting_pair.server_pids())
    (job.folder / "r0.log").unlink(missing_ok=True)
    yield job
    (job.folder / "r2.log").unlink(missing_ok=True)
    job.pids, job.starts = processes, dict.fromkeys(processes, 1)
    assert all(job.ended(replica) is None for replica in processes), job.logs()
    job.wait_for(lambda: set(job.server_pids()) == servers, "the end of the third checkpoint server")


def test_a_joiner_with_another_model_shape(pair):
    said = refused(pair, "r2", TINY_WIDTH="32")
    assert re.search(r"r2 has other parameters \(names, shapes, dtypes or their order\) than r[01]", said)
    assert "(parameter 0 is 0.weight float32[32, 16] here, and 0.weight float32[64, 16] there)" in said


TENSORS = {
    "another dtype": "(parameter 3 is 3.bias float64[4] here, and 3.bias float32[4] there)",
    "another order": "(parameter 0 is 3.weight float32[4, 64] here, and 0.weight float32[64, 16] there)",
}


@pytest.mark.parametrize("what", TENSORS)
def test_a_joiner_whose_tensors_differ(pair, what):
    said = refused(pair, "r2", **odd(what))
    assert re.search(r"r2 has other parameters \(names, shapes, dtypes or their order\) than r[01]", said)
    assert TENSORS[what] in said
    # The other replicas go on, and the job's events show the refusal.
    assert any(e["about"] == "r2" and TENSORS[what] in e["why"] for e in pair.told("session refused"))


def test_a_joining_replica_that_exchanges_on_another_device_is_refused(pair):
    """A CPU member and a GPU member cannot reduce together, so the lighthouse refuses the session."""
    pair.start("r2", FABRIC_JOURNAL="", TEST_TRAINER="device_trainer")
    pair.wait_for(lambda: pair.ended("r2") is not None, "the end of r2")
    assert pair.ended("r2") == 1, pair.logs()
    lines = pair.said("r2").splitlines()
    assert lines[0] == "gradients on SimulatedDevice" and len(lines) == 2, lines
    assert re.search(
        r"^fabric: r2: .*r2 exchanges gradients on a GPU and r[01] in host memory: have the parameters",
        lines[1],
    ), lines


def test_a_joiner_with_another_data_configuration(pair):
    said = refused(pair, "r2", **odd("other sizes"))
    assert re.search(
        r"r2 has other data settings than r[01] \(micro_batch_size is 4 here and 2 there, ",
        said,
    )


def test_a_replica_id_taken_in_the_same_run_folder(pair):
    """The lock of the run folder refuses the second process; the first goes on."""
    assert "another living process has this replica id on this host" in refused(pair, "r0")


def test_a_replica_id_taken_from_another_folder(pair):
    """As from another host: the lighthouse refuses the second process; the first goes on."""
    other = str(pair.folder / "run" / "elsewhere")
    said = refused(pair, "r0", FABRIC_RUN_DIR=other)
    assert "replica id r0 is taken by a living process: give every replica its own FABRIC_REPLICA" in said
    pair.wait_for(lambda: len(pair.server_pids()) == 2, "the end of the refused one's checkpoint server")

    def are_seen() -> bool:
        seen = pair.status()
        found = seen["checkpoint_servers"]
        servers = {(x["replica"], x["ckpt"]): (x["trainer"], x["connected"]) for x in found}
        statuses = [x["trainer_status"] and x["trainer_status"]["trainer"] for x in seen["members"]]
        own = {(x["replica"], x["ckpt"]): ("running", True) for x in seen["members"]}
        return statuses == ["running", "running"] and servers == own

    pair.wait_for(are_seen, "the statuses of the living, and of nobody else")


def test_a_token_of_another_job(pair):
    path = pair.folder / "another"
    path.write_text("another-token\n")
    path.chmod(0o600)
    assert "refused the token" in refused(pair, "r2", FABRIC_TOKEN_FILE=str(path))


def test_a_joiner_whose_state_has_other_parts(zygote, tmp_path):
    """The replica's parameters fit, but the fetched state does not: the replica loads nothing and is not
    admitted.
    """
    environment = {"TINY_STEPS": "600", "TINY_STEP_S": "0.005"}
    with Job(zygote, tmp_path, replicas=2, environment=environment) as job:
        job.start_all()
        job.wait_for(lambda: job.events("r1", "commit"), "the first step")
        said = refused(job, "r2", **odd("a state without the scheduler"))
        assert re.search(r"r2: the state of step \d+ does not fit: ", said) and "scheduler" in said
        steps = len(job.events("r0", "commit"))
        job.wait_for(lambda: len(job.events("r0", "commit")) > steps + 5, "more steps")
        assert {e["epoch"] for r in ("r0", "r1") for e in job.events(r, "commit")} == {1}


# --- one of the replicas makes a mistake on its way -----------------------------------------------------

ON_THE_WAY = {
    "a parameter added": "the parameter late was added or unfrozen after the training began",
    "a parameter removed": "the parameter 3.bias was removed after the training began",
    "the inner loop left early": "the loop left step 5 before its micro-batches ended",
    "a step iterated twice": "is committed already: iterate each step once",
}


def all_fail(job: Job, why: str) -> None:
    """Check that r2 and the other replicas ended with code 1 and a reason, and that none committed the step
    of the mistake.
    """
    job.finish()
    assert job.codes == {"r0": 1, "r1": 1, "r2": 1}, job.logs()
    assert job.starts == {"r0": 1, "r1": 1, "r2": 1}
    for replica in ("r0", "r1"):
        said = sentence(job, replica)
        found = re.search(rf"^fabric: {replica}: r2 failed at step (\d+): .*{why}", said)
        assert found, said
        assert max((e["step"] for e in job.events(replica, "commit")), default=0) <= int(found[1])


@pytest.mark.parametrize("what", ON_THE_WAY)
def test_a_users_mistake_during_training_fails_the_job_with_a_sentence(zygote, tmp_path, what):
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "20", "TINY_STEP_S": "0.005"}) as job:
        for replica in ("r0", "r1"):
            job.start(replica)
        job.start("r2", **odd(what))
        all_fail(job, ON_THE_WAY[what])
        assert ON_THE_WAY[what] in sentence(job, "r2")


# Fabric searches for changed parameters only every few steps; the state's digest shows a change between.
BETWEEN = {
    "a parameter added between looks": "model has the entry 'late' here and the snapshot has not",
    "a parameter removed between looks": "model has no entry '3.bias' here and the snapshot has",
}


@pytest.mark.parametrize("what", BETWEEN)
def test_a_model_that_changes_between_looks_is_left_out(zygote, tmp_path, what):
    """The majority goes on; the evicted replica cannot load the majority's state, and ends."""
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "20", "TINY_STEP_S": "0.005"}) as job:
        hold = job.folder / "go-on"
        job.start("r0", f"forward@15=wait:{hold}")
        job.start("r1")
        job.start("r2", **odd(what))
        job.wait_for(lambda: job.ended("r2") is not None, "the end of r2")
        hold.touch()
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0, "r2": 1}, job.logs()
        # The replica says why it was evicted, and then why it ends.
        evicted, ended = job.said("r2").splitlines()
        assert evicted.startswith(
            "fabric: r2 waits: r2 disagrees with the majority about the state at step 6"
        )
        assert re.search(r"^fabric: r2: the state of step \d+ does not fit: ", ended)
        assert BETWEEN[what] in ended
        told = [e["why"] for e in job.told("evicting")]
        assert len(told) == 1
        assert told[0].startswith("r2 disagrees with the majority about the state at step 6")


def test_a_state_that_can_no_longer_be_serialised(zygote, tmp_path):
    with Job(zygote, tmp_path, replicas=1) as job:
        said = refused(job, **odd("a state with a function later"))
        assert "scheduler.schedule.rule is a builtins.function and cannot be serialised" in said


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("an average in forward", "average/mean changed while forward and backward ran"),
        (
            "an average in forward, by .data",
            "average/mean changed without torch's knowledge while forward and backward ran",
        ),
    ],
)
def test_shared_state_that_forward_changes(zygote, tmp_path, what, how):
    """Code that changes shared state outside the optimizer's step fails at the next digest, even without a
    snapshot.
    """
    with Job(zygote, tmp_path, replicas=1, environment={"FABRIC_SNAPSHOT_EVERY": "0%"}) as job:
        job.start("r0", **odd(what))
        job.finish()
        assert job.codes == {"r0": 1}, job.logs()
        said = sentence(job, "r0")
        assert how in said and "change it only where optimizer.step() is" in said
        assert [e["step"] for e in job.events("r0", "commit")] == list(range(5)), "nothing of that step"


def test_an_exception_in_the_users_loop(zygote, tmp_path):
    """A whole interpreter of its own, that must end in order: the user's traceback and exit code 1."""
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "20", "TINY_STEP_S": "0.005"}) as job:
        environment = job.trainer_environment("r2", **odd("an exception"))
        command = [sys.executable, str(HERE / "odd_trainer.py")]
        with (job.folder / "r2.log").open("wb") as log:
            r2 = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
        job.start("r0")
        job.start("r1")
        assert r2.wait(timeout=60) == 1, job.logs()
        job.finish()
        assert job.codes == {"r0": 1, "r1": 1}
        for replica in ("r0", "r1"):
            told = sentence(job, replica)
            assert "r2 failed at step 5: ValueError: the user's own mistake (at micro-batch " in told
        said = job.said("r2")
        assert said.startswith("Traceback") and said.endswith("ValueError: the user's own mistake\n"), said
        assert said.count("Traceback") == 1
        assert [e["step"] for e in job.events("r0", "commit")] == list(range(5))


def test_initial_states_that_differ(zygote, tmp_path):
    """The replicas have different initial weights, so all start from one replica's state."""
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "20", "TINY_STEP_S": "0.005"}) as job:
        for i in range(3):
            job.start(f"r{i}", TINY_SEED=str(i + 1))
        finish_and_check(job, 20)
        firsts = {f"r{i}": job.events(f"r{i}", "state")[0]["digest"] for i in range(3)}
        assert len(set(firsts.values())) == 3, "the initial states were meant to differ"
        # The state before the first commit is the same at all replicas.
        bases = {e["digest"] for i in range(3) for e in job.events(f"r{i}", "state") if e["step"] == 0}
        assert bases == set(firsts.values())


def test_a_corrupted_chunk(zygote, tmp_path):
    """One bit flips on the wire: the members redo the round, and no member is lost."""
    port = closed_port()
    tiny = {"TINY_STEPS": "20", "TINY_STEP_S": "0.005", "FABRIC_DATA_PLANE": "tcp"}
    with Job(zygote, tmp_path, environment=tiny) as job:
        proxy = CorruptingProxy(("127.0.0.2", port), ("127.0.0.1", port), at_least=1500)
        try:
            job.start("r0")
            job.start("r1", FABRIC_ADVERTISE="127.0.0.2", FABRIC_BIND=f"127.0.0.1:{port}")
            job.start("r2")
            finish_and_check(job, 20)
        finally:
            proxy.close()
        assert proxy.corrupted.is_set()
        aborts = [e for i in range(3) for e in job.events(f"r{i}", "abort")]
        assert any("digest" in e["why"] or "corrupt" in e["why"] for e in aborts), aborts
        assert job.starts == {"r0": 1, "r1": 1, "r2": 1}


# --- the commands ---------------------------------------------------------------------------------------


def fabric(*arguments: str, cwd: Path) -> tuple[int, str]:
    """Run the command line; returns exit code and standard error, which has no traceback."""
    done = run_python("-m", "fabric.cli.main", *arguments, cwd=str(cwd))
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    return done.returncode, done.stderr


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


DEAD_STORES = {
    "sqlite:///{folder}": "check that it is a file",
    "sqlite:///{folder}/no/such/folder/lighthouse.db": "",
    "sqlite:///{folder}/garbage.db": "",
    "etcd://127.0.0.1:{closed}": "127.0.0.1:{closed}",
    "postgres://somewhere": "",
}


@pytest.mark.parametrize("url", DEAD_STORES)
def test_a_dead_store(tmp_path, url):
    (tmp_path / "garbage.db").write_bytes(b"this is no database, " * 400)
    values = {"folder": str(tmp_path), "closed": str(closed_port())}
    code, said = fabric(
        "lighthouse", "--store", url.format(**values), "--limit", "store-wait-s=0.5", cwd=tmp_path
    )
    assert code == 1
    line = last_line(said)
    assert line.startswith("error: ") and DEAD_STORES[url].format(**values) in line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["garbage.db"], "something was made"
    assert (tmp_path / "garbage.db").read_bytes() == b"this is no database, " * 400


COMMANDS = [
    (("demo", "--replicas", "0"), 2, "--replicas must be between 1 and 64, not 0"),
    (("demo", "--steps", "0"), 2, "--steps must be between 1 and"),
    (("demo", "--kill-at", "500"), 2, "--kill-at must be between 1 and 119"),
    (("demo", "verify", "no-such-run"), 2, "no-such-run"),
    (
        ("lighthouse", "--store", "sqlite://{stores}/store.db", "--token-file", "empty"),
        1,
        "the token file empty is empty",
    ),
    (
        ("lighthouse", "--store", "sqlite://{stores}/store.db", "--bind", "0.0.0.0"),
        1,
        "without a token would serve anybody",
    ),
    (
        ("lighthouse", "--store", "sqlite://{stores}/store.db", "--bind", "127.0.0.1:many"),
        1,
        '--bind is "127.0.0.1:many": give an address',
    ),
    (("lighthouse",), 2, "Missing option '--store'"),
    (("status",), 1, "no lighthouse is named"),
    (("status", "--lighthouse", "http://127.0.0.1:{closed}"), 1, "nobody listens there"),
    (("status", "--lighthouse", "here"), 1, "is no URL"),
]


@pytest.mark.parametrize(("arguments", "code", "expected"), COMMANDS, ids=lambda v: str(v)[:60])
def test_a_command_that_cannot_be(tmp_path, tmp_path_factory, arguments, code, expected):
    (tmp_path / "empty").touch()
    stores = tmp_path_factory.mktemp("stores")
    words = [a.format(closed=closed_port(), stores=stores) for a in arguments]
    found, said = fabric(*words, cwd=tmp_path)
    assert found == code, said
    assert expected in " ".join(said.split())
    assert [p.name for p in tmp_path.iterdir()] == ["empty"], "something was made"


def test_status_with_a_wrong_token(idle, tmp_path):
    (tmp_path / "another").write_text("another-token\n")
    (tmp_path / "another").chmod(0o600)
    code, said = fabric("status", "--lighthouse", idle.url, "--token-file", "another", cwd=tmp_path)
    assert code == 1
    assert said.startswith("error: the lighthouse refused the token") and len(said.splitlines()) == 1


# --- without services, and loops of others ---------------------------------------------------------------


def losses(job: Job, replica: str) -> list[float]:
    lines = (job.folder / f"{replica}.log").read_text().splitlines()
    return [float(line.split()[2]) for line in lines if line.startswith("loss ")]


def test_a_script_with_fabric_disabled_computes_the_same(zygote, tmp_path):
    with Job(zygote, tmp_path, replicas=1) as job:
        job.start("r0", **odd("losses"))
        job.start("plain", **odd("losses", FABRIC_DISABLE="1"))
        job.finish()
        assert job.codes == {"r0": 0, "plain": 0}, job.logs()
        under, alone = losses(job, "r0"), losses(job, "plain")
        assert len(under) == len(alone) == 20
        assert alone == pytest.approx(under, rel=1e-5)
        assert not job.events("plain")


def exchanges(job: Job, replica: str) -> dict[int, tuple[float, int]]:
    """Return step -> (the average gradient, number of members), as one replica printed them."""
    found = {}
    for line in (job.folder / f"{replica}.log").read_text().splitlines():
        if line.startswith("exchange "):
            _, step, average, same, members = line.split()
            assert same == "True", line
            found[int(step)] = (float(average), int(members))
    return found


def test_exchange_averages_in_a_plain_loop(zygote, tmp_path):
    environment = odd("plain", TINY_STEPS="15", TINY_STEP_S="0.005")
    with Job(zygote, tmp_path, replicas=2, environment=environment) as job:
        job.start("r0", ODD_WEIGHT="1")
        job.start("r1", ODD_WEIGHT="3")
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0}, job.logs()
        assert len(set(finals(job).values())) == 1
        # r0's gradient is 1 with weight 1, r1's is 2 with weight 3.
        for replica in ("r0", "r1"):
            found = exchanges(job, replica)
            assert [a for a, _ in found.values()] == pytest.approx([(1 * 1 + 2 * 3) / 4] * 15)
            assert list(found) == list(range(15))


def test_exchange_survives_a_kill(zygote, tmp_path):
    environment = odd("plain", TINY_STEPS="25", TINY_STEP_S="0.005")
    with Job(zygote, tmp_path, replicas=2, environment=environment) as job:
        job.start("r0")
        job.start("r1", "before-ring@10=kill")
        job.wait_for(lambda: job.ended("r1") is not None, "the kill")
        forget(job, "r1")
        job.finish()
        assert job.codes == {"r0": 0}, job.logs()
        found = exchanges(job, "r0")
        assert list(found) == list(range(25))
        assert [found[s] for s in range(10)] == [(1.5, 2)] * 10
        # Fabric skips the dead replica's part, so the survivor's own gradient is the average.
        assert [found[s] for s in range(10, 25)] == [(1.0, 1)] * 15
