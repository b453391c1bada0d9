"""accelerate: zero_grad at the head of the loop, and last steps in which a replica has no sample."""

import recipe
import torch

AREA = "accelerate"
NEEDS = ("accelerate",)
LAUNCH = "--adopt"

from accelerate import Accelerator  # noqa: E402

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(
    recipe.Samples(50), recipe.GLOBAL_BATCH // recipe.REPLICAS, shuffle=False
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 0
while steps < recipe.STEPS:
    for x, y in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        if accelerator.sync_gradients:
            steps += 1
            if steps == recipe.STEPS:
                break
accelerator.end_training()
recipe.report(accelerator.unwrap_model(model), optimizer.optimizer, steps=steps)
