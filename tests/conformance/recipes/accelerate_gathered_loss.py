"""accelerate: a loss of the training that the script gathers over the processes."""

import recipe
import torch

AREA = "accelerate"
NEEDS = ("accelerate",)
LAUNCH = "--adopt"
REFUSED = "accelerator.gather in the training loop cannot reach the other replicas"

from accelerate import Accelerator  # noqa: E402

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(recipe.Samples(), recipe.GLOBAL_BATCH // recipe.REPLICAS, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    loss = torch.nn.functional.cross_entropy(model(x), y)
    print(accelerator.gather(loss.detach().repeat(len(x))).mean().item())
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
recipe.report(accelerator.unwrap_model(model))
