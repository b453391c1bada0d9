"""A codebook whose sizes and sums forward averages over time (VQ): named by pattern, averaged by weight."""

import recipe
import torch

AREA = "Buffers that forward changes"
TOLERANCE = 5e-2

torch.manual_seed(0)


class Codebook(torch.nn.Module):
    """Codes are the quotient of two moving averages, so that their average over replicas is exact."""

    def __init__(self, codes=6, size=8):
        super().__init__()
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", torch.randn(codes, size))

    def forward(self, x):
        codes = self.sums / self.counts[:, None]
        nearest = torch.cdist(x, codes).argmin(1)
        if self.training:
            with torch.no_grad():
                chosen = torch.nn.functional.one_hot(nearest, len(codes)).float()
                rate = 0.01 * len(x) / 4
                self.counts.lerp_(chosen.mean(0), rate)
                self.sums.lerp_(chosen.T @ x / len(x), rate)
        quantised = codes[nearest]
        return x + (quantised - x).detach(), (x - quantised.detach()).square().mean()


encoder, codebook, decoder = torch.nn.Linear(16, 8), Codebook(), torch.nn.Linear(8, 4)
model = torch.nn.ModuleDict({"encoder": encoder, "codebook": codebook, "decoder": decoder})
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
data = recipe.Samples()


def loss_of(x, y):
    hidden, distance = codebook(encoder(x))
    return torch.nn.functional.cross_entropy(decoder(hidden), y) + 0.1 * distance


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer, buffers={"codebook.*": "average"})
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(loss_of(x, y))
        optimizer.step()
        optimizer.zero_grad()
    session.close()
else:
    for _, micro_batches in recipe.plain_steps(data, recipe.STEPS, micro_batch=4):
        for x, y in micro_batches:
            (loss_of(x, y) * len(x) / recipe.GLOBAL_BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
recipe.report(torch.nn.ModuleDict({"encoder": encoder, "decoder": decoder}), optimizer)
