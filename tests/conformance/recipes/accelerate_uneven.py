"""accelerate: a last step of each pass with fewer batches than others, the last of which is short."""

import recipe
import torch

AREA = "accelerate"
NEEDS = ("accelerate",)
LAUNCH = "--adopt"

from accelerate import Accelerator  # noqa: E402

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batch = recipe.GLOBAL_BATCH // 2 // recipe.REPLICAS
loader = torch.utils.data.DataLoader(recipe.Samples(53), batch, sampler=list(range(53)))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 0
for _epoch in range(recipe.STEPS // 2):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            steps += accelerator.sync_gradients
accelerator.end_training()
recipe.report(accelerator.unwrap_model(model), optimizer.optimizer, batches=len(loader), steps=steps)
