"""An update within the loop over the micro-batches, as a GAN's critic makes it without fabric."""

import recipe
import torch

import fabric.client

AREA = "Own loops"
REFUSED = "Adam.step was called within the loop over the micro-batches"

torch.manual_seed(0)
generator, critic = torch.nn.Linear(4, 16), torch.nn.Linear(16, 1)
model = torch.nn.ModuleDict({"generator": generator, "critic": critic})
d_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2)
session = fabric.client.attach(model, [d_optimizer, g_optimizer])
data = session.loader(recipe.Samples(), global_batch_size=24, micro_batch_size=4)
for step in session.steps(data, until=recipe.STEPS):
    for x, _ in step:
        made = generator(x[:, :4])
        step.backward(critic(made.detach()).mean() - critic(x).mean())
        d_optimizer.step()
        d_optimizer.zero_grad()
        step.backward(-critic(made).mean())
    g_optimizer.step()
    g_optimizer.zero_grad()
session.close()
