"""User code, and answers to the lighthouse, have a time limit: a member beyond the limit is evicted, and
comes back.
"""

import os
import signal

import pytest
from job import Job
from test_failures import finish_and_check


def test_a_member_that_stays_away_too_long_is_evicted_and_comes_back(zygote, tmp_path):
    environment = {"TINY_STEPS": "60", "FABRIC_EXCHANGE_S": "3", "FABRIC_USER_CODE_S": "3"}
    with Job(zygote, tmp_path, environment=environment) as job:
        back = job.folder / "back"
        job.start_all({"r1": f"forward@8=wait:{back}"})
        job.wait_for(
            lambda: [e for e in job.events("r0", "epoch") if "r1" not in e["roster"]], "its eviction"
        )
        job.wait_for(
            lambda: [j for j in job.status()["joiners"] if "was evicted for its user code" in j["verdict"]],
            "why it is not let in",
        )
        back.touch()
        finish_and_check(job)
        assert job.starts == {"r0": 1, "r1": 1, "r2": 1}
        told = [e for e in job.told("evicting") if e["about"] == "r1"]
        assert "it was in user code while the others waited for" in told[0]["why"]
        assert [e for e in job.events("r1", "commit") if e["contributed"] and e["step"] > 10], (
            "it works again"
        )


@pytest.mark.long("sim/test_stall_worlds.py")
def test_a_stuck_control_thread_is_left_out_and_comes_back(zygote, tmp_path):
    """r2 dies, and at this news r1's control thread hangs. r1's process runs and its session is open, but r1
    neither answers nor links up for the epoch without r2.
    """
    environment = {"TINY_STEPS": "60", "FABRIC_EXCHANGE_S": "3", "FABRIC_USER_CODE_S": "3"}
    with Job(zygote, tmp_path, environment=environment) as job:
        back = job.folder / "back"
        job.start_all({"r1": f"abort=wait:{back}", "r2": "before-ring@8=kill"})
        job.wait_for(
            lambda: [e for e in job.events("r0", "epoch") if "r1" not in e["roster"]], "its eviction"
        )
        told = [e for e in job.told("evicting") if e["about"] == "r1"]
        assert "peers could not reach it" in told[0]["why"] or "did not answer epoch" in told[0]["why"]
        back.touch()
        finish_and_check(job)
        assert job.starts == {"r0": 1, "r1": 1, "r2": 2}
        assert [e for e in job.events("r1", "commit") if e["contributed"] and e["step"] > 10], (
            "it works again"
        )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1], ids=["Ctrl-C", "sys.exit"])
def test_a_loop_that_is_left_is_a_death_before_the_process_has_ended(zygote, tmp_path, number):
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "60"}) as job:
        may_end = job.folder / "may-end"
        job.start("r0")
        job.start("r2")
        pid = job.start("r1", TEST_TRAINER="leaving_trainer", TEST_MAY_END=str(may_end))
        job.wait_for(lambda: [e for e in job.events("r1", "commit") if e["step"] >= 5], "its first steps")
        os.kill(pid, number)
        job.wait_for(
            # The roster's order may differ: the leader may first take the ended links for broken, and change
            # the ring.
            lambda: [e for e in job.events("r0", "epoch") if sorted(e["roster"]) == ["r0", "r2"]],
            "an epoch without it",
        )
        assert job.ended("r1") is None
        blamed = [e["why"] for e in job.told("aborted") if e["about"] == "r1" and "the link to" in e["why"]]
        assert not blamed, "it ended those links itself"
        may_end.touch()
        job.wait_for(lambda: job.ended("r1") is not None, "its end")
        job.start("r1")
        finish_and_check(job)
        assert job.starts == {"r0": 1, "r1": 2, "r2": 1}
