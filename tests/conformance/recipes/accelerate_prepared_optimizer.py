"""accelerate: a scheduler that is made from the prepared optimizer."""

import recipe
import torch

AREA = "accelerate"
NEEDS = ("accelerate",)
LAUNCH = "--adopt"

from accelerate import Accelerator  # noqa: E402

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(
    recipe.Samples(), recipe.GLOBAL_BATCH // 2 // recipe.REPLICAS, shuffle=False
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 10 * recipe.REPLICAS, 0.5))
steps = 0
while steps < recipe.STEPS:
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps += 1
            if steps == recipe.STEPS:
                break
accelerator.end_training()
rate = scheduler.get_last_lr()[0]
recipe.report(accelerator.unwrap_model(model), optimizer.optimizer, steps=steps, rate=rate)
