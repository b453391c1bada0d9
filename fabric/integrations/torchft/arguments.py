"""The meaning of each argument of torchft's Manager, also its process group: mapped, idle, or refused."""

import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, NoReturn

from fabric.errors import ConfigError
from fabric.runtime.config import given_text, launched_ranks, parse_bind, parse_replicas

_log = logging.getLogger("fabric")
_DEFAULT = timedelta(seconds=60)


class WorldSizeMode(Enum):
    """torchft's modes; fabric has ``DYNAMIC`` alone."""

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ManagerArguments:
    """torchft's arguments of Manager after the first four. Raises ConfigError for one that cannot be kept."""

    use_async_quorum: bool = True  # wait for the step's members at the first need, and not in start_quorum
    timeout: timedelta = _DEFAULT  # becomes exchange_s
    quorum_timeout: timedelta = _DEFAULT
    connect_timeout: timedelta = _DEFAULT
    rank: int | None = None
    world_size: int | None = None
    world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    store_addr: str | None = None
    store_port: int | None = None
    lighthouse_addr: str | None = None  # becomes lighthouse, where FABRIC_LIGHTHOUSE is not set
    replica_id: str | None = None  # becomes replica, where FABRIC_REPLICA is not set
    port: int | None = None  # becomes the port of bind
    hostname: str = ""
    heartbeat_interval: timedelta = timedelta(milliseconds=100)
    checkpoint_transport: Any = None
    init_sync: bool = True
    max_retries: int | None = None  # becomes on_abort
    quorum_retries: int = 0

    def __post_init__(self) -> None:
        ranks = self.world_size if self.world_size is not None else launched_ranks()
        if ranks != 1 or self.rank not in (None, 0):
            raise ConfigError(
                f"Manager is in rank {self.rank or 0} of {ranks} of a replica, and this adapter is for "
                "replicas of one process so far: use fabric.client.attach"
            )
        if self.world_size_mode.name != "DYNAMIC":
            raise ConfigError(
                "Manager got world_size_mode=FIXED_WITH_SPARES: leave it out, and start the spares with "
                "FABRIC_SPARE=1"
            )
        if self.quorum_timeout != _DEFAULT:
            _without_effect(
                "quorum_timeout", "FABRIC_USER_CODE_S bounds how long the others wait for a replica"
            )
        if self.connect_timeout != _DEFAULT:
            _without_effect(
                "connect_timeout", "a start looks for a lighthouse for FABRIC_AUTONOMY_S, at most a minute"
            )

    def settings(self, group: Any, least: int) -> dict[str, Any]:
        """Return the arguments of ``attach`` for a Manager with this ``pg`` and ``min_replica_size``."""
        check_group(group)
        chosen: dict[str, Any] = {"replicas": _replicas(least)}
        if self.timeout != _DEFAULT:
            chosen["exchange_s"] = self.timeout.total_seconds()
        if self.max_retries is not None:
            chosen["on_abort"] = f"retry {max(self.max_retries, 1)}"
        if self.replica_id and not given_text("replica"):
            chosen["replica"] = self.replica_id
        if self.lighthouse_addr and not given_text("lighthouse"):
            chosen["lighthouse"] = (self.lighthouse_addr,)
        if self.port:
            host, _ = parse_bind(given_text("bind") or "127.0.0.1")
            chosen["bind"] = f"[{host}]:{self.port}"
        return chosen


def parse_arguments(named: Mapping[str, Any]) -> ManagerArguments:
    """Return the arguments by torchft's names. Raises ConfigError for one that torchft does not have."""
    unknown = sorted(set(named) - set(ManagerArguments.__dataclass_fields__))
    if unknown:
        raise ConfigError(f"Manager got {unknown[0]}=, which torchft's Manager does not have: leave it out")
    if named.get("hostname") not in (None, "", socket.gethostname()):
        _without_effect("hostname", "FABRIC_ADVERTISE names the address at which peers reach this replica")
    return ManagerArguments(**named)


def _replicas(least: int) -> str:
    if type(least) is not int or least < 1:
        raise ConfigError(f"Manager got min_replica_size={least!r}: give a whole number from 1")
    text = given_text("replicas")
    start = parse_replicas(text)[1] if text else least
    if start < least:
        raise ConfigError(
            f"Manager got min_replica_size={least}, and FABRIC_REPLICAS={text} starts with {start}: start at "
            f"least {least} replicas"
        )
    return f"{least}:{start}"


def _without_effect(name: str, instead: str) -> None:
    _log.warning("Manager's %s has no effect: %s", name, instead)


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
