"""Policies, streams, poison, averaged buffers, the sampler: real trainers that are killed and come back."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from job import Job
from long_runs import first_here
from test_failures import finals

from fabric.audit.journal import read_run
from fabric.audit.summary import judge

STEPS = 24


def environment(loop="map", options=None, **more):
    found = {"TEST_TRAINER": "data_trainer", "DATA": loop, "TINY_STEPS": str(STEPS)}
    found |= {"TINY_PATIENT_STEPS": "14", **more}
    return found | ({"DATA_OPTIONS": json.dumps(options)} if options else {})


def finish(job):
    """Check that all replicas finish with the same state, and that the journals are valid."""
    job.finish()
    assert job.codes == dict.fromkeys(job.pids, 0), job.logs()
    assert len(set(finals(job).values())) == 1
    verdict = judge(read_run(job.folder))
    assert not verdict.broken, "\n".join(verdict.broken[:10])
    assert verdict.summary.steps == STEPS
    return verdict.summary


def commits(job, replica):
    """Return step -> its last commit line."""
    return {e["step"]: e for e in job.events(replica, "commit")}


def joined_again(job, replica, after):
    return [e for e in job.events(replica, "commit") if e["contributed"] and e["step"] > after]


def report(job, replica):
    return json.loads(job.said(replica).splitlines()[-1])


def test_shrink_skips_the_share_of_the_dead_and_records_it(zygote, tmp_path):
    options = {"policy": "shrink", "scale_lr": True}
    with Job(zygote, tmp_path, environment=environment(options=options)) as job:
        job.start_all({"r1": "forward@8=kill"})
        summary = finish(job)
        assert joined_again(job, "r1", 8), "the killed replica never contributed again"
        found = commits(job, "r0")
        assert not found[7]["skipped"] and found[7]["weight"] == 24
        assert found[8]["skipped"] == [4, 5, 6, 7] and found[8]["weight"] == 16
        assert not found[STEPS - 1]["skipped"], "back on its seat it computes its share again"
        assert summary.samples_skipped == 2 * sum(len(e["skipped"]) for e in found.values())
        # Fabric removes the factor sqrt(present / all) from the learning rate after every step.
        assert {tuple(report(job, r)["lr"]) for r in ("r0", "r1", "r2")} == {tuple(report(job, "r0")["lr"])}


def test_a_stream_goes_on_where_the_job_is(zygote, tmp_path):
    with Job(zygote, tmp_path, environment=environment("stream")) as job:
        job.start_all({"r1": "forward@8=kill"})
        summary = finish(job)
        assert joined_again(job, "r1", 8)
        assert (summary.samples_skipped, summary.samples_repeated) == (0, 0)
        last = job.events("r1", "contribute")[-1]
        assert last["step"] == STEPS - 1
        for number, positions in last["samples"].items():
            first = (STEPS - 1) * 24 + 2 * int(number)
            assert positions == [first, first + 1]


@pytest.mark.parametrize(
    "point", first_here("integration/test_unequal.py", ["before-barrier@8=kill", "forward@8=kill"])
)
def test_buffers_are_averaged_and_equal_everywhere(zygote, tmp_path, point):
    """BatchNorm's statistics are part of the state: equal digests, through a kill and a join."""
    with Job(zygote, tmp_path, environment=environment("buffers")) as job:
        job.start_all({"r1": point})
        finish(job)
        assert joined_again(job, "r1", 8)
        found = [report(job, r)["buffers"] for r in ("r0", "r1", "r2")]
        assert found[0] == found[1] == found[2]
        # A step has twelve micro-batches, whichever members compute them.
        assert found[0]["1.num_batches_tracked"] == 12 * STEPS
        assert abs(found[0]["1.running_mean"]) > 0


def poison_of(step, micro_batch):
    from fabric.client.data.sample_plan import SamplePlan

    return str(SamplePlan(100, 24, 2, 3).samples(step, micro_batch)[0])


# The job ends at step 4, before the second pass over the data, in which sample indices repeat.
SHORT = {"TINY_STEPS": "4", "TINY_PATIENT_STEPS": "0"}


def test_a_poisoned_micro_batch_is_not_given_to_a_third_member_and_stops_the_job(zygote, tmp_path):
    index = poison_of(2, 5)
    with Job(zygote, tmp_path, environment=environment(**SHORT, DATA_POISON=index)) as job:
        job.start_all()
        job.finish()
        assert job.codes == {"r0": 1, "r1": 1, "r2": 1}, job.logs()
        assert sorted(job.starts.values()) == [1, 2, 2], "two died at it; started again, they were told"
        for replica in job.pids:
            sentence = [line for line in job.said(replica).splitlines() if line.startswith("fabric: ")][-1]
            assert "micro-batch 5 of step 2" in sentence and 'on_poison="skip"' in sentence
            assert f"samples {index}, " in sentence
        assert max(e["step"] for r in job.pids for e in job.events(r, "commit")) == 1


def test_a_poisoned_micro_batch_is_skipped_by_all_and_recorded(zygote, tmp_path):
    given = environment(options={"on_poison": "skip"}, **SHORT, DATA_POISON=poison_of(2, 5))
    with Job(zygote, tmp_path, environment=given) as job:
        job.start_all()
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
        verdict = judge(read_run(job.folder))
        assert not verdict.broken, "\n".join(verdict.broken[:10])
        assert verdict.summary.samples_skipped == 2
        survivor = next(r for r, n in job.starts.items() if n == 1)
        assert commits(job, survivor)[2]["skipped"] == [5]
        assert [e["micro_batches"] for e in job.events(survivor, "poison") if e["step"] == 2][-1] == [5]
        assert sorted(job.starts.values()) == [1, 2, 2]


@pytest.mark.long("sim/test_sharing.py")
def test_two_unrelated_deaths_do_not_poison_a_micro_batch(zygote, tmp_path):
    """Two replicas die in the same step at different micro-batches, and the third computes all
    micro-batches.
    """
    with Job(zygote, tmp_path, environment=environment()) as job:
        job.kill_together(8, ("r1", "r2"))
        summary = finish(job)
        assert (summary.samples_skipped, summary.samples_repeated) == (0, 0)


def assert_fabric_run_imports_no_torch(job: Job) -> None:
    """Run a script that would write a file, in an environment in which every import of torch fails."""
    (job.folder / "torch.py").write_text("raise SystemError('torch was imported')")
    script = job.folder / "train.py"
    script.write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    environ = {**os.environ, **job.trainer_environment("r0"), "PYTHONPATH": str(job.folder)}
    command = [sys.executable, "-m", "fabric", "run", str(script)]
    done = subprocess.run(command, env=environ, timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert re.match(
        r"fabric: r0: job test has failed: r\d failed at step 2: .*say `fabric retry", done.stderr
    )
    assert len(done.stderr.splitlines()) == 1 and not (job.folder / "ran").exists()


def test_an_exception_at_a_sample_fails_the_job_and_is_not_retried(zygote, tmp_path):
    index = poison_of(2, 5)
    with Job(zygote, tmp_path, environment=environment(**SHORT, DATA_BAD=index)) as job:
        job.start_all()
        job.finish()
        assert job.codes == {"r0": 1, "r1": 1, "r2": 1}, job.logs()
        assert job.starts == {"r0": 1, "r1": 1, "r2": 1}
        raised = [r for r in job.pids if "Traceback" in job.said(r)]
        assert len(raised) == 1
        for replica in set(job.pids) - set(raised):
            lines = job.said(replica).splitlines()
            assert len(lines) == 1 and lines[0].startswith(
                f"fabric: {replica}: {raised[0]} failed at step 2: "
            )
            assert f"ValueError: this sample cannot be decoded (at micro-batch 5, samples {index}" in lines[0]
        # `fabric run` refuses every restart of the failed job, without importing torch.
        for _ in range(2):
            job.start("r1", DATA_BAD="")
            job.wait_for(lambda: job.ended("r1") is not None, "the end of r1")
            assert job.ended("r1") == 1, job.logs()
        why = "; when that is mended say `fabric retry --job test --why ...` and start the replicas again"
        assert job.said("r1").count(why) == 2
        assert_fabric_run_imports_no_torch(job)
        # The operator runs `fabric retry` and starts the replicas again.
        retry = [sys.executable, "-m", "fabric", "retry", "--why", "the sample is mended"]
        environ = {**os.environ, **job.trainer_environment("r0")}
        subprocess.run(retry, env=environ, check=True, timeout=60, capture_output=True)
        job.codes.clear()
        for replica in list(job.pids):
            job.start(replica, DATA_BAD="")
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
        assert len(set(finals(job).values())) == 1


def test_with_two_readers_per_shard_one_death_skips_no_data(zygote, tmp_path):
    """Two of three replicas can read each part, so one death skips no data."""
    with Job(zygote, tmp_path, environment=environment(options={"redundancy": 2})) as job:
        job.start_all({"r1": "forward@8=kill"})
        summary = finish(job)
        assert joined_again(job, "r1", 8)
        assert (summary.samples_skipped, summary.samples_repeated) == (0, 0)
        taken = {
            (i // 34) for e in job.events("r0", "contribute") for ids in e["samples"].values() for i in ids
        }
        assert taken <= {0, 1}, "seat 0 reads its own third and the next one"


@pytest.mark.long("sim/test_sharing.py")
def test_seven_replicas_with_three_readers_per_shard_mask_three_deaths(zygote, tmp_path):
    """SPARe's layout with offsets 0, 1 and 3: three replicas die in mid-step, one after the other, and stay
    away. Every process can read only the shards of its loader.
    """
    options = {"redundancy": 3}
    given = environment("local", options, DATA_GLOBAL="28", DATA_MICRO="2", TINY_PATIENT_STEPS="0")
    points = {"r1": "forward@5=kill", "r2": "forward@10=kill", "r4": "forward@15=kill"}
    with Job(zygote, tmp_path, replicas=7, environment=given) as job:
        job.start_all(points)
        job.finish(restart=False)
        dead = {"r1", "r2", "r4"}
        assert {r for r, code in job.codes.items() if code} == dead, job.logs()
        verdict = judge(read_run(job.folder))
        assert set(verdict.broken) == {f"{replica} did not finish." for replica in dead}
        assert (verdict.summary.samples_skipped, verdict.summary.samples_repeated) == (0, 0)
        alive = [f"r{n}" for n in range(7) if f"r{n}" not in dead]
        digests = finals(job)
        assert len({digests[replica] for replica in alive}) == 1
        found = commits(job, "r0")
        # A shard has two micro-batches. At first each replica computes one shard; with three of seven
        # replicas away, the busiest computes two.
        assert {len(ids) for ids in found[4]["contributions"].values()} == {2}
        assert max(len(ids) for ids in found[STEPS - 1]["contributions"].values()) == 4
        for step in range(STEPS):
            ids = [i for part in found[step]["contributions"].values() for i in part]
            assert sorted(ids) == list(range(14)), f"step {step} counts every micro-batch once"
        assert report(job, "r0")["values"] == pytest.approx(undisturbed(7), rel=1e-4)


@pytest.mark.long("sim/test_sharing.py")
def test_a_rack_dies_and_no_shard_is_without_a_reader(zygote, tmp_path):
    """Four replicas in two racks, two readers per shard. By their numbers r0 and r1 would be the only readers
    of shard 1, and the job would wait for one of them."""
    given = environment("local", {"redundancy": 2}, DATA_MICRO="1", TINY_PATIENT_STEPS="0")
    with Job(zygote, tmp_path, replicas=4, environment=given) as job:
        for replica, rack, points in (
            ("r0", "a", "forward@8=kill"),
            ("r1", "a", "forward@12=kill"),
            ("r2", "b", ""),
            ("r3", "b", ""),
        ):
            job.start(replica, points, FABRIC_RACK=rack)
        job.finish(restart=False)
        assert {r for r, code in job.codes.items() if code} == {"r0", "r1"}, job.logs()
        verdict = judge(read_run(job.folder))
        assert set(verdict.broken) == {"r0 did not finish.", "r1 did not finish."}
        assert (verdict.summary.samples_skipped, verdict.summary.samples_repeated) == (0, 0)
        slots = job.events("r2", "epoch")[0]["data_slots"]
        assert {slots["r0"], slots["r1"]} in ({0, 2}, {1, 3}), "replicas of one rack read distinct shards"
        shards = job.status()["data_shards"]
        assert {x["replica"]: x["rack"] for x in shards["members"]} == {"r2": "b", "r3": "b"}
        assert (shards["redundancy"], shards["depth"], shards["lost"]) == (2, 2, [])
        assert set(shards["last_reader"].values()) == {"r2", "r3"} and len(shards["last_reader"]) == 4
        assert "one reader left: when it dies, the job waits" in shards["warning"]


def undisturbed(shards):
    """Return the parameters (sums of absolute values) after the same steps in one process without fabric."""
    from tiny_trainer import Samples, build

    from fabric.client.data.sample_plan import SamplePlan

    plan, samples = SamplePlan(98, 28, 2, 3, shards=shards), Samples(98)
    model, optimizer, scheduler = build(64)
    model.eval()
    for step in range(STEPS):
        for micro_batch in range(plan.micro_batches):
            x, y = zip(*(samples[i] for i in plan.samples(step, micro_batch)), strict=True)
            loss = torch.nn.functional.mse_loss(model(torch.stack(x)), torch.stack(y))
            (loss / plan.micro_batches).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [p.detach().double().abs().sum().item() for p in model.parameters()]


def test_a_job_with_a_shard_that_no_member_can_read_waits_for_a_reader(zygote, tmp_path):
    """With one reader per shard a death stops the others until the replica is back, and no data is left
    out.
    """
    with Job(zygote, tmp_path, environment=environment(options={"redundancy": 1})) as job:
        job.start_all({"r1": "forward@8=kill"})
        job.wait_for(lambda: job.ended("r1") is not None, "the death of r1")

        def waits():
            return "a replica that can read shard 1" in job.status()["waiting_for"]

        job.wait_for(waits, "the lighthouse to say what is waited for")
        assert max(commits(job, "r0")) == 7
        summary = finish(job)
        assert joined_again(job, "r1", 7)
        assert (summary.samples_skipped, summary.samples_repeated) == (0, 0)


def test_a_sampler_feeds_a_loop_that_we_do_not_own(zygote, tmp_path):
    with Job(zygote, tmp_path, environment=environment("sampler")) as job:
        job.start_all({"r1": "before-ring@8=kill"})
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
        assert len(set(finals(job).values())) == 1
        assert joined_again(job, "r1", 8)
        found = commits(job, "r0")
        assert found[7]["contributions"] == {"r0": [0], "r1": [1], "r2": [2]} and not found[7]["skipped"]
        assert found[8]["skipped"] == [1] and found[8]["weight"] == 16
        assert found[STEPS - 1]["weight"] == 24
        # The parts of a step are disjoint, and no replica computed a part of another step.
        for step in (7, 8, STEPS - 1):
            parts = {}  # if a round was retried, its last line counts
            for replica, tokens in found[step]["contributions"].items():
                for e in job.events(replica, "contribute"):
                    if e["step"] == step and tokens:
                        parts[replica] = [i for ids in e["samples"].values() for i in ids]
            taken = [i for part in parts.values() for i in part]
            assert len(taken) == len(set(taken)) == found[step]["weight"]
