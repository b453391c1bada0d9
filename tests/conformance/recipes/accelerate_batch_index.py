"""A script that regularizes every second batch by its number in `enumerate`, in accumulated steps.

A replica's part of the step in which it dies is left out, because further batches would shift the numbers.
"""

import recipe
import torch

AREA = "accelerate"
NEEDS = ("accelerate",)
LAUNCH = "--adopt"
UNLIKE = ("killed",)

from accelerate import Accelerator  # noqa: E402

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batch = recipe.GLOBAL_BATCH // 2 // recipe.REPLICAS
loader = torch.utils.data.DataLoader(recipe.Samples(72), batch)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _epoch in range(recipe.STEPS // 3):
    for number, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            if number % 2 == 0:
                loss = loss + 0.1 * next(model.parameters()).square().sum()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
accelerator.end_training()
recipe.report(accelerator.unwrap_model(model), optimizer.optimizer)
