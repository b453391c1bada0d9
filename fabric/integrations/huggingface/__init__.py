"""The parts of FabricTrainer, the adapter for transformers and trl."""
