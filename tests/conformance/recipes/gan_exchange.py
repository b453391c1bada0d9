"""A GAN by `session.exchange`: the phase comes from the step that `exchange` returns.

The part of a replica that is away is left out, because the loop cannot compute two batches for one step.
"""

import recipe
import torch

AREA = "Own loops"
QUICK = True
UNLIKE = ("killed",)

torch.manual_seed(0)
generator = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
critic = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model = torch.nn.ModuleDict({"generator": generator, "critic": critic})
d_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.99))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.99))
loss_fn = torch.nn.functional.binary_cross_entropy_with_logits
data = recipe.Samples()


def loss_of(phase, x):
    made = generator(x[:, 8:12])  # its noise
    if phase == "generator":
        return loss_fn(critic(made), torch.ones(len(x), 1))
    real, false = critic(x), critic(made.detach())
    return loss_fn(real, torch.ones_like(real)) + loss_fn(false, torch.zeros_like(false))


def update(number):
    (d_optimizer if number % 2 == 0 else g_optimizer).step()
    d_optimizer.zero_grad()
    g_optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, {"critic": d_optimizer, "generator": g_optimizer})
    sampler = session.sampler(len(data), global_batch_size=recipe.GLOBAL_BATCH)
    loader = torch.utils.data.DataLoader(data, batch_size=sampler.per_step, sampler=sampler)
    while session.committed_step < recipe.STEPS:
        for x, _ in loader:
            phase = "critic" if session.committed_step % 2 == 0 else "generator"
            loss_of(phase, x).backward()
            step = session.exchange(weight=len(x))
            update(step.number)
            if session.committed_step >= recipe.STEPS:
                break
    session.close()
else:
    for number, [(x, _)] in recipe.plain_steps(data, recipe.STEPS):
        loss_of("critic" if number % 2 == 0 else "generator", x).backward()
        update(number)
recipe.report(model, [d_optimizer, g_optimizer])
