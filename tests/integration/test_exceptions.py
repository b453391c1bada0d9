"""The choices for an exception of the user's loop and for exchanges that fail in a row."""

import pytest
from job import Job
from test_data_policies import SHORT, environment, finish, poison_of

RESTART = {"FABRIC_ON_EXCEPTION": "restart"}


def test_an_exception_restarts_its_replica_alone(zygote, tmp_path):
    once = {"DATA_BAD": poison_of(8, 5), "DATA_BAD_ONCE": str(tmp_path / "met")}
    with Job(zygote, tmp_path, environment=environment(**once, **RESTART)) as job:
        job.start_all()
        summary = finish(job)
        assert sorted(job.starts.values()) == [1, 1, 2]
        again = next(r for r, n in job.starts.items() if n == 2)
        assert "this replica alone starts again after ValueError: this sample cannot" in job.said(again)
        assert job.events(again, "stop")[0]["code"] == 75
        assert (summary.samples_skipped, summary.samples_repeated) == (0, 0)


def test_an_exception_at_the_same_micro_batch_of_two_replicas_is_poison(zygote, tmp_path):
    given = environment(**SHORT, DATA_BAD=poison_of(2, 5), **RESTART)
    with Job(zygote, tmp_path, environment=given) as job:
        job.start_all()
        job.finish()
        assert job.codes == {"r0": 1, "r1": 1, "r2": 1}, job.logs()
        assert sorted(job.starts.values()) == [1, 2, 2], "two raised at it; started again, they were told"
        for replica in job.pids:
            sentence = [line for line in job.said(replica).splitlines() if line.startswith("fabric: ")][-1]
            assert "micro-batch 5 of step 2" in sentence


def test_poison_that_raises_can_be_skipped(zygote, tmp_path):
    given = environment(options={"on_poison": "skip"}, **SHORT, DATA_BAD=poison_of(2, 5), **RESTART)
    with Job(zygote, tmp_path, environment=given) as job:
        job.start_all()
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
        survivor = next(r for r, n in job.starts.items() if n == 1)
        [skipped] = [e["skipped"] for e in job.events(survivor, "commit") if e["step"] == 2]
        assert skipped == [5]


def test_the_same_exception_twice_outside_a_micro_batch_fails_the_job(zygote, tmp_path):
    given = {"TEST_TRAINER": "raising_trainer", "TINY_STEPS": "1000000", **RESTART}
    with Job(zygote, tmp_path, replicas=1, environment=given) as job:
        job.start("r0", RAISE_AT="5")
        job.wait_for(lambda: job.ended("r0") is not None, "the first end of r0")
        assert job.ended("r0") == 75, job.logs()
        job.start("r0", RAISE_AT="5")
        job.finish()
        assert job.codes == {"r0": 1}, job.logs()
        assert "the user's own mistake (twice at step " in job.status()["failed"]


@pytest.mark.parametrize(("kind", "code"), [("collective", 75), ("config", 1)])
def test_a_failed_collective_is_no_mistake_but_a_wrong_setting_is(zygote, tmp_path, kind, code):
    given = {"TEST_TRAINER": "raising_trainer", "TINY_STEPS": "1000000", **RESTART}
    with Job(zygote, tmp_path, replicas=1, environment=given) as job:
        job.start("r0", RAISE_AT="5", RAISE_KIND=kind)
        job.wait_for(lambda: job.ended("r0") is not None, "the end of r0")
        assert job.ended("r0") == code, job.logs()


def test_exchanges_that_fail_in_a_row_raise_in_the_loop(zygote, tmp_path):
    """Two replicas are needed, and r1 dies in the same step again and again, once r0 has contributed."""
    given = {"TEST_TRAINER": "raising_trainer", "TINY_STEPS": "100", "FABRIC_REPLICAS": "2:2"}
    with Job(zygote, tmp_path, replicas=2, environment=given) as job:
        job.start("r0", FABRIC_ON_ABORT="retry 2")
        for count in (1, 2):
            job.start("r1", f"before-ring=wait:{tmp_path / 'never'}")
            job.wait_for(
                lambda count=count: len(job.events("r0", "contribute")) == count,
                f"contribution {count} of r0",
            )
            job.kill("r1")
            job.wait_for(lambda: job.ended("r1") is not None, f"death {count} of r1")
        job.wait_for(lambda: job.ended("r0") is not None, "the end of r0")
        assert job.ended("r0") == 3, job.logs()
        assert "caught: 2 exchanges of step 0 failed in a row, the last because " in job.said("r0")
        job.start_all()
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0}, "new processes of both go on with the job"


def test_the_end_of_a_notebooks_cell_says_that_the_others_wait_and_how_to_end_it(zygote, tmp_path):
    """After a loop left by ``break`` the others waited for half an hour, and the notebook was silent."""
    pytest.importorskip("IPython")
    given = {"TEST_TRAINER": "notebook_trainer", "TINY_STEPS": "30", "FABRIC_USER_CODE_S": "1800"}
    with Job(zygote, tmp_path, replicas=2, environment=given) as job:
        job.start("r0", NOTEBOOK_CELL="pass")
        job.start("r1")
        job.wait_for(lambda: "the kernel goes on" in job.said("r0"), "the last cell of r0")
        said = job.said("r0")
        assert said.count("for FABRIC_USER_CODE_S (1800 s) at most") == 2, "at steps 5 and 10"
        job.kill("r0")
        job.wait_for(lambda: job.ended("r1") is not None, "the end of r1")
        assert job.ended("r1") == 0, "it went on alone, as the sentence says"


@pytest.mark.parametrize("cell", ["raise ValueError('a mistake')", "raise KeyboardInterrupt", "a b"])
def test_an_error_in_a_notebooks_cell_ends_its_replica_alone(zygote, tmp_path, cell):
    pytest.importorskip("IPython")
    given = {"TEST_TRAINER": "notebook_trainer", "TINY_STEPS": "30"}
    with Job(zygote, tmp_path, replicas=2, environment=given) as job:
        job.start("r0", NOTEBOOK_CELL=cell)
        job.start("r1")
        job.wait_for(lambda: job.ended("r1") is not None, "the end of r1")
        assert job.ended("r1") == 0, "it went on alone while the kernel of r0 lives"
        job.wait_for(lambda: "the kernel goes on" in job.said("r0"), "the last cell of r0")
        said = job.said("r0")
        assert said.count("an error in a cell ended this session, and other replicas go on") >= 2
        assert "SessionOver" in said, "the next cell that trains says so too"
