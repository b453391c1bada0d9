"""accelerate: a script that counts all batches, saves the count, and goes on with `skip_first_batches`.

A count of all batches would grow by those of a dead replica. So they are left out until it is back.
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
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(
    recipe.Samples(192), recipe.GLOBAL_BATCH // 2 // recipe.REPLICAS, shuffle=False
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
count, folder, done = recipe.OUT / "batches", recipe.OUT / "checkpoint", 0
if count.exists():
    accelerator.load_state(folder)
    done = int(count.read_text())
for _ in range(done // len(loader), 2 * recipe.STEPS // len(loader)):
    skipped = done % len(loader)
    for x, y in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        done += 1
        if done % 10 == 0:
            accelerator.save_state(folder)
            if accelerator.is_main_process:
                count.write_text(str(done))
accelerator.end_training()
recipe.report(accelerator.unwrap_model(model), optimizer.optimizer, batches=done)
