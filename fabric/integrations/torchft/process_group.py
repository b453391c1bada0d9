"""The names of torchft's process groups: a Manager takes one as ``pg``, and fabric's data plane works."""

from datetime import timedelta
from typing import Any, NoReturn

from fabric.errors import ConfigError


class ProcessGroupGloo:
    """A name without collectives: ``FABRIC_DATA_PLANE`` chooses how gradients travel."""

    def __init__(self, timeout: timedelta | float = timedelta(seconds=60)) -> None:
        self.timeout = timeout  # the Manager's own timeout bounds the exchange

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(
            f"{type(self).__name__}.{name} is not there: with fabric a process group of torchft is a name "
            "without collectives, so leave the exchange to DistributedDataParallel and the Optimizer"
        )

    def shutdown(self) -> None:
        """Do nothing: the group holds nothing."""

    def abort(self, errored: bool = True) -> None:
        """Do nothing: fabric aborts its own rounds."""


class ProcessGroupNCCL(ProcessGroupGloo):
    """As ProcessGroupGloo."""


class ProcessGroupBabyGloo(ProcessGroupGloo):
    """As ProcessGroupGloo; no further process is started."""


class ProcessGroupBabyNCCL(ProcessGroupGloo):
    """As ProcessGroupGloo; no further process is started."""


class ProcessGroupXCCL(ProcessGroupGloo):
    """As ProcessGroupGloo."""


class ProcessGroupBabyXCCL(ProcessGroupGloo):
    """As ProcessGroupGloo; no further process is started."""


def check_group(group: Any) -> None:
    """Raise ConfigError for a group that is none of these names."""
    if not isinstance(group, ProcessGroupGloo):
        raise ConfigError(
            f"Manager got the process group {type(group).__name__}, which fabric cannot use: import "
            "ProcessGroupGloo or ProcessGroupNCCL from fabric.integrations.torchft"
        )
