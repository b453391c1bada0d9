"""Collectives between replicas in whole jobs: right results, a death inside one, a newcomer, alone."""

import pytest
from job import Job
from rank_job import RankJob
from test_failures import finals

from fabric.audit.journal import read_run
from fabric.audit.summary import judge

STEPS = 30
DEATH = 8


def environment(**more: str) -> dict[str, str]:
    return {
        "TEST_TRAINER": "collectives_trainer",
        "TINY_STEPS": str(STEPS),
        "TINY_PATIENT_STEPS": "10",
        **more,
    }


def said(job: Job, replica: str, word: str) -> dict[int, str]:
    """Return the values of the lines ``WORD STEP: VALUE`` of one replica."""
    lines = (job.folder / f"{replica}.log").read_text().splitlines()
    parts = [line.removeprefix(f"{word} ").partition(": ") for line in lines if line.startswith(f"{word} ")]
    return {int(number): value for number, _, value in parts}


def check(job: Job) -> None:
    job.finish()
    assert set(job.codes.values()) == {0}, job.logs()
    assert len(set(finals(job).values())) == 1
    verdict = judge(read_run(job.folder))
    assert not verdict.broken, "\n".join(verdict.broken[:10])
    for replica in job.pids:
        names = said(job, replica, "names")
        for step, value in said(job, replica, "ones").items():
            # A result that a member lost may be that of more members than are left.
            assert value in (f"{x} {x}" for x in range(len(names[step].split()), job.replicas + 1))
        for step, value in said(job, replica, "mean").items():
            ours, theirs = value.split()
            assert float(ours) == pytest.approx(float(theirs), rel=1e-9), (replica, step)
    first = said(job, "r0", "loss")
    assert sorted(first) == list(range(STEPS))
    for replica in job.pids:
        common = {s: x for s, x in said(job, replica, "loss").items() if s in first}
        assert common == {s: first[s] for s in common}


def test_all_members_get_the_same_results_and_the_loss_of_the_job(zygote, tmp_path):
    with Job(zygote, tmp_path, replicas=3, environment=environment()) as job:
        job.start_all()
        check(job)
        for value in said(job, "r0", "loss").values():
            ours, _, metrics = value.partition(" of ")
            assert float(ours) == pytest.approx(float(metrics), rel=1e-9)
        assert set(said(job, "r1", "names").values()) == {"r0 r1 r2"}
        assert set(said(job, "r2", "ones").values()) == {"3 3"}


def test_a_death_inside_a_collective_ends_it_and_the_repeated_call_succeeds(zygote, tmp_path):
    with Job(zygote, tmp_path, replicas=3, environment=environment()) as job:
        job.start_all({"r2": f"collective@{DEATH + 1}=kill"})
        check(job)
        assert job.starts["r2"] == 2
        for replica in ("r0", "r1"):
            assert "failed CollectiveFailed: " in (job.folder / f"{replica}.log").read_text()
            assert said(job, replica, "names")[DEATH] == "r0 r1"
        back = [s for s, x in said(job, "r0", "names").items() if s > DEATH and x == "r0 r1 r2"]
        assert back, "the killed replica took part in no later collective"
        assert said(job, "r0", "loss") == said(job, "r1", "loss")


def test_alone_the_loop_is_the_same(zygote, tmp_path):
    with Job(
        zygote, tmp_path, replicas=1, environment=environment(FABRIC_DISABLE="1", TINY_PATIENT_STEPS="0")
    ) as job:
        job.start_all()
        job.finish()
        assert job.codes == {"r0": 0}, job.logs()
        assert said(job, "r0", "ones") == dict.fromkeys(range(STEPS), "1 1")
        assert set(said(job, "r0", "names").values()) == {"replica0"}
        for line in said(job, "r0", "mean").values():
            assert len(set(line.split())) == 1


@pytest.mark.parametrize("more", [{}, {"HSDP_HOOK": "1"}], ids=["mesh", "hook"])
def test_fsdp_averages_gradients_over_the_replicas(zygote, tmp_path, more):
    with Job(zygote, tmp_path, replicas=2, environment={"TEST_TRAINER": "hsdp_trainer", **more}) as job:
        job.start_all()
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0}, job.logs()
        assert said(job, "r0", "averaged") == said(job, "r1", "averaged") == dict.fromkeys(range(6), "2")


def test_each_rank_averages_with_the_equal_ranks_of_other_replicas(zygote, tmp_path):
    environment = {"TEST_TRAINER": "hsdp_trainer"}
    with RankJob(zygote, tmp_path, replicas=2, ranks=2, environment=environment) as job:
        job.start_all()
        job.finish()
        assert set(job.codes.values()) == {0}, job.logs()
        for name in ("r0.0", "r0.1", "r1.0", "r1.1"):
            assert said(job, name, "averaged") == dict.fromkeys(range(6), "2")
