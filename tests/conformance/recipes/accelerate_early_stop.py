"""accelerate: an early stop after three validations without a better one."""

import recipe
import torch

AREA = "accelerate"
NEEDS = ("accelerate",)
LAUNCH = "--adopt"
REFUSED = "by bad, which is measured, and a replica that joins has not measured what the others have"

from accelerate import Accelerator  # noqa: E402

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
training = torch.utils.data.DataLoader(recipe.Samples(), recipe.GLOBAL_BATCH // recipe.REPLICAS, shuffle=True)
held_out = torch.utils.data.DataLoader(recipe.Samples(48), 24)
model, optimizer, training, held_out = accelerator.prepare(model, optimizer, training, held_out)
best, bad = 1e9, 0
for _ in range(recipe.STEPS):
    model.train()
    for x, y in training:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = [torch.nn.functional.cross_entropy(model(x), y) for x, y in held_out]
    value = float(torch.stack(losses).mean())
    best, bad = (value, 0) if value < best else (best, bad + 1)
    if bad >= 3:
        break
accelerator.end_training()
recipe.report(accelerator.unwrap_model(model), optimizer.optimizer)
