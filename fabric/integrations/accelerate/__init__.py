"""``FabricAccelerator``: the Accelerator of accelerate, as one replica of a job. docs/adopt/accelerate.md."""

from fabric.integrations.accelerate.accelerator import FabricAccelerator

__all__ = ["FabricAccelerator"]
