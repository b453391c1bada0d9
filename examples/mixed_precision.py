"""Mixed precision with a scaler: an overflow on one replica is in everybody's average, so all skip that step
together and lower the scale together. The scaler is shared state: a newcomer takes it over."""

import os

import torch
from toy import STEPS, Samples, loss_fn, make_model

import fabric.client

# A step and a replica whose loss overflows, to see that all skip it; none by default.
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
