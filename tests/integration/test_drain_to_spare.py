"""A replica whose device is slow is drained for good, and a spare takes its place."""

import itertools
import sys

import pytest
from test_act import adapt, gradients
from test_launched_jobs import LaunchedJob
from test_relayout import wait_event, wait_for_part
from test_slow_replica import PATIENCE_S, is_predicted
from test_spares import stands_by

pytestmark = pytest.mark.long("sim/test_relayout_worlds.py")

# Start without `fabric run`: its low-priority imports would take minutes on a crowded host.
LAUNCH = ["--ranks", "1", "--no-python", sys.executable]
ENVIRONMENT = {"FABRIC_REPLICAS": "1:2", "FABRIC_ADAPT": "act", "FABRIC_DIGEST_EVERY": "1"}
MICRO_BATCHES = 4


def test_a_replica_whose_device_is_slow_is_drained_and_the_spare_takes_its_place(zygote, tmp_path):
    slow = tmp_path / "slow"
    with LaunchedJob(zygote, tmp_path / "job", replicas=2, ranks=1, environment=ENVIRONMENT) as job:
        job.trainer = "held_trainer.py"
        job.launch("r0", *LAUNCH)
        job.launch("r1", *LAUNCH, HELD_SLOW=str(slow))
        job.launch("r2", *LAUNCH, FABRIC_SPARE="1")
        job.wait_for(lambda: stands_by(job, "r2"), "the spare to have the state", PATIENCE_S)
        adapt(job, "--veto", "r0")  # on a loaded host r0 may be slow for a while, too
        job.wait_for(lambda: is_predicted(job, 2), "the end of the warm-up", PATIENCE_S)
        slow.touch()
        wait_event(job, "slowness confirmed", "r1")
        why = wait_event(job, "drained", "r1")["why"]
        assert "r1 is drained: replica r1 computes at" in why and "with the spare r2 in its place" in why
        job.wait_for(lambda: job.launchers["r1"].poll() is not None, "the end of r1's launcher", PATIENCE_S)
        step = wait_for_part(job, "r2")
        assert job.launchers["r1"].returncode == 0, job.logs()
        assert job.status()["roster"] == ["r0", "r2"]
        assert {replica: len(job.notes(replica)) for replica in ("r0", "r1", "r2")} == dict.fromkeys(
            ("r0", "r1", "r2"), 1
        ), "no process was started again"
        # No step was interrupted, repeated or left out: the epochs of the change were planned ones.
        commits = job.events("r0", "commit")
        assert [x["step"] for x in commits] == list(range(len(commits)))
        assert not job.events("r0", "abort") and not job.told("evicting"), job.logs()
        assert not any(x["forced"] for x in job.events("r0", "epoch")[1:]), job.events("r0", "epoch")
        computed = [sorted(itertools.chain(*x["contributions"].values())) for x in commits]
        assert all(x == list(range(MICRO_BATCHES)) for x in computed)
        for both in ([gradients(job, x) for x in ("r0", "r2")], [job.states(x) for x in ("r0", "r2")]):
            common = set(both[0]) & set(both[1])
            assert step in common and all(both[0][x] == both[1][x] for x in common)
    job.check_promises()
