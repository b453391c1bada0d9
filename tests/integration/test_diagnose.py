"""``fabric diagnose --job`` on living jobs: a healthy job, a hanging replica, and an absent rank."""

import json
import os
import signal
from pathlib import Path

from click.testing import CliRunner
from job import Job
from rank_job import RankJob

from fabric.cli.diagnose import diagnose

STEP = 8


def asked(job: Job, *more: str) -> dict:
    arguments = ["--lighthouse", job.url, "--job", "test", "--token-file", str(job.token), "--json", *more]
    outcome = CliRunner().invoke(diagnose, arguments, catch_exceptions=False)
    return json.loads(outcome.stdout)


def diagnosed(job: Job, sentence: str, *more: str) -> dict:
    """Return the report whose first conclusion has this sentence; an early report may miss members."""
    reports: list[dict] = []

    def has_come() -> bool:
        reports.append(asked(job, *more))
        return any(sentence in conclusion["why"] for conclusion in reports[-1]["conclusions"][:1])

    try:
        job.wait_for(has_come, f"the sentence {sentence!r}")
    except AssertionError as error:
        raise AssertionError(f"{error}\nthe last report: {json.dumps(reports[-1:], indent=1)}") from error
    return reports[-1]


def test_a_replica_that_hangs_in_user_code_is_named(zygote, tmp_path):
    """The others wait for r0 in fabric's exchange; the saved evidence gives the same report."""
    with Job(zygote, tmp_path / "job", environment={"TINY_STEPS": "500"}) as job:
        job.start_all({"r0": f"forward@{STEP}=wait:{tmp_path / 'go-on'}"})
        job.wait_for(lambda: len(job.events("r0", "commit")) == STEP, "the steps before")
        saved = tmp_path / "saved"
        sentence = f"r0 has not come to the exchange of step {STEP}, in which r1 and r2 wait for "
        report = diagnosed(job, sentence, "--settle-s", "0.2", "--save", str(saved))
        conclusion = report["conclusions"][0]  # on a loaded machine a straggler may follow
        assert (conclusion["verdict"], conclusion["about"]) == ("absent rank", ["r0"])
        assert any("r0: its main thread is at" in line for line in conclusion["evidence"])
        assert {x["recorder"] for x in report["processes"]} == {"fabric"}
        again = CliRunner().invoke(diagnose, ["--json", str(saved)], catch_exceptions=False)
        later = json.loads(again.stdout)["conclusions"][0]
        assert (later["verdict"], later["about"]) == ("absent rank", ["r0"])


def test_a_job_that_runs_is_accused_of_nothing(zygote, tmp_path):
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "2000", "TINY_STEP_S": "0.1"}) as job:
        job.start_all()
        job.wait_for(lambda: len(job.events("r0", "commit")) > 3, "the first steps")

        def is_well() -> bool:
            # On a loaded machine one step may last from the first look of `fabric diagnose` to the second.
            report = asked(job, "--settle-s", "0.5")
            return {c["verdict"] for c in report["conclusions"]} <= {"nothing found", "straggler"}

        job.wait_for(is_well, "a report without an accusation")


def test_a_rank_that_stays_away_holds_up_other_replicas(zygote, tmp_path):
    """Rank 0 of r1 waits in a collective of torch's, and both ranks of r0 wait in the exchange."""
    environment = {"SHARDED": "fsdp2", "TINY_STEPS": "500", "TORCH_FR_BUFFER_SIZE": "2000"}
    with RankJob(zygote, tmp_path, replicas=2, environment=environment) as job:
        job.start("r0")
        job.start("r1", TEST_TRAINER="stuck_trainer", STUCK="absent")
        job.wait_for(lambda: job.events("r0", "commit"), "the first step")
        report = diagnosed(job, "r1 rank 1 has not come to all_reduce", "--settle-s", "0.2")
        conclusion = report["conclusions"][0]
        assert (conclusion["verdict"], conclusion["about"]) == ("absent rank", ["r1 rank 1"]), report
        assert any("stay_away" in line for line in conclusion["evidence"])
        urls = [x["source"].partition(" ")[0] for x in report["processes"] if x["process"] == "r1 rank 0"]
        lone = CliRunner().invoke(
            diagnose, [urls[0], "--token-file", str(job.token), "--settle-s", "0"], catch_exceptions=False
        )
        assert "r1 rank 0: waits in all_reduce" in lone.output, lone.output


def test_a_stopped_process_is_named_as_stopped(zygote, tmp_path):
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "500", "FABRIC_USER_CODE_S": "120"}) as job:
        job.start_all({"r1": f"forward@{STEP}=stop"})
        job.wait_for(lambda: job.is_stopped("r1"), "the stop")
        report = asked(job, "--settle-s", "0")
        [why] = [why for process, why in report["unread"].items() if process == "r1"]
        assert "is stopped" in why
        os.kill(job.pids["r1"], signal.SIGCONT)


def test_a_mistaken_argument_of_diagnose_is_one_sentence(tmp_path):
    outcome = CliRunner().invoke(diagnose, ["--lighthouse", "http://127.0.0.1:9", "--job", "test"])
    assert "no lighthouse answers" in str(outcome.exception)
    assert not Path(tmp_path / "saved").exists()
