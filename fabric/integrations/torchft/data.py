"""torchft's DistributedSampler: the part of the data of one process of one replica."""

from typing import Any

from torch.utils.data import Dataset
from torch.utils.data import DistributedSampler as TorchSampler


class DistributedSampler(TorchSampler[Any]):
    """The samples of rank ``group_rank`` of ``num_replicas`` ranks in replica ``replica_rank`` of
    ``num_replica_groups``.

    The parts are fixed: as with torchft, nobody reads the part of a replica that is away.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        replica_rank: int,
        num_replica_groups: int,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        **kwargs: Any,
    ) -> None:
        ranks = 1 if num_replicas is None else num_replicas
        super().__init__(
            dataset,
            num_replicas=ranks * num_replica_groups,
            rank=(group_rank or 0) + ranks * replica_rank,
            **kwargs,
        )
