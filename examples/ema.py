"""An exponential moving average of the weights: shared state, updated after every committed step."""

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toy import STEPS, Samples, loss_fn, make_model

import fabric.client


def main() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    session = fabric.client.attach(model, optimizer, state={"ema": ema})
    data = session.loader(Samples(), global_batch_size=24, micro_batch_size=6)
    for step in session.steps(data, until=STEPS):
        for x, y in step:
            step.backward(loss_fn(model, x, y))
        optimizer.step()
        ema.update_parameters(model)
        optimizer.zero_grad()
    session.close()


if __name__ == "__main__":
    main()
