"""FabricAccelerator: one changed import in a script that uses the Accelerator of accelerate."""

import os
from pathlib import Path

import torch
from accelerate.tracking import GeneralTracker
from toy import STEPS, Samples, loss_fn, make_model

from fabric.integrations.accelerate import FabricAccelerator as Accelerator

PASSES = STEPS // 10
FOLDER = Path(os.environ.get("EXAMPLE_OUTPUT", "accelerate-out"))


class Lines(GeneralTracker):
    """A tracker of one's own: a file of lines."""

    name, requires_logging_directory, tracker = "lines", False, None

    def store_init_configuration(self, values: dict) -> None:
        pass

    def log(self, values: dict, step: int | None = None) -> None:
        with (FOLDER / "log").open("a") as file:
            print(step, values, file=file)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, log_with=Lines())
    accelerator.init_trackers("example")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    loader = torch.utils.data.DataLoader(Samples(240), batch_size=4, shuffle=True)
    held_out = torch.utils.data.DataLoader(Samples(24), batch_size=8)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(
        model, optimizer, loader, held_out, scheduler
    )
    begin = 0
    if "EXAMPLE_CHECKPOINT" in os.environ:  # such as accelerate-out/pass-0
        accelerator.load_state(os.environ["EXAMPLE_CHECKPOINT"])
        begin = int(os.environ["EXAMPLE_CHECKPOINT"].rpartition("-")[2]) + 1

    for number in range(begin, PASSES):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model, x, y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        with torch.no_grad():
            losses = [accelerator.gather_for_metrics(((model(x) - y) ** 2).mean(1)) for x, y in held_out]
        accelerator.log({"held_out": torch.cat(losses).mean().item()}, step=number)
        accelerator.save_state(str(FOLDER / f"pass-{number}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
