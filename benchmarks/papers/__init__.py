"""Published figures beside ours: SPARe, FT-HSDP, TorchPass and ResiHP (`reproduce.py`)."""
