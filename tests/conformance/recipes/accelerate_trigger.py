"""accelerate: `set_trigger` of one replica ends all loops after the same step; a registered counter."""

import recipe
import torch

AREA = "accelerate"
NEEDS = ("accelerate",)
LAUNCH = "--adopt"

from accelerate import Accelerator  # noqa: E402


class Seen:
    """The number of samples that the job has trained on, an object of register_for_checkpointing."""

    samples = 0

    def state_dict(self):
        return {"samples": self.samples}

    def load_state_dict(self, state):
        self.samples = state["samples"]


class Passes(torch.utils.data.Sampler):
    """A shuffled order with a generator for each pass."""

    def __init__(self, size):
        self.size, self.number = size, 0

    def set_epoch(self, number):
        self.number = number

    def __len__(self):
        return self.size

    def __iter__(self):
        yield from torch.randperm(self.size, generator=torch.Generator().manual_seed(self.number)).tolist()


torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10 * recipe.REPLICAS, 0.5)
order, seen = Passes(240), Seen()
loader = torch.utils.data.DataLoader(
    recipe.Samples(), recipe.GLOBAL_BATCH // 2 // recipe.REPLICAS, sampler=order
)
accelerator.register_for_checkpointing(seen)
model, optimizer = accelerator.prepare_model(model), accelerator.prepare_optimizer(optimizer)
loader, scheduler = accelerator.prepare_data_loader(loader), accelerator.prepare_scheduler(scheduler)
steps, stops = 0, False
for epoch in range(100):
    order.set_epoch(epoch)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            if accelerator.process_index == 0 and steps == recipe.STEPS - 1:
                accelerator.set_trigger()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                steps += 1
                seen.samples += recipe.GLOBAL_BATCH
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and accelerator.check_trigger():
            stops = True
            break
    if stops:
        break
accelerator.end_training()
recipe.report(accelerator.unwrap_model(model), optimizer.optimizer, steps=steps, seen=seen.samples)
