"""The small entries of a state: numbers that a user's mistake changes, and never a tensor's content."""

import torch

from fabric.client.state.small_entries import small_entries
from fabric.protocol.rules.divergence import MAX_ENTRIES


def test_learning_rates_and_counters_are_entries_and_tensors_are_not():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    entries = dict(small_entries({"model": model, "optimizer": optimizer, "scheduler": scheduler}))
    assert entries["optimizer/param_groups/0/lr"] == "0.0003"
    assert entries["optimizer/param_groups/0/betas/0"] == "0.9"
    assert entries["scheduler/last_epoch"] == "0"
    assert not [path for path in entries if path.startswith("model") or "params/" in path]


def test_a_learning_rate_in_a_tensor_is_its_number():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    assert dict(small_entries({"optimizer": optimizer}))["optimizer/param_groups/0/lr"] == "0.5"


def test_the_entries_of_a_large_state_are_bounded():
    class Large:
        def state_dict(self):
            return {"values": [list(range(1000))] * 1000, "text": "x" * 100_000, "itself": {"of": [self]}}

    entries = small_entries({"large": Large()})
    assert len(entries) == MAX_ENTRIES and sum(len(p) + len(v) for p, v in entries) < 10_000
