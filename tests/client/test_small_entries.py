"""The small entries of a state: numbers that a user's mistake changes, and never a tensor's content."""

import torch

from fabric.ckpt_server.state.training_state import capture
from fabric.client.state.mutation_guard import MutationGuard, small_entries, tensor_entries
from fabric.protocol.rules.divergence import MAX_NUMBERS, MAX_TENSORS


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
    assert len(entries) == MAX_NUMBERS and sum(len(p) + len(v) for p, v in entries) < 10_000


def entries_of(objects):
    return dict(tensor_entries(objects, MutationGuard(capture(objects, 0))))


def test_each_tensor_of_a_small_state_has_an_entry_that_shows_any_change():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    objects = {"model": model, "optimizer": optimizer, "ema": torch.nn.Linear(2, 2)}
    before = entries_of(objects)
    assert "~parameter model/0.weight" in before
    assert "~buffer model/1.running_mean" in before
    assert "~object ema/bias" in before
    with torch.no_grad():
        for path, tensor in (
            ("~parameter model/0.weight", model[0].weight),
            ("~buffer model/1.running_var", model[1].running_var),
        ):
            tensor.view(-1)[3] += 1.0
            after = entries_of(objects)
            assert [x for x in after if after[x] != before[x]] == [path]
            before = after
    moment = optimizer.state[model[0].weight]["exp_avg"]
    moment += 1.0
    changed = [x for x, value in entries_of(objects).items() if value != before[x]]
    assert len(changed) == 1 and changed[0].startswith("~optimizer optimizer/state/0/exp_avg")


def test_the_tensors_of_a_large_state_share_entries_with_their_neighbours():
    objects = {"model": torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(200)])}
    before = entries_of(objects)
    assert len(before) <= MAX_TENSORS
    with torch.no_grad():
        objects["model"][7].weight.mul_(1.5)
    after = entries_of(objects)
    (path,) = [x for x in after if after[x] != before[x]]
    assert path.startswith("~parameter model/") and " to model/" in path


def test_the_samples_of_a_tensor_end_with_the_tensor():
    memory = torch.zeros(400)

    class Values:
        def state_dict(self):
            return {"values": memory[:275]}  # it has 1,100 bytes, and 16 samples of 64 bytes

        def load_state_dict(self, state):
            raise NotImplementedError

    before = entries_of({"ema": Values()})
    memory[275:] = 1.0
    assert entries_of({"ema": Values()}) == before
    memory[200:275] = 1.0
    assert entries_of({"ema": Values()}) != before
