"""The recipes of a weekly drill: what the drill is given, and that it has no right that it does not need."""

import os
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from fabric.cli.drill import drill
from fabric.drill.judge.expectations import parse_expectation
from fabric.drill.schedule.drill_schedule import (
    DrillSchedule,
    check_schedule,
    parse_fault,
    random_schedule,
)
from fabric.drill.schedule.fault_table import FaultNeed, FaultScope

OPS = Path(__file__).resolve().parents[2] / "ops"
FAKE = """#!/bin/sh
printf '%s\\n' "$@" > "$CALLED"
exit "$CODE"
"""


RECIPES = ("drill-cronjob.yaml", "drill-running-cronjob.yaml")


def cron_job(recipe: str = RECIPES[0]) -> dict[str, Any]:
    return documents(recipe)["CronJob"]


def documents(recipe: str) -> dict[str, Any]:
    return {x["kind"]: x for x in yaml.safe_load_all((OPS / "kubernetes" / recipe).read_text())}


def pod(recipe: str = RECIPES[0]) -> dict[str, Any]:
    return cron_job(recipe)["spec"]["jobTemplate"]["spec"]["template"]["spec"]


def given(words: list[str]) -> dict[str, Any]:
    """The options that the command's own parser reads."""
    assert words[:2] == ["fabric", "drill"]
    return drill.make_context("drill", words[2:]).params


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_failed_drill_fails_its_job_and_is_not_repeated(recipe):
    spec = cron_job(recipe)["spec"]
    assert spec["jobTemplate"]["spec"]["backoffLimit"] == 0 and pod(recipe)["restartPolicy"] == "Never"
    assert spec["concurrencyPolicy"] == "Forbid"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_pod_has_no_right_that_a_restricted_pod_lacks(recipe):
    security = pod(recipe)["securityContext"]
    assert security["runAsNonRoot"] is True and security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod(recipe)["automountServiceAccountToken"] is False
    assert not {"hostPID", "hostNetwork", "hostIPC", "shareProcessNamespace"} & set(pod(recipe))
    (container,) = pod(recipe)["containers"]
    own = container["securityContext"]
    assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}
    assert own["readOnlyRootFilesystem"] is True and "memory" in container["resources"]["limits"]
    others = [volume for volume in pod(recipe)["volumes"] if "emptyDir" not in volume]
    assert [volume["secret"]["secretName"] for volume in others] == ["fabric-drill"] * len(others)
    assert len(others) == (recipe == RECIPES[1])


def test_the_lighthouse_is_open_to_the_pod_that_drills_a_running_job():
    (rule,) = documents(RECIPES[1])["NetworkPolicy"]["spec"]["ingress"]
    template = cron_job(RECIPES[1])["spec"]["jobTemplate"]["spec"]["template"]
    assert rule["from"] == [{"podSelector": {"matchLabels": template["metadata"]["labels"]}}]
    assert rule["ports"] == [{"port": 8600}]


def test_the_drill_of_a_running_job_asks_for_faults_that_an_injector_plays():
    (container,) = pod(RECIPES[1])["containers"]
    options = given(container["command"])
    assert options["command"] == () and options["job"] == "gpt"
    assert str(options["token_file"]).startswith(container["volumeMounts"][-1]["mountPath"])
    assert all(parse_expectation(text) for text in options["expect"])
    names = ("r0", "r1", "r2")
    faults = tuple(parse_fault(text, names) for text in options["faults"])
    check_schedule(DrillSchedule(faults), names, {FaultNeed.TRAINERS})
    assert not any(fault.kind.scope is FaultScope.REPLICA_HOST for fault in faults)


def test_the_drill_of_the_cron_job_is_one_that_the_command_accepts():
    (container,) = pod()["containers"]
    options = given(container["command"])
    assert options["command"] == ("python", "drilled.py")
    assert all(parse_expectation(text) for text in options["expect"])
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert str(options["out"].parent) in mounts
    length_s = random_schedule(options["drawn"], ("r0", "r1", "r2"), frozenset(FaultNeed)).least_s
    assert 2 * length_s < cron_job()["spec"]["jobTemplate"]["spec"]["activeDeadlineSeconds"]


@pytest.mark.parametrize("code", [0, 1])
def test_the_slurm_script_ends_with_the_exit_code_of_its_drill(tmp_path, code):
    fake, called = tmp_path / "fabric", tmp_path / "called"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    environment |= {"CALLED": str(called), "CODE": str(code), "DRILL_SEED": "12"}
    script = OPS / "slurm" / "drill.sbatch"
    done = subprocess.run(["bash", str(script), "train_me.py"], env=environment, timeout=60, check=False)
    assert done.returncode == code
    options = given(["fabric", *called.read_text().splitlines()])
    assert (options["drawn"], str(options["out"])) == ("12 every 30s for 20m", "drill-77")
    assert options["command"] == ("python", "train_me.py")


def test_the_slurm_script_asks_for_the_training_script():
    script = OPS / "slurm" / "drill.sbatch"
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and "name the training script" in done.stderr


def test_the_options_of_the_drill_are_those_of_its_command():
    names = {name for p in drill.params if isinstance(p, click.Option) for name in p.opts}
    script = (OPS / "slurm" / "drill.sbatch").read_text()
    used = {word for word in script.splitlines()[-1].split() if word.startswith("--") and word != "--"}
    assert used and used <= names
