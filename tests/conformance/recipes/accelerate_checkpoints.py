"""accelerate: `save_state` every few steps, and a start that goes on from the newest one by `load_state`."""

import recipe
import torch

AREA = "accelerate"
NEEDS = ("accelerate",)
LAUNCH = "--adopt"
FILES = ("step_*/*.safetensors", "step_*/scheduler.bin")

from accelerate import Accelerator  # noqa: E402


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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
order = Passes(192)
loader = torch.utils.data.DataLoader(
    recipe.Samples(), recipe.GLOBAL_BATCH // 2 // recipe.REPLICAS, sampler=order
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n / (10 * recipe.REPLICAS)))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
per_epoch = len(loader) // 2
saved = sorted(recipe.OUT.glob("step_*"), key=lambda folder: int(folder.name.partition("_")[2]))
steps = 0
if saved:
    accelerator.load_state(str(saved[-1]))
    steps = int(saved[-1].name.partition("_")[2])
first_epoch, skipped = divmod(steps, per_epoch)
for epoch in range(first_epoch, recipe.STEPS // per_epoch):
    order.set_epoch(epoch)
    batches = loader
    if epoch == first_epoch and skipped:
        batches = accelerator.skip_first_batches(loader, skipped * 2)
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                steps += 1
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and steps % 6 == 0:
            accelerator.save_state(str(recipe.OUT / f"step_{steps}"))
accelerator.end_training()
recipe.report(accelerator.unwrap_model(model), optimizer.optimizer, steps=steps)
