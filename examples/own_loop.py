"""session.steps: your training loop. When the inner loop ends, fabric averages the gradients and commits."""

import torch
from toy import STEPS, Samples, loss_fn, make_model

import fabric.client


def main() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))

    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    data = session.loader(Samples(), global_batch_size=24, micro_batch_size=6)
    for step in session.steps(data, until=STEPS):
        for x, y in step:
            loss = loss_fn(model, x, y)
            step.backward(loss)
            session.metrics(loss=loss.item() * len(x))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step.number % 20 == 0:
            print(
                f"step {step.number}: loss {step.metrics['loss'] / 24:.4f}, {len(session.members)} replicas"
            )
    session.close()


if __name__ == "__main__":
    main()
