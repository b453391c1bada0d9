"""The log of a real job in TensorBoard: a death is there once, with the goodput, and not once per replica."""

from job import Job
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_failures import finals

KILLED_AT = 12


def test_a_death_is_in_the_log_once_for_the_job(logging_zygote, tmp_path):
    environment = {"TEST_TRAINER": "logging_trainer", "TINY_STEPS": "28", "TINY_PATIENT_STEPS": "14"}
    with Job(logging_zygote, tmp_path, environment=environment) as job:
        for replica in ("r0", "r1", "r2"):
            point = f"ring@{KILLED_AT}=kill" if replica == "r1" else ""
            job.start(replica, point, TEST_LOG_DIR=str(tmp_path / "logs" / replica))
        job.wait_for(lambda: job.ended("r1") is not None, "r1 to kill itself")
        job.start("r1", TEST_LOG_DIR=str(tmp_path / "logs" / "r1"))
        job.finish(restart=False)
        assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
        assert len(set(finals(job).values())) == 1
        [death] = [x for x in job.recoveries() if x["kind"] == "death"]
    deaths, goodput = [], {}
    for folder in sorted((tmp_path / "logs").iterdir()):
        events = EventAccumulator(str(folder)).Reload()
        tags = events.Tags()
        if "fabric/recovery/text_summary" in tags["tensors"]:
            deaths += [
                (e.step, e.tensor_proto.string_val[0].decode())
                for e in events.Tensors("fabric/recovery/text_summary")
                if "(death)" in e.tensor_proto.string_val[0].decode()
            ]
        if "fabric/goodput" in tags["scalars"]:
            goodput[folder.name] = [e.value for e in events.Scalars("fabric/goodput")]
    assert deaths == [(death["step"], f"{death['incident_id']} (death): {death['why']}")]
    assert goodput and all(0 < value <= 1 for values in goodput.values() for value in values)
