"""Runs a recipe in one of the four ways, and reads the evidence that it has left."""

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from job import Job, Zygote
from recipe_table import Recipe
from test_failures import check

from fabric.audit.journal import read_run
from fabric.audit.summary import judge

HERE = Path(__file__).parent
WAYS = ("plain", "disabled", "single", "killed")
WRITER_KILLED, OTHER_KILLED = 5, 13  # the steps at which r0, the writer, and r2 are killed
PATIENT_STEPS = "12"  # in that many last steps the members wait for a replica that is away


@dataclass(frozen=True)
class Result:
    """What the processes of one way have left."""

    folder: Path
    codes: dict[str, int]
    output: str  # of all processes

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The reports of all processes that came to the end of the recipe."""
        return [
            torch.load(path, weights_only=False, map_location="cpu")
            for path in sorted(self.evidence.glob("*.pt"))
        ]

    @property
    def evidence(self) -> Path:
        return self.folder / "evidence"

    @property
    def notes(self) -> list[dict[int, dict[str, float]]]:
        """For each process the figures by step."""
        found = []
        for path in sorted(self.evidence.glob("*.notes")):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found.append({x.pop("step"): x for x in lines})
        return found

    @property
    def samples(self) -> dict[int, Counter[int]]:
        """The samples of each step: from the plain run's own word, or from the journals of a job."""
        counted: dict[int, Counter[int]] = {}
        for path in self.evidence.glob("*.samples"):
            for line in path.read_text().splitlines():
                body = json.loads(line)
                counted[body["step"]] = Counter(body["samples"])
        return counted or _counted_samples(self.folder / "journal")

    @property
    def committed(self) -> int:
        """The largest number of steps that a replica of this job has committed."""
        texts = [path.read_text().replace(" ", "") for path in self._journals]
        return max((text.count('"event":"commit"') for text in texts), default=0)

    @property
    def _journals(self) -> list[Path]:
        return sorted((self.folder / "journal").glob("*.jsonl"))


def run(way: str, recipe: Recipe, zygote: Zygote, folder: Path) -> Result:
    """Run ``recipe`` in one way, whose files lie in ``folder``."""
    (folder / "out").mkdir(parents=True)
    (folder / "evidence").mkdir()
    environment = {
        "TEST_TRAINER": "recipe_trainer",
        "RECIPE_SCRIPT": str(recipe.path),
        "RECIPE_LAUNCH": recipe.launch,
        "RECIPE_WAY": way,
        "RECIPE_STEPS": str(recipe.steps),
        "RECIPE_REPLICAS": "3" if way == "killed" else "1",
        "RECIPE_OUT": str(folder / "out"),
        "RECIPE_EVIDENCE": str(folder / "evidence"),
        "TINY_PATIENT_STEPS": PATIENT_STEPS,
        "HF_HUB_OFFLINE": "1",
        # A framework places the model itself.
        "RECIPE_DEVICE": "cpu" if recipe.needs else os.environ.get("RECIPE_DEVICE", "cpu"),
    }
    if way in ("plain", "disabled"):
        return _run_alone(way, environment, zygote, folder)
    replicas = 3 if way == "killed" else 1
    with Job(zygote, folder, replicas=replicas, environment=environment) as job:
        kills = {"r0": f"ring@{WRITER_KILLED}=kill", "r2": f"ring@{OTHER_KILLED}=kill"}
        job.start_all(kills if way == "killed" and not recipe.refused else None)
        job.finish()
        if not recipe.refused and set(job.codes.values()) == {0}:
            if way in recipe.unlike:
                # The recipe says why samples may be left out; all promises but this one hold.
                assert not (broken := judge(read_run(job.folder)).broken), broken[:10]
            else:
                check(job, recipe.steps)
            if way == "killed":
                assert (job.starts["r0"], job.starts["r2"]) == (2, 2), job.logs()
        output = "".join(job.said(f"r{i}") for i in range(replicas))
        return Result(folder, dict(job.codes), output)


def _run_alone(way: str, environment: dict[str, str], zygote: Zygote, folder: Path) -> Result:
    more = {"FABRIC_DISABLE": "1"} if way == "disabled" else {}
    log = folder / f"{way}.log"
    pid = zygote.start({**environment, **more}, log)
    with zygote.changed:
        ended = zygote.changed.wait_for(lambda: zygote.status_of(pid) is not None, timeout=180)
    assert ended, f"the recipe did not end\n{log.read_text()}"
    code = os.waitstatus_to_exitcode(zygote.status_of(pid))
    return Result(folder, {way: code}, log.read_text())


def _counted_samples(journals: Path) -> dict[int, Counter[int]]:
    """The samples that each committed step has counted, by the replicas' journals."""
    computed: dict[tuple[int, str], list[int]] = {}
    commits: dict[int, dict[str, list[int]]] = {}
    for path in journals.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            body = json.loads(line)
            if body["event"] == "contribute":
                for number, indices in body["samples"].items():
                    computed[body["step"], number] = indices
            elif body["event"] == "commit":
                commits[body["step"]] = body["contributions"]
    return {
        step: Counter(
            index for ids in parts.values() for i in ids for index in computed.get((step, str(i)), ())
        )
        for step, parts in commits.items()
    }
