"""accelerate: an average of the weights by hand, as in diffusers' scripts that nobody saves."""

import recipe
import torch

AREA = "accelerate"
NEEDS = ("accelerate",)
LAUNCH = "--adopt"
REFUSED = "the training keeps an average of the model in a list of 4 values (accelerate_average_by_hand.py:"

from accelerate import Accelerator  # noqa: E402


class Average:
    def __init__(self, parameters):
        self.shadow = [x.detach().clone() for x in parameters]

    @torch.no_grad()
    def step(self, parameters):
        for kept, x in zip(self.shadow, parameters, strict=True):
            kept.sub_(0.1 * (kept - x))


torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(
    recipe.Samples(), recipe.GLOBAL_BATCH // 2 // recipe.REPLICAS, shuffle=False
)
average = Average(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 0
while steps < recipe.STEPS:
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average.step(model.parameters())
            steps += 1
            if steps == recipe.STEPS:
                break
accelerator.end_training()
kept = float(average.shadow[0].sum())
recipe.report(accelerator.unwrap_model(model), optimizer.optimizer, steps=steps, average=kept)
