"""A GAN whose critic and generator take turns from step to step, each with an optimizer of its own."""

import recipe
import torch

AREA = "Own loops"


class Images(recipe.Samples):
    """A sample and the noise from which the generator makes its picture."""

    def __getitem__(self, index):
        x, _ = super().__getitem__(index)
        return x, torch.randn(4, generator=torch.Generator().manual_seed(1000 + index))


torch.manual_seed(0)
generator = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
critic = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model = torch.nn.ModuleDict({"generator": generator, "critic": critic})
optimizers = {
    "critic": torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.99)),
    "generator": torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.99)),
}
loss_fn = torch.nn.functional.binary_cross_entropy_with_logits
data = Images()


def phase_of(number):
    return "critic" if number % 2 == 0 else "generator"


def loss_of(phase, x, noise):
    made = generator(noise)
    if phase == "generator":
        return loss_fn(critic(made), torch.ones(len(x), 1))
    real, false = critic(x), critic(made.detach())
    return loss_fn(real, torch.ones_like(real)) + loss_fn(false, torch.zeros_like(false))


def update(phase):
    optimizers[phase].step()
    for optimizer in optimizers.values():
        optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizers)
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        phase = phase_of(step.number)
        for x, noise in step:
            loss = loss_of(phase, x, noise)
            step.backward(loss)
            session.metrics(loss=loss.item() * len(x))
        update(phase_of(step.number))
        recipe.note(step.number, loss=step.metrics["loss"] / recipe.GLOBAL_BATCH)
    session.close()
else:
    for number, [(x, noise)] in recipe.plain_steps(data, recipe.STEPS):
        phase = phase_of(number)
        loss = loss_of(phase, x, noise)
        loss.backward()
        update(phase)
        recipe.note(number, loss=loss.item())
recipe.report(model, list(optimizers.values()))
