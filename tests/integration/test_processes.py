"""A launched replica has a launcher and a checkpoint server per host, a trainer per rank, and few sockets.

A Python script's ranks have a standby each 20 s after their start: `cli/test_standbys.py` counts those.
"""

from collections import Counter
from pathlib import Path

import pytest
from listening_sockets import listening
from test_launched_jobs import AT_ONCE, LaunchedJob


def descendants(roots: set[int]) -> set[int]:
    """These processes, and all that they have started, as far as the kernel still knows."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            parents[int(folder.name)] = int(fields[1])
    family = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


@pytest.mark.parametrize(("ranks", "unix", "tcp"), [(1, 4, 2), (8, 18, 18)])
def test_a_launched_replica_has_few_processes_and_sockets(zygote, tmp_path, ranks, unix, tcp):
    """Of the 18 TCP sockets 9 are those of torch: one of gloo per rank, and rank 0's store."""
    gate = tmp_path / "gate"
    environment = {"SHARDED": "plain", "TINY_STEPS": "4", "FABRIC_SNAPSHOT_EVERY": "1"}
    with LaunchedJob(zygote, tmp_path, replicas=1, ranks=ranks, environment=environment) as job:
        options = ("--ranks", str(ranks), *AT_ONCE[2:])
        job.launch("r0", *options, FABRIC_TEST_POINTS=f"forward@3=wait:{gate}")
        job.wait_for(Path(f"{gate}.awaited").exists, "step 3")
        (server,) = job.server_pids()
        family = descendants({job.launchers["r0"].pid, server})
        trainers = {int(pid) for _, pid, _, _ in job.notes("r0")}
        assert len(trainers) == ranks and family == {job.launchers["r0"].pid, server} | trainers
        sockets = Counter()
        for pid in family:
            sockets.update(listening(pid))
        assert sockets == {"unix": unix, "tcp": tcp}
        gate.touch()
        assert job.end_codes() == {"r0": 0}, job.logs()
