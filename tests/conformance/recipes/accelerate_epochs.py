"""accelerate: epochs over a weighted sampler, accumulation, clipping, a scheduler, and an evaluation."""

import recipe
import torch

AREA = "accelerate"
NEEDS = ("accelerate",)
LAUNCH = "--adopt"
QUICK = True

from accelerate import Accelerator  # noqa: E402


class Draws(torch.utils.data.Sampler):
    """As WeightedRandomSampler, with a generator for each pass."""

    def __init__(self, weights, count):
        self.weights, self.count, self.number = torch.as_tensor(weights), count, 0

    def set_epoch(self, number):
        self.number = number

    def __len__(self):
        return self.count

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.number)
        yield from torch.multinomial(self.weights, self.count, True, generator=generator).tolist()


torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = recipe.Samples()
draws = Draws([1.0 + i % 3 for i in range(len(data))], 192)
loader = torch.utils.data.DataLoader(data, recipe.GLOBAL_BATCH // 2 // recipe.REPLICAS, sampler=draws)
held_out = torch.utils.data.DataLoader(recipe.Samples(48), 16)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n / (10 * recipe.REPLICAS)))
model, optimizer, loader, held_out, scheduler = accelerator.prepare(
    model, optimizer, loader, held_out, scheduler
)
loss_fn = torch.nn.functional.cross_entropy
steps = 0
for epoch in range(recipe.STEPS // 8):
    draws.set_epoch(epoch)
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_fn(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                steps += 1
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in held_out]
    if accelerator.is_main_process:
        recipe.note(8 * epoch + 7, accuracy=torch.cat(right).float().mean().item())
accelerator.end_training()
trained, moments = accelerator.unwrap_model(model), optimizer.optimizer
model, optimizer, loader, scheduler = accelerator.free_memory(model, optimizer, loader, scheduler)
recipe.report(trained, moments, steps=steps, freed=model is None)
