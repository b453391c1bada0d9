"""A job that explains itself: one cause through all services' logs, the events and the recovery record."""

import json

from job import Job
from test_failures import finish_and_check


def logged(job: Job, name: str) -> list[dict]:
    """Return the structured lines of one log, without the trainers' own output."""
    lines = (job.folder / name).read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_the_incident_id_of_a_failure_appears_in_the_logs_of_all_services(zygote, tmp_path, monkeypatch):
    # for the lighthouse; the trainers' settings have the variable too
    monkeypatch.setenv("FABRIC_LOG", "json")
    with Job(
        zygote, tmp_path, environment={"FABRIC_LOG": "json", "TINY_STEPS": "20", "TINY_PATIENT_STEPS": "12"}
    ) as job:
        job.start_all({"r1": "ring@8=kill"})
        finish_and_check(job, 20)
        [recovery] = [r for r in job.recoveries() if "r1" in r["lost"]]
        incident_id = recovery["incident_id"]
        assert incident_id == f"e{recovery['epoch']}"
        assert {e["kind"] for e in events_of(job, incident_id)} >= {
            "evicting",
            "epoch",
            "resume",
            "session opened",
        }
        [condemned] = [e for e in job.told("evicting") if e["about"] == "r1"]
        assert condemned["incident_id"] == incident_id and recovery["id"] in {
            e["id"] for e in events_of(job, incident_id)
        }
        died = logged(job, "run/r1/ckpt-server.log")
        gone = next(x for x in died if "is gone" in x["message"])
        assert (gone["incident_id"], gone["replica"], gone["job"]) == (incident_id, "r1", "test")
        assert gone["incarnation"] == job.events("r1", "start")[0]["incarnation"]
        for name in ("r0.log", "run/r0/ckpt-server.log", "lighthouse.log"):
            epoch = next(
                x
                for x in logged(job, name)
                if x.get("incident_id") == incident_id and "epoch" in x["message"]
            )
            assert (epoch["job"], epoch["level"]) == ("test", "info"), name
        said = [x for x in logged(job, "r0.log") if x.get("incident_id") == incident_id]
        resume = next(x for x in said if x["message"].startswith("resume"))
        assert (resume["service"], resume["replica"], resume["epoch"]) == ("trainer", "r0", recovery["epoch"])
        assert resume["step"] in (8, 9)
        assert [x for x in said if x["message"].startswith("abort")], "it was in the ring with r1"


def events_of(job: Job, incident_id: str) -> list[dict]:
    return [e for e in job.told() if e["incident_id"] == incident_id]
