"""``FabricStrategy``: Lightning's Trainer as one replica of a job. docs/adopt/lightning.md."""

from fabric.integrations.lightning.strategy import FabricStrategy, adopt_trainer

__all__ = ["FabricStrategy", "adopt_trainer"]
