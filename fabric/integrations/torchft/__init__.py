"""torchft's names over fabric: a script for torchft changes its import lines. docs/adopt/torchft.md."""

from fabric.integrations.torchft.arguments import (
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupBabyXCCL,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    ProcessGroupXCCL,
    WorldSizeMode,
)
from fabric.integrations.torchft.checkpointing import CheckpointTransport, HTTPTransport, PGTransport
from fabric.integrations.torchft.local_sgd import DiLoCo, LocalSGD
from fabric.integrations.torchft.managed_steps import ExceptionWithTraceback, Manager
from fabric.integrations.torchft.wrappers import DistributedDataParallel, DistributedSampler, OptimizerWrapper

Optimizer = OptimizerWrapper

__all__ = [
    "CheckpointTransport",
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedSampler",
    "ExceptionWithTraceback",
    "HTTPTransport",
    "LocalSGD",
    "Manager",
    "Optimizer",
    "OptimizerWrapper",
    "PGTransport",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupXCCL",
    "WorldSizeMode",
]
