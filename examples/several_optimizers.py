"""Several optimizers: name them at attach, step each as you like."""

import torch
from toy import STEPS, Samples, loss_fn, make_model

import fabric.client


def main() -> None:
    model = make_model()
    first, last = model[0], model[2]
    optimizers = {
        "body": torch.optim.AdamW(first.parameters(), lr=1e-2),
        "head": torch.optim.SGD(last.parameters(), lr=1e-2, momentum=0.9),
    }
    session = fabric.client.attach(model, optimizers)
    data = session.loader(Samples(), global_batch_size=24, micro_batch_size=6)
    for step in session.steps(data, until=STEPS):
        for x, y in step:
            step.backward(loss_fn(model, x, y))
        optimizers["head"].step()
        if step.number % 2:  # committed steps, so that all replicas choose the same optimizer
            optimizers["body"].step()
        model.zero_grad()
    session.close()


if __name__ == "__main__":
    main()
