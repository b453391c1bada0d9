"""The content of a plan of adaptation: the layout and the micro-batches of every replica of a job."""

from dataclasses import dataclass

from fabric.health.planning.layout import StageLayout


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One replica's part of a plan."""

    replica: str
    layout: StageLayout
    micro_batches: int  # number of micro-batches per step
    rejoins: bool = False  # whether the replica leaves and comes back in this layout


@dataclass(frozen=True, slots=True)
class AdaptationPlan:
    """Layouts and micro-batches of all replicas, in force from one step boundary on."""

    replicas: tuple[ReplicaPlan, ...]
    leaves: str = ""  # the replica that a drain takes out
    joins: str = ""  # the spare that takes the drained replica's place

    def of(self, replica: str) -> ReplicaPlan | None:
        """The entry of one replica, None where the plan leaves it out."""
        return next((entry for entry in self.replicas if entry.replica == replica), None)
