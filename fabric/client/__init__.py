"""The trainer's API: ``session = fabric.client.attach(model, optimizer)``, then loops as in docs/api.md."""

from fabric.client.attach import attach
from fabric.client.ddp import ddp
from fabric.client.session import Session
from fabric.client.snapshot_policy import EverySteps, OverheadBudget, SnapshotPolicy
from fabric.client.solo import SoloSession
from fabric.client.step import Step

__all__ = [
    "EverySteps",
    "OverheadBudget",
    "Session",
    "SnapshotPolicy",
    "SoloSession",
    "Step",
    "attach",
    "ddp",
]
