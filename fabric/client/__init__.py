"""The trainer's API: ``session = fabric.client.attach(model, optimizer)``, then loops as in docs/api.md."""

from fabric.client.attach import attach
from fabric.client.collectives.process_group import process_group, replicate_mesh
from fabric.client.data.sampler import StepSampler
from fabric.client.loop.session import Session, SoloSession, ddp
from fabric.client.loop.step import Step
from fabric.client.outer.outer_loop import OuterLoop, diloco, local_sgd
from fabric.client.process.rank_group import layout, refuse_layout
from fabric.client.state.restored_values import RestoredValues, restore_values
from fabric.client.state.snapshots import EverySteps, OverheadBudget, SnapshotPolicy
from fabric.errors import CollectiveFailed, NotAMember
from fabric.runtime.rank_layout import RankLayout

__all__ = [
    "CollectiveFailed",
    "EverySteps",
    "NotAMember",
    "OuterLoop",
    "OverheadBudget",
    "RankLayout",
    "RestoredValues",
    "Session",
    "SnapshotPolicy",
    "SoloSession",
    "Step",
    "StepSampler",
    "attach",
    "ddp",
    "diloco",
    "layout",
    "local_sgd",
    "process_group",
    "refuse_layout",
    "replicate_mesh",
    "restore_values",
]
