"""``attach(..., local_state=)`` with torchdata's StatefulDataLoader: killed and joined."""

import json

from job import Job
from test_failures import finals

STEPS = 28  # of the 64 batches of a pass
KILLED_AT = 12


def test_a_replica_that_joins_repeats_and_loses_no_sample_of_its_slot(zygote, tmp_path):
    environment = {
        "TEST_TRAINER": "stateful_trainer",
        "EXAMPLE_STEPS": str(STEPS),
        "EXAMPLE_PAUSE_S": "0.01",
        "TINY_PATIENT_STEPS": "15",
    }
    with Job(zygote, tmp_path, environment=environment) as job:
        for replica in ("r0", "r1", "r2"):
            point = f"ring@{KILLED_AT}=kill" if replica == "r1" else ""
            job.start(replica, point, TEST_NOTES=str(tmp_path / f"{replica}.notes"))
        job.wait_for(lambda: job.ended("r1") is not None, "r1 to kill itself")
        job.start("r1", TEST_NOTES=str(tmp_path / "r1.notes"))
        job.finish(restart=False)
        assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
        assert len(set(finals(job).values())) == 1, "the replicas ended with different states"
        trained = {
            replica: [
                (note["step"], note["samples"])
                for note in map(json.loads, (tmp_path / f"{replica}.notes").read_text().splitlines())
            ]
            for replica in ("r0", "r1", "r2")
        }
    for notes in trained.values():
        samples = [x for _, batch in notes for x in batch]
        assert len(set(samples)) == len(samples) == 4 * len(notes), "a sample was repeated"
    assert [step for step, _ in trained["r0"]] == list(range(STEPS))
    own = trained["r1"]
    assert [step for step, _ in own][:KILLED_AT] == list(range(KILLED_AT))
    assert own[-1][0] == STEPS - 1 and len(own) > KILLED_AT, "the killed replica never contributed again"
    assert [batch for _, batch in own] == order_of("r1")[: len(own)], "a sample of the slot was lost"


def order_of(replica: str) -> list[list[int]]:
    """Return the batches of a pass of this replica's loader, undisturbed."""
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    order = torch.Generator().manual_seed(int(replica[-1]))
    loader = StatefulDataLoader(range(256), batch_size=4, shuffle=True, generator=order)
    return [batch.tolist() for batch in loader]
