"""A loop of Lightning Fabric under --adopt: a sampler, clipping, and all_reduce of a validation loss."""

import recipe
import torch
from lightning_fabric import Fabric

AREA = "Lightning"
NEEDS = ("lightning_fabric",)
LAUNCH = "--adopt"

torch.manual_seed(0)
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
data = recipe.Samples()
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)
sampler = torch.utils.data.SubsetRandomSampler(range(120), generator=torch.Generator().manual_seed(3))
batch = recipe.GLOBAL_BATCH // recipe.REPLICAS
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=batch, sampler=sampler))
validation = fabric.setup_dataloaders(
    torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(120, 160)), batch_size=20)
)
loss_fn = torch.nn.functional.cross_entropy
steps = 0
while steps < recipe.STEPS:
    for x, y in loader:
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
    recipe.note(steps, validation=fabric.all_reduce(torch.stack(losses).mean()))
recipe.report(model.module, optimizer.optimizer, rate=optimizer.param_groups[0]["lr"], steps=steps)
