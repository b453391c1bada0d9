"""accelerate: a scheduler that the script does not prepare, and a weight of the loss by the epoch."""

import recipe
import torch

AREA = "accelerate"
NEEDS = ("accelerate",)
LAUNCH = "--adopt"

from accelerate import Accelerator  # noqa: E402

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
loader = torch.utils.data.DataLoader(
    recipe.Samples(recipe.GLOBAL_BATCH * 6), recipe.GLOBAL_BATCH // recipe.REPLICAS // 2
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 0
for epoch in range(recipe.STEPS // 6):
    for x, y in loader:
        with accelerator.accumulate(model):
            output = model(x)
            loss = torch.nn.functional.cross_entropy(output, y) + 0.1 * epoch * output.square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
                steps += 1
accelerator.end_training()
recipe.report(
    accelerator.unwrap_model(model), optimizer.optimizer, steps=steps, rates=scheduler.get_last_lr()
)
