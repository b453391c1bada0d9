"""accelerate: mixed precision with its handlers and a GradScaler, which skips a loss that overflows."""

import recipe
import torch

AREA = "accelerate"
NEEDS = ("accelerate",)
LAUNCH = "--adopt"
STEPS = 30
TOLERANCE = 2e-2  # half precision rounds a batch otherwise than its micro-batches

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import AutocastKwargs, GradientAccumulationPlugin, GradScalerKwargs  # noqa: E402


class Outlier(recipe.Samples):
    """One sample is too large."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (x * 1e38 if index == 77 else x), y


torch.manual_seed(0)
scaling = GradScalerKwargs(init_scale=2.0**6, growth_interval=5)
handlers = [AutocastKwargs(cache_enabled=False), scaling]
accelerator = Accelerator(
    cpu=True,
    mixed_precision="bf16",
    gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
    kwargs_handlers=handlers,
)
# accelerate makes this scaler for fp16 on a GPU, and none on a processor.
accelerator.scaler = torch.amp.GradScaler("cpu", **scaling.to_kwargs())
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = torch.utils.data.DataLoader(
    dataset=Outlier(), batch_size=recipe.GLOBAL_BATCH // 2 // recipe.REPLICAS
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 0
for _ in range(recipe.STEPS // 10):
    for x, y in loader:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                steps += 1
            optimizer.step()
            optimizer.zero_grad()
accelerator.end_training()
recipe.report(accelerator.unwrap_model(model), optimizer.optimizer, scaler=accelerator.scaler.state_dict())
