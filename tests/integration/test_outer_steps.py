"""LocalSGD, DiLoCo and streaming DiLoCo as whole jobs: replicas die, come back, join and leave.

After every outer step all replicas have the same global parameters and outer optimizer state, bit by bit.
"""

import json
import os
import signal
import urllib.request

import outer_trainer
import pytest
import torch
from job import Job
from long_runs import first_here
from test_failures import finals
from test_ways_in import run

from fabric.audit.journal import read_run
from fabric.audit.summary import judge
from fabric.runtime.config import Settings

BATCH = outer_trainer.BATCH
STEPS = 12
DILOCO = {"every": 4}
STREAMING = {"every": 6, "fragments": 2, "delay": 1, "alpha": 0.5}


def environment(outer: dict | None, **more: str) -> dict[str, str]:
    chosen = {"OUTER": json.dumps(outer)} if outer is not None else {}
    return {
        "TEST_TRAINER": "outer_trainer",
        "TINY_STEPS": str(STEPS),
        "TINY_PATIENT_STEPS": "12",
        **chosen,
        **more,
    }


def said(job: Job, replica: str, word: str) -> dict[int, str]:
    """Return the values of the lines ``WORD NUMBER: VALUE`` of one replica."""
    lines = (job.folder / f"{replica}.log").read_text().splitlines()
    parts = [line.removeprefix(f"{word} ").partition(": ") for line in lines if line.startswith(f"{word} ")]
    return {int(number): value for number, _, value in parts}


def check(job: Job, steps: int = STEPS) -> None:
    """All commits in order and once, and equal digests of the shared state after every outer step."""
    assert [e["step"] for e in job.events("r0", "commit")] == list(range(steps))
    taken: dict[int, set[str]] = {}
    for replica in job.pids:
        for event in job.events(replica, "state"):
            taken.setdefault(event["step"], set()).add(event["digest"])
    assert all(len(digests) == 1 for digests in taken.values())
    assert {s for s in range(steps) if s in taken} == set(range(steps)), "a step has no digest"


def finish_and_check(job: Job) -> None:
    job.finish()
    assert set(job.codes.values()) == {0}, job.logs()
    assert len(set(finals(job).values())) == 1
    check(job)
    verdict = judge(read_run(job.folder))
    assert not verdict.broken, "\n".join(verdict.broken[:10])
    assert (verdict.summary.steps_lost, verdict.summary.samples_repeated) == (0, 0)


@pytest.mark.parametrize(
    ("outer", "unequal"),
    [(None, "0"), (DILOCO, "0"), (STREAMING, "0"), (STREAMING, "1")],
    ids=["local_sgd", "diloco", "streaming", "streaming_unequal"],
)
def test_a_job_without_failures_computes_what_a_plain_loop_computes(zygote, tmp_path, outer, unequal):
    variables = environment(outer, FABRIC_UNEQUAL=unequal)
    with Job(zygote, tmp_path, replicas=2, environment=variables) as job:
        job.start_all()
        finish_and_check(job)
        ours = said(job, "r0", "global")
        losses = {step: float(value) for step, value in said(job, "r0", "loss").items()}
        assert said(job, "r1", "global") == ours
        assert all(said(job, "r1", "local")[step] != x for step, x in said(job, "r0", "local").items())
    plain = PlainLoop(outer or {"every": 4, "lr": 1.0})
    plain.run()
    assert ours == plain.globals
    assert losses == pytest.approx(plain.losses, rel=1e-12)


class PlainLoop:
    """DiLoCo of two replicas in one process, without fabric."""

    def __init__(self, outer: dict) -> None:
        self.fragments, self.delay = outer.get("fragments", 1), outer.get("delay", 0)
        self.alpha, self.span = outer.get("alpha", 0.0), outer["every"] // self.fragments
        settings = [Settings(replica=f"r{i}", replicas="2") for i in range(2)]
        self.samplers = [outer_trainer.make_sampler(outer, 2, x) for x in settings]
        self.models = [outer_trainer.make_model() for _ in range(2)]
        self.inners = [outer_trainer.make_inner(x) for x in self.models]
        self.shared = outer_trainer.make_model()
        sgd = torch.optim.SGD(self.shared.parameters(), lr=outer.get("lr", 0.7))
        self.optimizer = sgd if "lr" in outer else outer_trainer.make_outer(self.shared)
        self.globals: dict[int, str] = {}
        self.losses: dict[int, float] = {}

    def triples(self, step: int) -> list[tuple[torch.nn.Parameter, ...]]:
        """The global parameters of the fragment of ``step``, each with its two local ones."""
        triples = zip(self.shared.parameters(), *(x.parameters() for x in self.models), strict=True)
        # Of the four tensors (128, 16, 32, 2 elements) the first has more than half of the model.
        owners = [0, 1, 1, 1] if self.fragments == 2 else [0, 0, 0, 0]
        return [x for x, owner in zip(triples, owners, strict=True) if owner == step % self.fragments]

    def inner_step(self, step: int, number: int) -> None:
        for sampler, model, inner in zip(self.samplers, self.models, self.inners, strict=True):
            loss = outer_trainer.loss_of(model, sampler.indices(step)[number * BATCH : (number + 1) * BATCH])
            self.losses[step + 1] = self.losses.get(step + 1, 0.0) + loss.item()
            loss.backward()
            inner.step()
            inner.zero_grad()

    @torch.no_grad()
    def outer_step(self, step: int) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        for shared, *both in self.triples(step):
            for local in both:
                local.copy_(torch.lerp(local, shared, 1 - self.alpha))
        self.globals[step + 1] = outer_trainer.name_of(self.shared.parameters())

    @torch.no_grad()
    def run(self) -> None:
        for step in range(STEPS):
            for number in range(self.span):
                if self.delay and number == self.delay and step:
                    self.outer_step(step - 1)
                with torch.enable_grad():
                    self.inner_step(step, number)
            for shared, first, second in self.triples(step):
                shared.grad = ((shared - first) + (shared - second)) / 2
            if not self.delay:
                self.outer_step(step)
        if self.delay:
            self.outer_step(STEPS - 1)


@pytest.mark.parametrize(
    ("outer", "death"),
    first_here(
        "client/test_outer_loop.py",
        [
            (None, {"OUTER_KILL": "4 2"}),
            (DILOCO, {"points": "ring@4=kill"}),
            (STREAMING, {"OUTER_KILL": "4 0"}),
            (STREAMING, {"points": "barrier@4=kill"}),
        ],
    ),
    ids=["local_sgd", "diloco", "streaming in an inner step", "streaming in the barrier"],
)
def test_a_killed_replica_comes_back_at_the_global_parameters(zygote, tmp_path, outer, death):
    with Job(zygote, tmp_path, replicas=2, environment=environment(outer)) as job:
        job.start("r0")
        job.start("r1", **death)
        finish_and_check(job)
        assert job.starts == {"r0": 1, "r1": 2}, job.logs()
        back = [e["step"] for e in job.events("r1", "commit") if e["contributed"] and e["step"] > 4]
        assert back, f"the killed replica never contributed again\n{job.logs()}"
        begun = max(said(job, "r1", "begins"))
        assert begun > 4
        assert said(job, "r1", "begins")[begun] == said(job, "r0", "global")[begun]


def test_pseudo_gradients_in_fewer_bytes_leave_equal_states_after_a_kill(zygote, tmp_path):
    tcp = environment(STREAMING, FABRIC_EXCHANGE="int8", FABRIC_DATA_PLANE="tcp")
    with Job(zygote, tmp_path, replicas=2, environment=tcp) as job:
        job.start("r0")
        job.start("r1", points="ring@4=kill")
        finish_and_check(job)
        assert job.starts == {"r0": 1, "r1": 2}, job.logs()
    plain = PlainLoop(STREAMING)
    plain.run()
    before = {step: value for step, value in said(job, "r0", "global").items() if step <= 2}
    assert before and before != {step: plain.globals[step] for step in before}, "fewer bytes leave other bits"


@pytest.mark.parametrize("point", first_here("client/test_outer_loop.py", ["ring", "after-barrier"]))
def test_a_stopped_replica_is_evicted_and_comes_back_in_the_same_process(zygote, tmp_path, point):
    with Job(zygote, tmp_path, replicas=3, environment=environment(STREAMING)) as job:
        job.start_all({"r1": f"{point}@4=stop"})
        epochs = lambda: job.events("r0", "epoch")  # noqa: E731
        job.wait_for(lambda: any("r1" not in e["roster"] for e in epochs()), "the eviction of r1")
        os.kill(job.pids["r1"], signal.SIGCONT)
        finish_and_check(job)
        assert job.starts == {"r0": 1, "r1": 1, "r2": 1}
        assert [e for e in job.events("r1", "commit") if e["contributed"] and e["step"] > 5]


def test_the_example_survives_a_kill_and_a_join(zygote, tmp_path):
    run(zygote, tmp_path, "diloco", steps=40, EXAMPLE_PAUSE_S="0.03")


def test_an_exchange_that_fails_is_repeated_with_the_same_pseudo_gradients(zygote, tmp_path):
    """r2 dies in the ring of step 4: the others count their own contributions once, in one commit."""
    with Job(zygote, tmp_path, replicas=3, environment=environment(STREAMING)) as job:
        job.start_all({"r2": "ring@4=kill"})
        finish_and_check(job)
        assert [e["step"] for e in job.events("r0", "abort")] == [4], job.logs()
        [commit] = [e for e in job.events("r0", "commit") if e["step"] == 4]
        assert sorted(x for x, ids in commit["contributions"].items() if ids) == ["r0", "r1"]
        assert commit["weight"] == 2
        lines = (job.folder / "r0.log").read_text().splitlines()
        assert len([x for x in lines if x.startswith("inner 4 ")]) == 3, "inner steps were repeated"


def test_inner_steps_go_on_while_a_fragment_is_exchanged(zygote, tmp_path):
    slow = {"every": 10, "fragments": 2, "delay": 4}
    with Job(zygote, tmp_path, replicas=2, environment=environment(slow)) as job:
        gate = job.folder / "gate"
        job.start("r0", f"before-ring@2=wait:{gate}")
        job.start("r1")
        log = job.folder / "r0.log"
        # The exchange of step 2 waits at the gate, and the loop makes its four inner steps of delay.
        job.wait_for(lambda: "inner 3 3\n" in log.read_text(), "inner steps during the exchange")
        assert [e["step"] for e in job.events("r0", "commit")] == [0, 1]
        gate.touch()
        finish_and_check(job)


def test_a_third_replica_joins_and_leaves_again(zygote, tmp_path):
    hurry = tmp_path / "hurry"
    more = {"TINY_STEPS": "80", "OUTER_OWN_DATA": "1", "OUTER_HURRY": str(hurry)}
    # Until the third replica has joined the others pause, so that it catches up on a busy machine too.
    more |= {"TINY_REPLICAS": "3", "TINY_STEP_S": "0.1"}
    with Job(zygote, tmp_path, replicas=2, environment=environment(STREAMING, **more)) as job:
        job.start("r0")
        job.start("r1")
        job.wait_for(lambda: len(job.events("r0", "commit")) > 2, "two outer steps")
        job.start("r2")

        def contributes() -> bool:
            return any(e["contributed"] for e in job.events("r2", "commit"))

        job.wait_for(contributes, "the third replica's contribution")
        body = json.dumps({"replica": "r2", "who": "a test", "why": "a test"}).encode()
        headers = {"Authorization": f"Bearer {job.token.read_text().strip()}"}
        headers["Content-Type"] = "application/json"
        order = urllib.request.Request(f"{job.url}/v1/jobs/test/drain", body, headers)
        with urllib.request.urlopen(order, timeout=30):
            pass
        job.wait_for(lambda: job.ended("r2") is not None, "the leave of r2")
        hurry.touch()
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
        assert not (aborts := job.events("r0", "abort")), f"the join or the leave stopped it: {aborts}"
        assert job.events("r0", "commit")[-1]["members"] == ["r0", "r1"], job.logs()
        check(job, 80)
        begun = max(said(job, "r2", "begins"))
        assert said(job, "r2", "begins")[begun] == said(job, "r0", "global")[begun]
