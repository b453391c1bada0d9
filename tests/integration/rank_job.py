"""A job whose replicas have several ranks, with a small test launcher in place of torchrun."""

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

from job import DEADLINE_S, Job, read_events

from fabric.audit.journal import read_run
from fabric.audit.summary import judge
from fabric.protocol.messages.rank_messages import summed_digest


@dataclass
class RankJob(Job):
    """The keys of ``pids`` and ``codes`` are like ``r0.1``: rank 1 of replica r0. A replica starts again when
    all of its ranks have ended.
    """

    ranks: int = 2
    sizes: dict[str, int] = field(default_factory=dict)  # replica -> its number of ranks, where it differs
    layouts: dict[str, str] = field(default_factory=dict)  # replica -> its own value of ``SHARDED``
    groups: dict[str, list[str]] = field(default_factory=dict)
    per_host: int = 0  # so many ranks have one folder, as on one host; 0: all ranks of a replica

    def start(self, replica: str, points: str = "", rank: int = 0, **more: str) -> int:
        """Start all ranks of a replica; one of them gets the failpoints ``points``."""
        number = self.starts[replica] = self.starts.get(replica, 0) + 1
        ranks = self.sizes.get(replica, self.ranks)
        if replica in self.layouts:
            more = {"SHARDED": self.layouts[replica], **more}
        for name in self.groups.get(replica, ())[ranks:]:  # the replica has come back with fewer ranks
            self.pids.pop(name, None)
        self.groups[replica] = [f"{replica}.{k}" for k in range(ranks)]
        for k, name in enumerate(self.groups[replica]):
            if self.per_host:
                more["FABRIC_RUN_DIR"] = str(self.folder / "run" / f"{replica}-{k // self.per_host}")
            environment = self.trainer_environment(
                replica,
                SHARDED_RANK=str(k),
                SHARDED_RANKS=str(ranks),
                SHARDED_STORE=str(self.folder / f"{replica}.world{number}"),
                FABRIC_TEST_POINTS=points if k == rank else "",
                **{"TEST_TRAINER": self.environment.get("TEST_TRAINER", "sharded_trainer"), **more},
            )
            self.pids[name] = self.zygote.start(environment, self.folder / f"{name}.log")
        return self.pids[f"{replica}.{rank}"]

    def journal(self, replica: str, rank: int = 0) -> Path:
        folder = self.folder / "journal"
        return (folder / f"rank{rank}" if rank else folder) / f"{replica}.jsonl"

    def rank_events(self, replica: str, rank: int, kind: str) -> list[dict]:
        """The events of this kind in the journal of one rank."""
        return read_events(self.journal(replica, rank), kind)

    def states(self, replica: str) -> dict[int, str]:
        """Step -> digest of the replica's whole state, for the steps at which all of its ranks took one."""
        by_rank = [
            {event["step"]: event["digest"] for event in self.rank_events(replica, rank, "state")}
            for rank in range(self.sizes.get(replica, self.ranks))
        ]
        common = set.intersection(*(set(digests) for digests in by_rank))
        return {step: summed_digest([digests[step] for digests in by_rank]) for step in sorted(common)}

    def check_promises(self) -> None:
        """Check that a job has kept every promise, and has counted each sample once.

        All its processes must have ended: the journals of a running job disagree on the step under way.
        """
        verdict = judge(read_run(self.folder), is_over=False)
        assert not verdict.broken, "\n".join(verdict.broken[:10])
        summary = verdict.summary
        assert summary.digests_equal
        assert (summary.steps_lost, summary.samples_skipped, summary.samples_repeated) == (0, 0, 0)

    def kill_rank(self, replica: str, rank: int) -> None:
        os.kill(self.pids[f"{replica}.{rank}"], signal.SIGKILL)

    def has_ended(self, replica: str) -> bool:
        """Return whether every rank of the replica has ended."""
        return all(self.ended(name) is not None for name in self.groups[replica])

    def finish(self, restart: bool = True, deadline_s: float = DEADLINE_S) -> None:
        """Restart replicas until all have ended with code 0 or 1."""

        def all_done() -> bool:
            for replica, names in self.groups.items():
                found = {name: self.ended(name) for name in names}
                if any(code is None for code in found.values()):
                    continue
                if not restart or all(code == 0 for code in found.values()) or 1 in found.values():
                    self.codes.update(found)  # type: ignore[arg-type]
                else:
                    later = self.later_points.get(replica, [])
                    self.start(replica, later.pop(0) if later else "")
            return len(self.codes) == len(self.pids)

        self.wait_for(all_done, "every rank's end", deadline_s)

    def check_lanes(self, steps: int) -> None:
        """Check that every lane ends bitwise equal over the replicas, and that rank 0's journals are
        valid.
        """
        for rank in range(self.ranks):
            lanes = {}
            for replica in self.groups:
                body = Path(self.journal(replica, rank)).read_text()
                states = [line for line in body.splitlines() if '"event":"state"' in line]
                lanes[replica] = states[-1].split('"digest":"')[1][:32]
            assert len(set(lanes.values())) == 1, (rank, lanes)
        verdict = judge(read_run(self.folder))
        assert not verdict.broken, "\n".join(verdict.broken[:10])
        assert (verdict.summary.steps, verdict.summary.steps_lost) == (steps, 0)
