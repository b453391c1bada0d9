"""Mixed precision with a scaler: an overflow on one replica makes the average infinite on all replicas.

So all skip that step and lower the scale. The scaler is shared state: a joining replica loads it."""

import os

import torch
from toy import STEPS, Samples, loss_fn, make_model

import fabric.client

# The step at which one replica's loss overflows, to show that all replicas skip it. -1: none.
OVERFLOW_AT = int(os.environ.get("EXAMPLE_OVERFLOW_AT", "-1"))


def main() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=25)
    session = fabric.client.attach(model, optimizer, state={"scaler": scaler})
    data = session.loader(Samples(), global_batch_size=24, micro_batch_size=6)
    for step in session.steps(data, until=STEPS):
        for x, y in step:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_fn(model, x, y)
            if step.number == OVERFLOW_AT and os.environ.get("FABRIC_REPLICA") == "r0":
                loss = loss * float("inf")
            step.backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)  # skipped where the average is not finite
        scaler.update()
        print(f"step {step.number}: scale {scaler.get_scale():g}")
        optimizer.zero_grad()
    session.close()


if __name__ == "__main__":
    main()
