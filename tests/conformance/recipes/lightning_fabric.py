"""A loop of Lightning Fabric under --adopt: clipping, a scheduler, and all_reduce of a validation loss.

A replica's part of the step in which it dies is left out, because the loop cannot compute two batches for
one step. Without fabric the script reads the data in the job's order.
"""

import recipe
import torch
from lightning_fabric import Fabric

AREA = "Lightning"
NEEDS = ("lightning_fabric",)
LAUNCH = "--adopt"
UNLIKE = ("disabled", "killed")

torch.manual_seed(0)
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
data = recipe.Samples()
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)
batch = recipe.GLOBAL_BATCH // recipe.REPLICAS
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True))
validation = fabric.setup_dataloaders(torch.utils.data.DataLoader(recipe.Samples(60), batch_size=20))
ordered = [pair for _, [pair] in recipe.plain_steps(data, recipe.STEPS)] if not recipe.FABRIC else []
loss_fn = torch.nn.functional.cross_entropy
steps = 0
while steps < recipe.STEPS:
    for x, y in loader if recipe.FABRIC else ordered[steps : steps + 10]:
        loss = loss_fn(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        steps += 1
        if steps == recipe.STEPS:
            break
    with torch.no_grad():
        losses = [loss_fn(model(x), y) for x, y in validation]
    found = fabric.all_reduce(torch.stack(losses).mean())
recipe.report(model.module, optimizer.optimizer, steps=steps, validation=found.item())
