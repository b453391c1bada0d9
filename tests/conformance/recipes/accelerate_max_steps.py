"""accelerate: a script that counts its batches up to a limit, which FabricAccelerator knows as max_steps=.

A replica's part of the step in which it dies is left out, because the loop cannot compute two batches for
one step.
"""

import recipe
import torch

AREA = "accelerate"
NEEDS = ("accelerate",)
UNLIKE = ("killed",)

if recipe.FABRIC:
    from fabric.integrations.accelerate import FabricAccelerator as Accelerator
else:
    from accelerate import Accelerator


class Passes(torch.utils.data.Sampler):
    """A shuffled order with a generator for each pass, which it counts itself."""

    def __init__(self, size):
        self.size, self.number = size, 0

    def set_epoch(self, number):
        self.number = number

    def __len__(self):
        return self.size

    def __iter__(self):
        yield from torch.randperm(self.size, generator=torch.Generator().manual_seed(self.number)).tolist()


torch.manual_seed(0)
accelerator = Accelerator(cpu=True, **({"max_steps": recipe.STEPS} if recipe.FABRIC else {}))
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
order = Passes(170)
loader = torch.utils.data.DataLoader(
    recipe.Samples(), recipe.GLOBAL_BATCH // recipe.REPLICAS, sampler=order, drop_last=True
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = epoch = 0
while steps < recipe.STEPS:
    order.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        steps += 1
        if steps == recipe.STEPS:
            break
    epoch += 1
accelerator.end_training()
recipe.report(accelerator.unwrap_model(model), optimizer.optimizer, steps=steps, epochs=epoch)
